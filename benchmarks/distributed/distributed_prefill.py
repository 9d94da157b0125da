# SPDX-License-Identifier: Apache-2.0
r"""Time to first token and peak memory of a Llama-3.1-8B-shaped prompt with the sequence split over GPUs.

    torchrun --nproc-per-node 2 benchmarks/distributed/distributed_prefill.py --out found.json  # 262,144 tokens, 2 GPUs
    torchrun --nproc-per-node 2 benchmarks/distributed/distributed_prefill.py --small --out found.json  # CPU, seconds

Random weights: time and memory do not depend on them. Rows, in turns in one process group:

    torch          dense, torch's own context parallel (ring attention over SDPA); on GPUs only
    dynaxx dense   dense, `dx.apply(model, mesh=mesh)`
    dynaxx sparse  `dx.apply(model, policy, mesh=mesh)`: a window of 4,096 tokens and 10 % of the blocks beside it

Before anything is timed, a short prompt's logits under the mesh are compared with one device's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx.distributed.peer_memory import peer_memory_bytes
from dynaxx.integrations.transformers.apply_policy import model_facts

SHAPE = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
SMALL = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip


def make_model(args: argparse.Namespace, device: torch.device) -> Any:
    """Build the model, the same on every rank."""
    torch.manual_seed(0)
    shape = SMALL if args.small else SHAPE
    config = LlamaConfig(**shape, max_position_embeddings=args.tokens, rope_theta=500_000.0, use_cache=False)
    with device:
        torch.set_default_dtype(torch.float32 if args.small else torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def check(model: Any, policy: dx.Policy, mesh: DeviceMesh, device: torch.device) -> None:
    """Compare a short prompt under the mesh with one device.

    Raises:
        AssertionError: they differ by more than the dtype explains.
    """
    seqlen = 512 * mesh.size() + 100
    ids = torch.randint(SMALL["vocab_size"], (1, seqlen), generator=torch.Generator().manual_seed(1)).to(device)
    for rules in (None, policy):
        with dx.apply(model, rules):
            wanted = model(ids).logits
        with dx.apply(model, rules, mesh=mesh) as handle:
            got = handle.gather(model(**handle.shard(ids)).logits)
        spread = float(wanted.float().std())
        error = float((got - wanted).float().abs().mean()) / spread
        limit = 1e-4 if wanted.dtype == torch.float32 else 0.05
        assert error < limit, f"logits differ by {error:.2e} of their spread, more than {limit}"


def first_token(model: Any, batch: dict[str, Any]) -> None:
    """Run the prompt; logits of the last own token alone are made."""
    model(**batch, logits_to_keep=1)


def torch_context_parallel(model: Any, ids: torch.Tensor, mesh: DeviceMesh) -> Callable[[], None]:
    """Return a dense prefill through torch's context parallel.

    Transformers would make a mask of all tokens, since it takes the gaps of a part's positions for packed documents.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from transformers.models.llama import modeling_llama

    positions = torch.arange(ids.shape[1], device=ids.device)[None]

    def run() -> None:
        own, where = ids.clone(), positions.clone()
        without_mask = mock.patch.object(modeling_llama, "create_causal_mask", return_value=None)
        with without_mask, context_parallel(mesh, buffers=[own, where], buffer_seq_dims=[1, 1]):
            model(input_ids=own, position_ids=where, logits_to_keep=1, attention_mask=None)

    return run


def measure(run: Callable[[], None], device: torch.device, turns: int, shares: bool = True) -> dict[str, float]:
    """Return the median time of the slowest rank, in seconds, and the peak memory of any rank, in GiB.

    It includes memory that GPUs share, which torch's allocator does not count, if the run `shares` it.
    """
    times = []
    for turn in range(turns + 1):  # the first compiles
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            times.append(time.perf_counter() - start)
    shared = peer_memory_bytes(dist.group.WORLD) if shares else 0
    peak = (torch.cuda.max_memory_allocated() + shared) / 2**30 if device.type == "cuda" else 0.0
    found = torch.tensor([statistics.median(times), peak], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"seconds": float(found[0]), "GiB": float(found[1])}


def add(rows: list[dict[str, Any]], args: argparse.Namespace, name: str, found: dict[str, float]) -> None:
    """Print a row, and write all rows so far."""
    rows.append({"prefill": name, **found})
    if dist.get_rank() == 0:
        print(f"{name:>14}  {found['seconds']:8.3f} s  {found['GiB']:6.1f} GiB", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"rows": rows, "tokens": args.tokens, "ranks": dist.get_world_size()}))


@torch.no_grad()
def main() -> None:
    """Check, time in turns, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--tokens", type=int, help="of the prompt; 262,144 by default, 4,096 with --small")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU through gloo, to try the script")
    args = parser.parse_args()
    args.tokens = args.tokens or (4096 if args.small else 262_144)
    device = torch.device("cpu") if args.small else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for advised in ("TORCH_NCCL_HIGH_PRIORITY", "DYNAXX_COPY_ENGINES"):  # by docs/guides/distributed.md
        os.environ.setdefault(advised, "1")
    dist.init_process_group("gloo" if args.small else "nccl", timeout=timedelta(minutes=5))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("sequence",))
    model = make_model(args, device)
    rule = dx.Rule.of(dx.SlidingWindow(4096 if not args.small else 256) | dx.TopK(0.1))
    policy = dx.Policy(model=model_facts(model), rules=(rule,), block_size=64 if args.small else 128)
    check(model, policy, mesh, device)
    ids = torch.randint(SMALL["vocab_size"], (1, args.tokens), generator=torch.Generator().manual_seed(2)).to(device)
    rows = []
    for name, rules in (("dynaxx dense", None), ("dynaxx sparse", policy)):
        with dx.apply(model, rules, mesh=mesh) as handle:
            run = lambda handle=handle: first_token(model, handle.shard(ids))
            add(rows, args, name, measure(run, device, args.turns))
    if device.type == "cuda":  # last: a failure of its own leaves the rows above
        add(rows, args, "torch", measure(torch_context_parallel(model, ids, mesh), device, args.turns, shares=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
