# SPDX-License-Identifier: Apache-2.0
"""A library runs nothing before it is chosen, is no module to any walker, and is compiled once, whatever interferes."""

import importlib.machinery
import os
import pkgutil
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from setuptools import find_namespace_packages, find_packages

from dynaxx.core import build
from dynaxx.core.library import CACHE_VARIABLE, cache_directory, cpu_status

needs_core = pytest.mark.skipif(cpu_status().kind == "torch", reason="needs the C++ core")
LOAD = "from dynaxx.core.library import load_core; print(load_core('baseline').status)"
COMPILER = """#!/bin/sh
# Stands in for a compiler: copies a finished library instead of linking one, and reports each link.
echo unfinished > "$TMPDIR/left"
for option; do
  test "$option" != -shared || linking=1
  test "$before" != -o || out="$option"
  before="$option"
done
if [ -z "$linking" ]; then echo object > "$out"; exit; fi
echo linked >> "{log}"
{then}
cp "{library}" "$out"
"""


@pytest.fixture
def first_use(tmp_path):
    """Return a function that starts a process which compiles at first use, and its cache's folder."""
    folder = tmp_path / "a cache" / "core"
    compiler, log = tmp_path / "a compiler", tmp_path / "log"

    def start(then="", limit=None, cache=folder.parent):
        compiler.write_text(COMPILER.format(log=log, then=then, library=cpu_status().path))
        compiler.chmod(0o755)
        return subprocess.Popen(
            [sys.executable, "-c", LOAD],
            env={**os.environ, CACHE_VARIABLE: str(cache), "CXX": str(compiler)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=limit,
            start_new_session=True,
        )

    start.folder, start.log = folder, log
    return start


def is_whole(folder):
    """Return whether a cache folder holds a library, its digest and its lock, and nothing else."""
    name = build.library_name("baseline")
    return sorted(path.name for path in folder.iterdir()) == [".lock", name, f"{name}.sha256"]


@needs_core
def test_nothing_of_a_library_runs_when_it_is_loaded():
    """One initialiser is the C runtime's own, which is compiled for every processor."""
    assert initialisers(cpu_status().path) == ["frame_dummy"]


@needs_core
def test_no_walker_takes_a_library_for_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "walked"
    package.mkdir()
    for folder in (package, package / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        shutil.copy(cpu_status().path, folder / build.library_name("baseline"))
    assert not build.library_name("baseline").endswith(tuple(importlib.machinery.all_suffixes()))
    assert [each.name for each in pkgutil.walk_packages([str(tmp_path)])] == ["walked", "walked.inner"]
    for find in (find_packages, find_namespace_packages):
        assert sorted(find(str(tmp_path))) == ["walked", "walked.inner"]
    griffe = pytest.importorskip("griffe")
    walked = griffe.load("walked", search_paths=[tmp_path], force_inspection=True, allow_inspection=True)
    assert set(walked.modules) == {"inner"}
    assert not walked["inner"].modules


@needs_core
def test_processes_compile_once(first_use):
    started = [first_use("sleep 0.5") for _ in range(3)]
    for process in started:
        assert "C++ core for baseline" in process.communicate()[0]
    assert first_use.log.read_text() == "linked\n"
    assert is_whole(first_use.folder)


@needs_core
def test_what_a_killed_process_left_is_removed(first_use):
    killed = first_use("sleep 60")
    while not first_use.log.exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert [path for path in first_use.folder.iterdir() if path.name.startswith(build.TEMPORARY)]
    assert "C++ core for baseline" in first_use().communicate()[0]
    assert is_whole(first_use.folder)


@needs_core
def test_a_full_disk_leaves_torch_and_no_files(first_use):
    small = 1000  # bytes of a file: enough for the digest and not for the library
    said = first_use(limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))).communicate()[0]
    assert "gathers in torch" in said
    assert "failed" in said
    assert [path.name for path in first_use.folder.iterdir()] == [".lock"]
    assert "C++ core for baseline" in first_use().communicate()[0]


@needs_core
@pytest.mark.parametrize("place", ["/dev/null/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written_leaves_torch_and_names_the_fix(first_use, place):
    said = first_use(cache=place).communicate()[0]
    assert "gathers in torch" in said
    assert f"set {CACHE_VARIABLE} to choose another folder" in said


def test_empty_and_relative_folders_of_the_user_are_none(monkeypatch):
    """Otherwise libraries were compiled into the root folder or the current one, and loaded from there."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "")
    for folder in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cache_directory() not in map(Path, ("/.cache/dynaxx", ".cache/dynaxx", "relative/dynaxx"))


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("{sh}", ["{sh}"]), ("'{sh}' -x", ["{sh}", "-x"]), ("{sh} '", None), ("''", None), ("no-such-compiler -x", None)],
)
def test_the_compiler_is_a_path_or_a_command(chosen, found, tmp_path, monkeypatch):
    program = tmp_path / "a compiler"
    program.symlink_to(shutil.which("sh"))
    monkeypatch.setenv("CXX", chosen.format(sh=program))
    assert build.find_compiler() == (found and [each.format(sh=program) for each in found])


def test_compilers_fit_the_control_groups(tmp_path):
    group = tmp_path / "groups" / "outer" / "inner"
    group.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    quotas = lambda: build.cgroup_quotas(tmp_path / "groups", own)
    assert quotas() == []
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert quotas() == [1.5]
    older = tmp_path / "groups" / "cpu,cpuacct" / "box"
    older.mkdir(parents=True)
    own.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n")
    (older / "cpu.cfs_quota_us").write_text("-1\n")
    (older / "cpu.cfs_period_us").write_text("100000\n")
    assert quotas() == []
    (older / "cpu.cfs_quota_us").write_text("300000\n")
    assert quotas() == [3.0]
    own.unlink()
    assert quotas() == []


@pytest.mark.skipif(len(build.buildable_isas()) == 1, reason="needs an x86-64 machine")
def test_an_instruction_set_needs_every_feature():
    from dynaxx.core.build import _FEATURES

    assert build.isas_with(set()) == ("baseline",)
    for isa, features in _FEATURES.items():
        assert build.isas_with(features)[0] == isa
        for feature in features:
            assert isa not in build.isas_with(features - {feature})
    assert {"abm", "bmi1", "bmi2", "f16c", "fma", "movbe"} <= _FEATURES["x86-64-v3"]


def initialisers(library):
    """Return the functions that run when a library is loaded, by name, or by address where there is none."""
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    sections = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    relocations = subprocess.run(["readelf", "-rW", library], capture_output=True, text=True, check=True).stdout
    symbols = subprocess.run(["readelf", "-sW", library], capture_output=True, text=True, check=True).stdout
    assert not any(each in sections for each in (".ctors", ".preinit_array"))
    assert "IRELATIV" not in relocations  # functions that choose others while the library is loaded
    names = {int(line.split()[1], 16): line.split()[-1] for line in symbols.splitlines() if " FUNC " in line}
    array = next(line.split("]", 1)[1].split() for line in sections.splitlines() if " .init_array " in line)
    first, size = int(array[2], 16), int(array[4], 16)
    entries = [line.split() for line in relocations.splitlines() if "RELATIVE" in line or "_64 " in line]
    found = {int(each[0], 16): int(each[-1], 16) for each in entries if each[-1].strip("0123456789abcdef") == ""}
    return [names.get(found[at], hex(found[at])) for at in range(first, first + size, 8)]
