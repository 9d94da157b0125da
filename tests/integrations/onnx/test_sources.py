# SPDX-License-Identifier: Apache-2.0
"""The operator's sources compile against the core's, so that changes of the core cannot break them unnoticed."""

import shlex
import subprocess

import pytest

from dynaxx.core import build
from dynaxx.integrations.onnx.library import SOURCE


@pytest.mark.parametrize("source", sorted(SOURCE.glob("*.cpp")), ids=lambda path: path.name)
def test_sources_compile_against_the_core(source):
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = ["-fsyntax-only", "-std=c++17", '-DDYNAXX_SOURCE_HASH=""', f"-I{build.SOURCE}"]
    done = subprocess.run([*shlex.split(compiler), *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {path.name for path in build.SOURCE.glob("*.cpp")}
    assert source.name not in names, "objects of both folders lie in one"
