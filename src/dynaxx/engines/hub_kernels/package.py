# SPDX-License-Identifier: Apache-2.0
"""Write dynaxx's attention as a `torch-universal` kernel package.

Hugging Face's `kernels` loads a package from any path under a name of its own, beside other versions of it. So the
copy imports nothing by the name `dynaxx`: imports become relative, and the names of its ops end in a digest of the
sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from string import Template

import dynaxx
from dynaxx.arguments import typed
from dynaxx.storage import new_folder

NAME = "dynaxx-attention"
FOLDER = NAME.replace("-", "_")
# The rooms up to `ops`, and FlashAttention's functions over them.
ROOMS = (
    *("errors.py", "printable.py", "storage.py", "forks.py", "arguments.py", "settings.py", "lazy.py"),
    "derivatives.py",
    *("core", "layout", "patterns", "kernels", "selection", "ops", "integrations/flash_attn"),
)

FRONT = Template('''\
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention for CPU and GPU: dynaxx's kernels, and FlashAttention's functions over them."""

__version__ = "$version"

from .integrations.flash_attn.attention import flash_attn_func, flash_attn_varlen_func
from .integrations.flash_attn.kvcache import flash_attn_with_kvcache
from .layout import BlockLayout
from .ops import sparse_attention
from .patterns import Causal, GlobalTokens, Sink, SlidingWindow
from .patterns.packed import packed_layout

__all__ = [
    "BlockLayout", "Causal", "GlobalTokens", "Sink", "SlidingWindow", "flash_attn_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "packed_layout", "sparse_attention",
]
''')

BUILD = Template("""\
[general]
name = "$name"
version = 1
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
""")


@typed
def write_kernel_package(out: str | os.PathLike[str]) -> Path:
    """Write a kernel package: `build.toml`, its source in `torch-ext`, and `build/torch-universal`, ready to be loaded.

    Args:
        out: an empty or missing folder. It appears only when it is complete.

    Returns:
        The folder, for `kernels.get_local_kernel`.

    Raises:
        ValueError: `out` already exists.
    """
    target = Path(out)
    with new_folder(target) as folder:
        _fill(folder, Path(dynaxx.__file__).parent)
    return target


def _fill(target: Path, source: Path) -> None:
    """Write the package of the sources in `source` into an empty folder."""
    files = _files(source)
    digest = hashlib.blake2b(b"\0".join(files[name] for name in sorted(files)), digest_size=6).hexdigest()
    made = target / "torch-ext" / FOLDER
    for name, content in files.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_rewritten(name, content, digest) if name.endswith(".py") else content)
    for name in ("integrations/__init__.py", "integrations/flash_attn/__init__.py"):  # dynaxx's own load lazily
        (made / name).write_text('"""Part of a kernel package."""\n', encoding="utf-8")
    (made / "__init__.py").write_text(FRONT.substitute(version=dynaxx.__version__), encoding="utf-8")
    (target / "build.toml").write_text(BUILD.substitute(name=NAME), encoding="utf-8")
    variant = target / "build" / "torch-universal"
    shutil.copytree(made, variant)
    metadata = {"id": f"_{FOLDER}_{digest}", "name": NAME, "version": 1, "license": "Apache-2.0", "python-depends": [],
                "backend": {"type": "cpu"}}  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def _files(source: Path) -> dict[str, bytes]:
    """Return the files of the package by their path in it."""
    found = {}
    for room in ROOMS:
        path = source / room
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and ".so" not in file.suffixes:
                found[file.relative_to(source).as_posix()] = file.read_bytes()
    return found


def _rewritten(name: str, content: bytes, digest: str) -> bytes:
    """Return a source file whose imports are relative and whose ops have names of their own."""
    up = "." * (name.count("/") + 1)
    text = content.decode("utf-8")
    text = re.sub(r"^(\s*)from dynaxx\.([\w.]+) import", rf"\1from {up}\2 import", text, flags=re.MULTILINE)
    text = re.sub(r"^import dynaxx$", f"from {up} import __version__ as _version", text, flags=re.MULTILINE)
    text = text.replace("dynaxx.__version__", "_version")
    text = re.sub(
        r"^(\s*)import dynaxx\.([\w.]+)\.(\w+) as (\w+)", rf"\1from {up}\2 import \3 as \4", text, flags=re.MULTILINE
    )
    text = text.replace('"dynaxx::', f'"{FOLDER}_{digest}::').replace(
        "torch.ops.dynaxx.", f"torch.ops.{FOLDER}_{digest}."
    )
    return text.encode("utf-8")
