# SPDX-License-Identifier: Apache-2.0
"""`dynaxx convert`: give a dense Llama native sparse attention, or tokens that an indexer chooses."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaxx.cli.options import Dtype, JsonOption, ModelArgument, OutOption, QuietOption
from dynaxx.cli.running import Finish, load, progress_of, running

if TYPE_CHECKING:
    from torch import nn


class Compression(StrEnum):
    """How to compress a window of keys into one key."""

    mean = "mean"
    weighted = "weighted"
    mlp = "mlp"


class Target(StrEnum):
    """The kind of attention to convert a model to."""

    nsa = "nsa"
    indexed = "indexed"


class IndexPrecision(StrEnum):
    """The precision to which an indexer's queries and keys are rounded."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    int8 = "int8"


SAMPLE = 1024
OWN = {  # options that the other target has no use for
    Target.nsa: ("slc_count", "slc_block", "window", "compression", "dense_gate"),
    Target.indexed: ("tokens", "token_block", "index_heads", "index_dim", "precision", "text"),
}


def convert(
    context: typer.Context,
    model: ModelArgument,
    out: OutOption,
    to: Annotated[
        Target, typer.Option(help="nsa: Native Sparse Attention; indexed: tokens that an indexer chooses.")
    ] = Target.nsa,
    slc_count: Annotated[int, typer.Option(min=1, help="nsa: blocks that each query selects.")] = 16,
    slc_block: Annotated[int, typer.Option(help="nsa: tokens per selected block: 16, 32, 64 or 128.")] = 64,
    window: Annotated[int, typer.Option(min=1, help="nsa: keys of the window branch.")] = 512,
    compression: Annotated[
        Compression, typer.Option(help="nsa: how to compress a window of keys into one key.")
    ] = Compression.mlp,
    dense_gate: Annotated[
        float, typer.Option(help="nsa: initial gate of the selected branch; the other branches share the rest.")
    ] = 0.96,
    tokens: Annotated[int, typer.Option(min=1, help="indexed: tokens that each query attends to.")] = 2048,
    token_block: Annotated[int, typer.Option(help="indexed: neighbours chosen together: 1, 2, 4 or 8.")] = 1,
    index_heads: Annotated[int, typer.Option(min=1, help="indexed: heads of the indexer.")] = 8,
    index_dim: Annotated[int, typer.Option(min=1, help="indexed: width of its queries and keys.")] = 128,
    precision: Annotated[
        IndexPrecision, typer.Option(help="indexed: what its queries and keys are rounded to.")
    ] = IndexPrecision.fp32,
    text: Annotated[
        str, typer.Option(help=f"indexed: a file, or pydoc; {SAMPLE:,} tokens of it set the indexers' weights.")
    ] = "pydoc",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Dtype of the weights.")] = Dtype.float32,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Convert a dense Llama to trained sparse attention.

    --to nsa: native sparse attention (NSA), with gates that start close to dense attention. --to indexed: attention to
    tokens that a small indexer chooses. The result has the weights of the dense model; fine-tune it. Load DIR with
    transformers' from_pretrained after `import dynaxx.trained.transformers.nsa_llama`, or `indexed_llama`. DIR
    must not exist yet; it appears once it is complete.

    \b
    Examples:
      dynaxx convert smollm2 --out smollm2-nsa
      dynaxx convert ./llama --out ./llama-nsa --slc-count 32 --compression mean
      dynaxx convert smollm2 --to indexed --out smollm2-indexed --tokens 1024
    """
    with running(as_json) as finish:
        from dynaxx.lab.files import new_folder
        from dynaxx.lab.models import LoadedModel, save_model

        _check_options(context, to)
        if to is Target.indexed:
            from dynaxx.lab.texts import load_text
            from dynaxx.trained.tokens.choice import TopKTokens
            from dynaxx.trained.transformers.indexed_llama import convert_to_indexed

            sample_text = load_text(text)
            with new_folder(out) as folder:
                dense, tokenizer = load(model, "cpu", dtype, progress_of(quiet))
                choice = TopKTokens(tokens, token_block)
                sample = tokenizer(sample_text[: 16 * SAMPLE], return_tensors="pt")["input_ids"][:, :SAMPLE]
                made = convert_to_indexed(
                    dense,
                    choice,
                    index_heads=index_heads,
                    index_dim=index_dim,
                    precision=precision.value,
                    sample=sample,
                )
                save_model(LoadedModel(made, tokenizer), folder)
            _finish(finish, out, made, ("indexer.",), {"tokens": tokens, "block_size": token_block})
            return
        if not 0 < dense_gate < 1:
            raise ValueError(f"--dense-gate must be between 0 and 1, got {dense_gate}")
        from dynaxx.trained.nsa.spans import NsaSizes
        from dynaxx.trained.transformers.nsa_llama import convert_to_nsa

        sizes = NsaSizes(
            cmp_block=min(32, slc_block),
            cmp_stride=min(16, slc_block),
            slc_block=slc_block,
            slc_count=slc_count,
            window=window,
        )
        rest = (1 - dense_gate) / 2
        with new_folder(out) as folder:
            dense, tokenizer = load(model, "cpu", dtype, progress_of(quiet))
            gates = rest, dense_gate, rest
            made = convert_to_nsa(dense, sizes, compression=compression.value, gate_init=gates)
            save_model(LoadedModel(made, tokenizer), folder)
        _finish(finish, out, made, ("gate.", "compress"), {"sizes": made.config.nsa_sizes})


def _check_options(context: typer.Context, to: Target) -> None:
    """Raise ValueError for an option that the target has no use for."""
    for other, names in OWN.items():
        sources = {name: context.get_parameter_source(name) for name in names}
        given = [name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]
        if other is not to and given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{options} has no effect with --to {to.value}: it belongs to --to {other.value}")


def _finish(finish: Finish, out: Path, made: nn.Module, new: tuple[str, ...], more: dict[str, Any]) -> None:
    """Say what was made."""
    result = {
        "model": str(out),
        "parameters": sum(p.numel() for p in made.parameters()),
        "new_parameters": sum(p.numel() for name, p in made.named_parameters() if any(part in name for part in new)),
        **more,
    }
    finish(result, f"{result['new_parameters']:,} of {result['parameters']:,} parameters are new", files=[out])
