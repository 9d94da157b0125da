# SPDX-License-Identifier: Apache-2.0
"""`dynaxx convert`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dynaxx.cli.options import Dtype, JsonOption, ModelArgument, OutOption, QuietOption
from dynaxx.cli.running import load, progress_of, running, tool


class Compression(StrEnum):
    """How to compress a window of keys into one key."""

    mean = "mean"
    weighted = "weighted"
    mlp = "mlp"


def convert(
    model: ModelArgument,
    out: OutOption,
    slc_count: Annotated[int, typer.Option(min=1, help="Blocks that each query selects.")] = 16,
    slc_block: Annotated[int, typer.Option(help="Tokens per selected block: 16, 32, 64 or 128.")] = 64,
    window: Annotated[int, typer.Option(min=1, help="Keys of the window branch.")] = 512,
    compression: Annotated[
        Compression, typer.Option(help="How to compress a window of keys into one key.")
    ] = Compression.mlp,
    dense_gate: Annotated[
        float, typer.Option(help="Initial gate of the selected branch; the other branches share the rest.")
    ] = 0.96,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Dtype of the weights.")] = Dtype.float32,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Convert a dense Llama to a native sparse model.

    Fine-tune the result: it has the weights of the dense model, and its gates start close to dense attention. Load DIR
    with transformers' from_pretrained after `import dynaxx.integrations.transformers.nsa_llama`. DIR must not exist
    yet; it appears once it is complete.

    \b
    Examples:
      dynaxx convert smollm2 --out smollm2-native
      dynaxx convert ./llama --out ./llama-native --slc-count 32 --compression mean
    """
    with running(as_json) as finish:
        if not 0 < dense_gate < 1:
            raise ValueError(f"--dense-gate must be between 0 and 1, got {dense_gate}")
        sizes = tool("nsa", "layout").NativeSizes(
            cmp_block=min(32, slc_block),
            cmp_stride=min(16, slc_block),
            slc_block=slc_block,
            slc_count=slc_count,
            window=window,
        )
        native, models, rest = tool("transformers.nsa_llama", "integrations"), tool("models"), (1 - dense_gate) / 2
        with tool("files").new_folder(out) as folder:
            dense, tokenizer = load(model, "cpu", dtype, progress_of(quiet))
            gates = rest, dense_gate, rest
            made = native.convert_to_native(dense, sizes, compression=compression.value, gate_init=gates)
            models.save_model(models.LoadedModel(made, tokenizer), folder)
        result = {
            "model": str(out),
            "parameters": sum(p.numel() for p in made.parameters()),
            "new_parameters": sum(
                p.numel() for name, p in made.named_parameters() if "gate." in name or "compress" in name
            ),
            "sizes": made.config.native_sizes,
        }
        finish(result, f"{result['new_parameters']:,} of {result['parameters']:,} parameters are new", files=[out])
