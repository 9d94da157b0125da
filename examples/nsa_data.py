# SPDX-License-Identifier: Apache-2.0
"""Training data of the decoders: packed text, or tasks that show what attention reaches.

    python examples/nsa_data.py build/text.bin       # up to 9 MB of what Python and its packages say of themselves

The file is bytes, one document behind another; training reads them as tokens. Every twentieth 64 KiB is held out.
"""

import argparse
import ast
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch

from dynaxx.lab.files import write_bytes
from dynaxx.lab.progress import SilentProgress, make_progress

SECTION = 1 << 16
HELD_OUT = 20  # one section in so many
MARK = 0  # a byte that no text has


def documents(say=lambda name: None):
    """Yield Python's language reference, then docstrings of its library and of installed packages, longest first."""
    yield from topics.values()
    paths = sysconfig.get_paths()
    for folder in (paths["stdlib"], paths["purelib"]):
        files = [path for path in Path(folder).rglob("*.py") if "test" not in str(path).lower()]
        if folder == paths["stdlib"]:
            files = [path for path in files if "site-packages" not in path.parts]
        for path in sorted(files, key=lambda path: (-path.stat().st_size, path.name)):
            say(path.name)
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue
            found = [ast.get_docstring(node) for node in ast.walk(tree)
                     if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
            text = "\n\n".join(doc for doc in found if doc and len(doc) > 80)
            if len(text) > 2000:
                yield text


def pack_text(path, limit=9_000_000, progress=None):
    """Write distinct documents until the limit, all or nothing; return the number of bytes."""
    seen, parts, size = set(), [], 0
    with (progress or SilentProgress()).task("Reading documentation", limit) as task:
        for text in documents(lambda name: task.advance(0, name)):
            data = text.encode("utf-8", "ignore") + b"\n\n"
            if hash(text[:2000]) in seen:
                continue
            seen.add(hash(text[:2000]))
            parts.append(data[: limit - size])
            size += len(parts[-1])
            task.advance(len(parts[-1]))
            if size >= limit:
                break
    write_bytes(path, b"".join(parts))
    return size


class Text:
    """Random stretches of the training part; evaluation on fixed stretches of the held-out part."""

    def __init__(self, path):
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        if len(data) < 2 * HELD_OUT * SECTION // 10:
            raise SystemExit(f"{path} must hold at least {HELD_OUT * SECTION // 5:,} bytes of text, got {len(data):,}")
        section = torch.arange(len(data)) // SECTION
        held = section % HELD_OUT == HELD_OUT // 2 if int(section[-1]) >= HELD_OUT else section == section[-1]
        self.parts = {"train": data[~held], "held_out": data[held]}

    def batch(self, batch, context, seed, part="train"):
        """Return tokens and targets (batch, context) int64."""
        data, generator = self.parts[part], torch.Generator().manual_seed(seed)
        if len(data) <= context + 1:
            raise SystemExit(f"the {part} text has {len(data):,} bytes, too few for a context of {context:,}")
        starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
        rows = torch.stack([data[start : start + context + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


KINDS = 64
KEY, VALUE = 128, 128 + KINDS  # the first of so many keys and values; no ASCII text holds them


class Recall:
    """Multi-query associative recall: pairs of key and value among noise, then each key `ASKS` times, evenly apart.

    Targets are the values.
    """

    ASKS = 4

    def batch(self, batch, context, seed, part="train"):
        """Return tokens and targets (batch, context) int64."""
        generator = torch.Generator().manual_seed(seed + (part == "held_out") * 2**40)
        tokens = torch.randint(2, KEY, (batch, context + 1), generator=generator)
        targets = torch.full((batch, context), -100)
        pairs, half = min(KINDS, context // 16), context // 2
        order = lambda size: torch.rand(batch, size, generator=generator).argsort(1)
        keys = KEY + order(KINDS)[:, :pairs]
        values = torch.randint(VALUE, VALUE + KINDS, (batch, pairs), generator=generator)
        told = torch.arange(pairs) * (half // pairs)
        tokens[:, told], tokens[:, told + 1] = keys, values
        asks = order(self.ASKS * pairs) % pairs
        asked = half + torch.arange(self.ASKS * pairs) * ((context - half) // (self.ASKS * pairs))
        tokens[:, asked], tokens[:, asked + 1] = keys.gather(1, asks), values.gather(1, asks)
        targets[:, asked] = values.gather(1, asks)
        return tokens[:, :-1], targets


class Needles:
    """Pairs of key and value anywhere in the first half of a text; in the second half the keys are asked for.

    Targets are the values. Held-out questions have nothing but their one pair to be answered from: each key is asked
    for once. In training it is asked for `ASKS` times, so that near answers teach a model to find far ones.
    """

    ASKS = 4

    def __init__(self, text):
        self.text = text

    def batch(self, batch, context, seed, part="train"):
        """Return tokens and targets (batch, context) int64; -100 where nothing is asked."""
        generator = torch.Generator().manual_seed(seed + (part == "held_out") * 2**40)
        rows, ends = self.text.batch(batch, context, seed, part)
        tokens = torch.cat([rows, ends[:, -1:]], 1) % KEY
        targets = torch.full((batch, context), -100)
        pairs, places = min(KINDS, context // 16), context // 4  # a place is two tokens of a half
        order = lambda size: torch.rand(batch, size, generator=generator).argsort(1)
        keys = KEY + order(KINDS)[:, :pairs]
        values = torch.randint(VALUE, VALUE + KINDS, (batch, pairs), generator=generator)
        asks = self.ASKS if part == "train" else 1
        told, asked = 2 * order(places)[:, :pairs], 2 * places + 2 * order(places)[:, : asks * pairs]
        tokens.scatter_(1, told, keys).scatter_(1, told + 1, values)
        keys, values = keys.repeat(1, asks), values.repeat(1, asks)
        tokens.scatter_(1, asked, keys).scatter_(1, asked + 1, values)
        targets.scatter_(1, asked, values)
        return tokens[:, :-1], targets


class Copy:
    """Strings of half the context, a mark, and the string again; only the second copy is a target."""

    def batch(self, batch, context, seed, part="train"):
        """Return tokens and targets (batch, context) int64; -100 where nothing is asked."""
        generator = torch.Generator().manual_seed(seed + (part == "held_out") * 2**40)
        half = context // 2
        text = torch.randint(2, 66, (batch, half), generator=generator)
        tokens = torch.cat([text, torch.full((batch, 1), MARK), text], 1)[:, : context + 1]
        targets = tokens[:, 1:].clone()
        targets[:, :half] = -100
        return tokens[:, :context], targets[:, :context]


def make_data(name, text):
    """Return a source of batches by its name."""
    return {"text": lambda: text, "recall": Recall, "copy": Copy, "needle": lambda: Needles(text)}[name]()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--bytes", type=int, default=9_000_000)
    args = parser.parse_args()
    try:
        print(f"{pack_text(args.path, args.bytes, make_progress()):,} bytes in {args.path}", file=sys.stderr)
    except OSError as error:
        parser.error(str(error))
