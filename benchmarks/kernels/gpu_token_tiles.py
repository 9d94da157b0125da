# SPDX-License-Identifier: Apache-2.0
r"""Time tile sizes and launch options of the kernels over chosen tokens on a GPU, in turns in one process.

    python benchmarks/kernels/gpu_token_tiles.py forward backward sums latent indexer hopper-indexer --json tiles.json

Each line is one setting; the first of each question is the one that the library uses. Settings that do not compile are
named and skipped. `config.py` and `choose.py` hold what won.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_indexer import draw
from gpu_tokens import SHAPES, Shape, choices, milliseconds

import dynaxx as dx
from dynaxx.kernels.device import gpu_of
from dynaxx.trained.tokens.kernels.gpu import config, gradients, operators
from dynaxx.trained.tokens.kernels.triton import choose

Setting = tuple[str, dict[tuple[Any, str], Any]]  # a name, and attributes of modules


def launches(kind: str, shape: Shape) -> Iterator[Setting]:
    """Yield settings of the forward or the backward of grouped-query heads."""
    module, name = (operators, "forward_launch") if kind == "forward" else (gradients, "backward_launch")
    yield "as it is", {}
    narrow = shape.dim <= 128
    tried: dict[str, list[tuple[int, tuple[int, ...]]]] = {
        "forward": [
            *((rows, sizes) for rows in (16, 32) for sizes in ((32, 4, 1), (64, 4, 1), (64, 4, 2)) if narrow),
            *((16, sizes) for sizes in ((32, 1, 2), (64, 2, 1)) if narrow),
            (64, (32, 4, 2, 128)) if narrow else (64, (32, 4, 2)),
            (64, (64, 4, 1, 168)) if narrow else (64, (64, 4, 1)),
        ],
        "backward": [
            (64, (64, 4, 1)) if narrow else (64, (64, 8, 1)),
            (64, (32, 4, 1)) if narrow else (64, (32, 8, 1)),
            *([(128, (64, 8, 1))] if narrow else []),
        ],
    }
    for rows, numbers in tried[kind]:
        launch = config.LaunchSizes(*numbers)
        yield f"{rows} rows, {numbers}", {
            (config, "most_rows"): lambda *_, rows=rows: rows,
            (module, name): lambda *_, launch=launch: launch,
        }  # fmt: skip


def sums() -> Iterator[Setting]:
    """Yield settings of the sums of rows."""
    yield "as it is", {}
    for numbers in ((16, 4, 3), (16, 4, 4), (32, 4, 2), (32, 2, 3), (32, 8, 3), (64, 4, 2)):
        launch = config.LaunchSizes(*numbers)
        yield f"sums {numbers}", {(gradients, "sum_launch"): lambda *_, launch=launch: launch}


def latent() -> Iterator[Setting]:
    """Yield settings of the steps of the portable latent backward."""
    yield "as it is", {}
    first = config.wide_launches(2, True, gpu_of(torch.device("cuda")))
    for label, dq, rows in (
        ("dq 32 keys, 2 turns", (32, 8, 2), (128, 8, 2)),
        ("rows 256 keys, 1 turn", (64, 8, 1), (256, 8, 1)),
        ("rows 128 keys, 1 turn", (64, 8, 1), (128, 8, 1)),
        ("rows 128 keys, 4 warps", (64, 8, 1), (128, 4, 1)),
    ):
        found = (first[0], config.LaunchSizes(*dq), config.LaunchSizes(*rows))
        yield label, {(gradients, "wide_launches"): lambda *_, found=found: found}


def indexers() -> Iterator[Setting]:
    """Yield settings of the indexer: queries, keys, warps, registers and programs per multiprocessor."""
    yield "as it is", {}
    for numbers in ((64, 64, 4, None, 2), (64, 64, 8, 128, 2), (64, 64, 4, 168, 3), (64, 64, 8, 80, 3),
                    (128, 64, 8, None, 1)):  # fmt: skip
        names = ("BLOCK_Q", "BLOCK_K", "WARPS", "MAX_REGISTERS", "PROGRAMS_PER_PROCESSOR")
        yield f"{numbers}", {(choose, name): number for name, number in zip(names, numbers, strict=True)}


def hopper_indexers() -> Iterator[Setting]:
    """Yield settings of Hopper's indexer: registers and programs per multiprocessor, and the size of the sample."""
    from dynaxx.trained.tokens.kernels.hopper import choose as hopper_choose

    yield "as it is", {}
    names = ("MAX_REGISTERS", "PROGRAMS", "SAMPLED_KEYS")
    for numbers in ((255, 2, 4096), (128, 4, 4096), (168, 3, 2048), (168, 3, 1024)):
        yield f"{numbers}", {(hopper_choose, name): number for name, number in zip(names, numbers, strict=True)}


