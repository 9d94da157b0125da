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

from dynaxx.core import build as core

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
COMPILER = """#!/bin/sh
# Stands in for a compiler: writes what it is asked for, empty; $FAILS is an option with which it fails.
echo >> "$0.calls"
for option; do
  test "$option" != "$FAILS" || exit 1
  test "$before" != -o || : > "$option"
  before="$option"
done
"""


@pytest.fixture
def tree(tmp_path):
    """Copy the files that a build needs."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so.*", "*.egg-info", ".*_cache", ".hypothesis")
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and (not path.name.startswith(".") or path.name == ".pre-commit-config.yaml"):
            shutil.copy(path, folder)
    for name in ("src", "tests", "docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


@pytest.fixture
def compiler(tmp_path):
    path = tmp_path / "a compiler"  # with a space
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def try_build(tree, kind, compiler, **variables):
    out = tree.parent / "dist"
    out.mkdir(exist_ok=True)
    env = {**os.environ, "CXX": str(compiler), **variables}
    env.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=300)


def build(tree, kind, compiler, **variables):
    done = try_build(tree, kind, compiler, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return tree.parent / "dist" / done.stdout.strip().splitlines()[-1]


def libraries(made):
    """Return the instruction sets whose libraries a wheel holds."""
    with zipfile.ZipFile(made) as wheel:
        return [found[1] for name in wheel.namelist() if (found := re.search(r"core/libdynaxx-(.+)\.so\.\w+$", name))]


def test_a_wheel_is_named_for_this_platform_only_if_it_holds_the_core(tree, compiler):
    with_core = build(tree, "build_wheel", compiler)
    assert re.fullmatch(r"dynaxx-[\w.]+-py3-none-(?!any)\w+\.whl", with_core.name)
    assert libraries(with_core) == [core.supported_isas()[0]]
    calls = compiler.with_name(f"{compiler.name}.calls").read_text()
    assert len(calls) == len(core.sources([".cpp"])) + 1, "each file is compiled once, and one library linked"
    without = build(tree, "build_wheel", "/nonexistent/compiler")  # and what the build before left is not packed
    assert re.fullmatch(r"dynaxx-[\w.]+-py3-none-any\.whl", without.name)
    with zipfile.ZipFile(without) as wheel:
        assert not [name for name in wheel.namelist() if ".so" in name]
        facts = wheel.read(next(name for name in wheel.namelist() if name.endswith("/WHEEL"))).decode()
        assert "Root-Is-Purelib: true" in facts
        packed = {name for name in wheel.namelist() if name.startswith("dynaxx/")}
    sources = tree / "src"
    assert {path.relative_to(sources).as_posix() for path in sources.rglob("dynaxx/**/*") if path.is_file()} <= packed


@pytest.mark.slow
def test_a_release_holds_every_library_or_is_not_built(tree, compiler):
    release = {"DYNAXX_BUILD_ISAS": "all"}
    assert sorted(libraries(build(tree, "build_wheel", compiler, **release))) == sorted(core.buildable_isas())
    assert libraries(build(tree, "build_wheel", compiler, DYNAXX_BUILD_ISAS="baseline")) == ["baseline"]
    failing = {**release, "FAILS": core.ISAS[core.buildable_isas()[0]][-1] if len(core.buildable_isas()) > 1 else "-c"}
    assert try_build(tree, "build_wheel", compiler, **failing).returncode != 0
    assert try_build(tree, "build_wheel", "/nonexistent/compiler", **release).returncode != 0
    refused = try_build(tree, "build_wheel", compiler, DYNAXX_BUILD_ISAS="z80")
    assert "must list" in refused.stderr
    assert refused.returncode != 0


def test_a_checkout_is_installed_without_compiling(tree, compiler):
    build(tree, "build_editable", compiler, FAILS="-c", DYNAXX_BUILD_ISAS="all")
    assert not list((tree / "src").rglob("*.so.*"))


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
    assert not [name for name in names if ".so" in name or name.endswith(".pyc")]


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


@pytest.mark.parametrize("path", ["Makefile", *(f".github/workflows/{name}.yml" for name in ("triton", "wheels"))])
def test_the_tests_that_recipes_run_exist(path):
    named = re.findall(r"tests/[\w/.*]+", (ROOT / path).read_text(encoding="utf-8"))
    assert named
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("./")))]
