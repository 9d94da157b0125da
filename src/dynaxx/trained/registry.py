# SPDX-License-Identifier: Apache-2.0
"""The operations of trained sparse attention, with their backends, and how their kernels are tried."""

from __future__ import annotations

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.kernels.registry import Backend, Operation
from dynaxx.kernels.trials import TRIED, Tried
from dynaxx.trained.nsa.kernels.contract import NsaDecodeKernels, NsaKernels
from dynaxx.trained.tokens.kernels.contract import (
    IndexerKernels,
    IndexerProblem,
    IndexLossKernels,
    IndexLossProblem,
    TokenDecodeKernels,
    TokenKernels,
)

NSA: Operation[AttentionProblem, NsaKernels] = Operation(
    "native sparse attention",
    {
        "hopper": Backend("trained.nsa.kernels.hopper.operators", "trained.support.hopper:nsa_reasons"),
        "triton": Backend("trained.nsa.kernels.triton.operators", "kernels.support.triton:unsupported_reasons"),
        "cpu": Backend("trained.nsa.kernels.cpu", "kernels.attention.cpu.support:unsupported_reasons"),
        "reference": Backend("trained.nsa.kernels.reference", "kernels.attention.reference:unsupported_reasons"),
    },
)
NSA_DECODE: Operation[DecodeProblem, NsaDecodeKernels] = Operation(
    "native sparse attention of a decode step",
    {
        "triton": Backend("trained.nsa.kernels.triton.decode", "kernels.support.triton:decode_reasons"),
        # torch, with attention in the core
        "cpu": Backend("trained.nsa.kernels.reference_decode", "kernels.decode.cpu:unsupported_reasons"),
        "reference": Backend("trained.nsa.kernels.reference_decode", "kernels.decode.reference:unsupported_reasons"),
    },
)
TOKENS: Operation[AttentionProblem, TokenKernels] = Operation(
    "attention over chosen tokens",
    {
        "hopper": Backend("trained.tokens.kernels.hopper.operators", "trained.support.hopper:token_reasons"),
        "triton": Backend("trained.tokens.kernels.triton.operators", "trained.support.triton:token_reasons"),
        "cpu": Backend("trained.tokens.kernels.cpu.attention", "kernels.attention.cpu.support:unsupported_reasons"),
        "reference": Backend(
            "trained.tokens.kernels.reference.attention",
            "trained.tokens.kernels.reference.attention:unsupported_reasons",
        ),
    },
)
TOKEN_DECODE: Operation[DecodeProblem, TokenDecodeKernels] = Operation(
    "attention over chosen tokens of a decoding step",
    {
        "triton": Backend("trained.tokens.kernels.triton.step", "trained.support.triton:token_decode_reasons"),
        "cpu": Backend("trained.tokens.kernels.cpu.decode", "kernels.decode.cpu:unsupported_reasons"),
        "reference": Backend(
            "trained.tokens.kernels.reference.attention", "kernels.decode.reference:unsupported_reasons"
        ),
    },
)
INDEXER: Operation[IndexerProblem, IndexerKernels] = Operation(
    "choice of tokens by an indexer",
    {
        "hopper": Backend("trained.tokens.kernels.hopper.choose", "trained.support.hopper:indexer_reasons"),
        "triton": Backend("trained.tokens.kernels.triton.choose", "trained.support.triton:indexer_reasons"),
        "cpu": Backend("trained.tokens.kernels.cpu.indexer", "trained.tokens.kernels.cpu.indexer:unsupported_reasons"),
        "reference": Backend(
            "trained.tokens.kernels.reference.indexer",
            "trained.tokens.kernels.reference.indexer:unsupported_reasons",
        ),
    },
)
INDEX_LOSS: Operation[IndexLossProblem, IndexLossKernels] = Operation(
    "the loss of an indexer",
    {
        "triton": Backend("trained.tokens.kernels.triton.index_loss", "trained.support.triton:index_loss_reasons"),
        "reference": Backend(
            "trained.tokens.kernels.reference.index_loss",
            "trained.tokens.kernels.reference.index_loss:unsupported_reasons",
        ),
    },
)

TRIAL = f"{__package__}.testing.trial"
TRIED.update(
    {
        NSA.name: Tried(("dtype", "head_dim", "block_size", "group_size", "needs_grad"), ("hopper",), TRIAL),
        TOKENS.name: Tried(("dtype", "head_dim", "head_dim_v", "group_size", "needs_grad"), ("hopper",), TRIAL),
        INDEXER.name: Tried(("dtype", "heads", "dim"), ("hopper",), TRIAL),
    }
)