def compare(question: str, settings: Iterator[Setting], make: Callable[[], Callable[[], Any]], repeats: int = 5) -> Any:
    """Time a call under each setting, in turns."""
    runs: dict[str, Callable[[], Any]] = {}
    for label, attributes in settings:

        def run(attributes: dict[tuple[Any, str], Any] = attributes, made: list[Any] = []) -> None:  # noqa: B006
            with ExitStack() as stack:
                for (module, name), value in attributes.items():
                    stack.enter_context(patch.object(module, name, value))
                config.tile_rows.cache_clear()
                if not made:
                    made.append(make())
                made[0]()
            config.tile_rows.cache_clear()

        try:
            run()
            torch.cuda.synchronize()
            runs[label] = run
        except Exception as error:
            print(f"{question}: {label}: {type(error).__name__} {str(error)[:120]}", flush=True)
    rows = [{"question": question, "setting": label, "ms": ms} for label, ms in milliseconds(runs, repeats).items()]
    for row in rows:
        print(f"{question}: {row['setting']}: {row['ms']:.2f} ms", flush=True)
    torch.cuda.empty_cache()
    return rows


def attention(shape: Shape, backward: bool, backend: str = "auto") -> Callable[[], Callable[[], Any]]:
    """Return a function that prepares a layer and returns the call to time."""
    q, k, v = shape.inputs(shape.queries, shape.keys)
    chosen = choices(shape.queries, shape.keys, shape.tokens // shape.block_size, shape.block_size)
    leaves = (q, k) if shape.dim_v < shape.dim else (q, k, v)
    do = torch.randn(*q.shape[:3], shape.dim_v, device="cuda", dtype=q.dtype)

    def make() -> Callable[[], Any]:
        attend = lambda: dx.trained.selected_attention(q, k, v, chosen, block_size=shape.block_size, backend=backend)
        if not backward:
            return torch.no_grad()(attend)
        out = attend()
        return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)

    return make


def index(keys: int, backend: str) -> Callable[[], Any]:
    """Return a call of the indexer."""
    inputs = [x.bfloat16() for x in draw(keys, keys, 4, 64)]
    return lambda: dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(2048), precision="bf16", backend=backend)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "questions",
        nargs="+",
        choices=("forward", "backward", "sums", "latent", "indexer", "hopper-indexer"),
    )
    parser.add_argument("--shapes", type=int, nargs="+", default=[1, 2], help="numbers of shapes of gpu_tokens.py")
    parser.add_argument("--keys", type=int, default=65536, help="keys and queries of the indexer")
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    rows: list[Any] = []
    for question in args.questions:
        if question == "indexer":
            rows += compare(f"indexer of {args.keys}", indexers(), lambda: index(args.keys, "triton"), 1)
        elif question == "hopper-indexer":
            rows += compare(f"indexer of {args.keys}", hopper_indexers(), lambda: index(args.keys, "hopper"), 3)
        elif question == "latent":
            rows += compare(question, latent(), attention(SHAPES[0], True, "triton"), 3)
        else:
            for shape in (SHAPES[i] for i in args.shapes):
                settings = sums() if question == "sums" else launches(question, shape)
                label = f"{question}, {shape.name}, {shape.keys}"
                rows += compare(label, settings, attention(shape, question != "forward"), 3)
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
