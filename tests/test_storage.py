# SPDX-License-Identifier: Apache-2.0
"""Files and folders appear whole or not at all: two writers, killed writers, planted links, full disks, odd files."""

import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynaxx.lab import files
from dynaxx.lab.resume import Steps
from dynaxx.storage import new_folder, remove_leftovers, temporary_folder, write_whole_file

KILLED = """
import os, signal, sys
from pathlib import Path
from dynaxx.storage import new_folder, write_whole_file
target = Path(sys.argv[1])
def die(file=None):
    if file is not None:
        file.write(b"half of")
        file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "file":
    write_whole_file(target, die)
with new_folder(target) as folder:
    (folder / "part").write_text("half of")
    die()
"""


@contextmanager
def largest_file(size):
    """Let files grow to `size` bytes within the block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_folder(target, text):
    with new_folder(target) as folder:
        for i in range(3):
            (folder / str(i)).write_text(text)


def test_a_folder_that_is_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Between making a folder and holding it, another export to the same path may look for leftovers."""
    target, plain, taken = tmp_path / "out", Path.mkdir, []

    def mkdir(path, *args, **kwargs):
        plain(path, *args, **kwargs)
        if path.suffix == ".tmp" and not taken:
            taken.append(path)
            remove_leftovers(target)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with new_folder(target) as folder:
        (folder / "a").write_text("a")
    assert not taken[0].exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_exports_to_one_path_leave_one_whole_result(tmp_path):
    target, both, found = tmp_path / "out", threading.Barrier(2), []

    def export(text):
        try:
            with new_folder(target) as folder:
                both.wait(30)
                for i in range(3):
                    (folder / str(i)).write_text(text)
                both.wait(30)
            found.append(text)
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=export, args=(text,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusal, text = sorted(found, key=len, reverse=True)
    assert "already exists" in refusal
    assert [(target / str(i)).read_text() for i in range(3)] == [text] * 3
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_is_removed_by_the_next(kind, tmp_path):
    target = tmp_path / "out [1]"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), kind])
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    write_folder(target, "a") if kind == "folder" else write_whole_file(target, lambda file: file.write(b"a"))
    assert os.listdir(tmp_path) == [target.name]


def test_what_another_writer_is_writing_stays(tmp_path):
    target = tmp_path / "out"
    with temporary_folder(target) as first, temporary_folder(target) as second:
        write_whole_file(target, lambda file: write_whole_file(target, lambda inner: inner.write(b"inner")))
        assert first.is_dir()
        assert second.is_dir()
    assert os.listdir(tmp_path) == ["out"]


def test_planted_links_are_neither_followed_nor_removed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").touch()
    victim.write_text("precious")
    target = tmp_path / "out"
    for name, link in ((f".out.{os.getpid()}.tmp", folder), (".out.1.00.tmp", victim)):
        (tmp_path / name).symlink_to(link)
    write_folder(target, "a")
    assert victim.read_text() == "precious"
    assert (folder / "mine").exists()
    with pytest.raises(ValueError, match="already exists"):
        write_folder(target, "b")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="link"):
        write_folder(tmp_path / "link", "a")


def test_a_full_disk_leaves_the_old_file_whole_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    files.write_text(path, "old")
    with largest_file(1000), pytest.raises(files.OutOfSpaceError, match=r"a\.json"):
        files.write_text(path, "x" * 5000)
    with largest_file(1000), pytest.raises(OSError, match="out"):
        write_folder(tmp_path / "out", "x" * 5000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_step_that_does_not_fit_leaves_no_half_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    steps = Steps(path, "key")
    steps.remember("first", lambda: 1)
    before = path.read_bytes()
    with largest_file(len(before) + 100), pytest.raises(files.OutOfSpaceError, match=r"steps\.jsonl"):
        steps.remember("large", lambda: "x" * 5000)
    assert path.read_bytes() == before
    steps.remember("last", lambda: 2)
    again = Steps(path, "key")
    assert [name in again for name in ("first", "large", "last")] == [True] * 3


@pytest.mark.parametrize(
    "head", ['{"format": 2}', "[]", "2", '{"format": 2, "key": []}', '{"format": [2]}', "\x00", "{"]
)
def test_odd_tuning_state_is_said_and_measured_again(head, tmp_path, caplog):
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{head}\n{{"name": "first"}}\n')
    steps = Steps(path, "key")
    assert "first" not in steps
    assert "steps.jsonl" in caplog.text
    assert "starting over" in caplog.text
    assert steps.remember("first", lambda: 1) == 1
    assert "first" in Steps(path, "key")


@pytest.mark.parametrize("line", ["[]", '{"name": []}', '{"name": "b", "seconds": "x", "result": 1, "digest": 1}', "{"])
def test_odd_lines_of_tuning_state_end_what_is_known(line, tmp_path, caplog):
    path = tmp_path / "steps.jsonl"
    Steps(path, "key").remember("first", lambda: 1)
    path.write_text(path.read_text() + line + "\n")
    steps = Steps(path, "key")
    assert "first" in steps
    assert "cannot be read from line 3 on" in caplog.text
    steps.remember("second", lambda: 2)
    again = Steps(path, "key")
    assert "second" in again
