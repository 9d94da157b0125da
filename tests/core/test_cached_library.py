# SPDX-License-Identifier: Apache-2.0
"""A compiled library is loaded from the cache only if no other user can have written it."""

import os
import shutil
import subprocess
import sys

import pytest

from dynaxx.core import build, cached_library
from dynaxx.core.library import cpu_status

pytestmark = pytest.mark.skipif(cpu_status().kind == "torch" or not hasattr(os, "geteuid"), reason="needs the C++ core")


@pytest.fixture
def cache(tmp_path):
    """Return a cache that holds this process's library, and a function that reports what a new process does with it."""
    status = cpu_status()
    folder = tmp_path / "core"
    folder.mkdir(mode=0o700)
    library = folder / build.library_name(status.isa)
    shutil.copy(status.path, library)
    library.chmod(0o755)
    cached_library.write_digest(library, build.TEMPORARY)
    code = (
        "from dynaxx.core.library import load_core; import sys; core = load_core(sys.argv[1]);"
        "print(core.status.kind, core.status.why)"
    )

    def say():
        environment = {**os.environ, "DYNAXX_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
        done = subprocess.run(
            [sys.executable, "-c", code, status.isa], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    if cpu_status().kind == "built":
        pytest.skip("the library that was built with the package comes first")
    return library, say


def test_an_own_library_is_loaded(cache):
    _, say = cache
    assert say().startswith("compiled")


@pytest.mark.parametrize("who", ["library", "folder"])
def test_libraries_that_others_can_write_are_not_loaded(cache, who):
    library, say = cache
    (library if who == "library" else library.parent).chmod(0o777)
    found = say()
    assert found.startswith("torch")
    assert "writable by no one else" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("who", ["library", "folder", "digest"])
def test_libraries_that_others_own_are_not_loaded(cache, who):
    library, say = cache
    paths = {"library": library, "folder": library.parent, "digest": cached_library.digest_path(library)}
    os.chown(paths[who], 65534, 65534)
    found = say()
    assert found.startswith("torch")
    assert "must belong to user 0" in found


def test_a_link_is_not_followed(cache, tmp_path):
    library, say = cache
    elsewhere = tmp_path / "elsewhere.so"
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    assert say().startswith("torch")


def test_a_library_that_was_changed_is_not_loaded(cache):
    library, say = cache
    with library.open("ab") as file:
        file.write(b"x")
    found = say()
    assert found.startswith("torch")
    assert "digest differs" in found
    cached_library.digest_path(library).unlink()
    assert "none was compiled yet" in say()


def test_a_pipe_blocks_nobody(cache):
    library, say = cache
    library.unlink()
    os.mkfifo(library)
    assert say().startswith("torch")
