# SPDX-License-Identifier: Apache-2.0
"""Wheels with and without the core, and the source distribution, contain what their names say."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
COMPILER = """#!/bin/sh
# Stands in for a compiler: writes what it is asked for, empty.
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2";; *.cpp) source="$1";; esac
  shift
done
if [ -n "$source" ]; then : > "$(basename "$source" .cpp).o"; else : > "$out"; fi
"""


@pytest.fixture
def tree(tmp_path):
    """Copy the files that a build needs."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".*_cache", ".hypothesis")
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and (not path.name.startswith(".") or path.name == ".pre-commit-config.yaml"):
            shutil.copy(path, folder)
    for name in ("src", "tests", "docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


def build(tree, kind, compiler):
    out = tree.parent / "dist"
    out.mkdir(exist_ok=True)
    env = {**os.environ, "CXX": str(compiler)}
    env.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.strip().splitlines()[-1]


def test_a_wheel_is_named_for_this_platform_only_if_it_holds_the_core(tree):
    compiler = tree.parent / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    with_core = build(tree, "build_wheel", compiler)
    assert re.fullmatch(r"dynaxx-[\w.]+-py3-none-(?!any)\w+\.whl", with_core.name)
    with zipfile.ZipFile(with_core) as wheel:
        assert any(name.endswith("_core_baseline.so") for name in wheel.namelist())
    without = build(tree, "build_wheel", "/nonexistent/compiler")  # and what the build before left is not packed
    assert re.fullmatch(r"dynaxx-[\w.]+-py3-none-any\.whl", without.name)
    with zipfile.ZipFile(without) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith(".so")]
        facts = wheel.read(next(name for name in wheel.namelist() if name.endswith("/WHEEL"))).decode()
        assert "Root-Is-Purelib: true" in facts
        packed = {name for name in wheel.namelist() if name.startswith("dynaxx/")}
    sources = tree / "src"
    assert {path.relative_to(sources).as_posix() for path in sources.rglob("dynaxx/**/*") if path.is_file()} <= packed


def test_a_source_distribution_is_whole(tree):
    made = build(tree, "build_sdist", "/nonexistent/compiler")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        path.relative_to(tree).as_posix()
        for folder in ("src/dynaxx", "tests", "docs", "benchmarks", "examples")
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    wanted |= {"Makefile", "SECURITY.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt", "setup.py"}
    assert wanted - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_lock_file_pins_everything_by_hash_and_names_no_registry():
    lock = (ROOT / "requirements-dev.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)==(\S+)(.*(?:\\\n\s+--hash=sha256:[0-9a-f]{64}.*)+)", lock, flags=re.MULTILINE)
    named = re.findall(r"^[\w.-]+(?:\[[\w,]+\])?==", lock, flags=re.MULTILINE)
    assert len(pinned) == len(named) > 30
    assert not re.search(r"https?://|file:|index-url|find-links", lock)
    versions = {name: version for name, version, _ in pinned}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version and name.replace("_", "-") in versions:
            assert versions[name] == version, f"{name}: make lock"


def test_every_source_file_names_its_licence():
    kinds = {".py", ".cpp", ".h", ".js", ".css", ".html", ".j2"}
    folders = ("src", "tests", "benchmarks", "examples", "docs/_hooks", "docs/_pictures")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    sources = [path for path in found if "__pycache__" not in path.parts]
    assert len(sources) > 500
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in (*sources, ROOT / "setup.py", ROOT / "Makefile")
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in path.read_text().splitlines()[:2])
    ]
    assert not missing, f"begin with `# SPDX-License-Identifier: Apache-2.0`: {missing}"
