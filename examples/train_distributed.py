# SPDX-License-Identifier: Apache-2.0
r"""Fine-tune a Llama with native sparse attention, its sequence split over GPUs: FSDP2 and checkpoints that resume.

    torchrun --nproc-per-node 2 examples/train_distributed.py --out build/long                      # 64k tokens, 2 GPUs
    torchrun --nproc-per-node 2 examples/train_distributed.py --out build/check --device cpu --tokens 256 --hidden 32 \
        --layers 2 --heads 4,2 --steps 4 --save-every 2                                             # CPU, seconds

Each rank holds its chunks of one long sequence (zigzag, so that the work is even) and a part of every parameter. Keys
and values travel inside of attention; all else of the model is per token and needs no change. The model is a Llama
that `convert_to_nsa` made sparse; `--model FOLDER` starts from weights of your own. Text is Python's
documentation, as bytes. A run that finds a checkpoint in `--out` goes on from there.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx import distributed as dxd
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.trained.transformers.nsa_llama import NsaLlamaForCausalLM, convert_to_nsa

GLOO_THREADS = 2  # of a process group


def make_model(args):
    """Build a Llama with native sparse attention, the same on every rank."""
    torch.manual_seed(0)
    if args.model:
        return from_folder(NsaLlamaForCausalLM, args.model)
    q_heads, kv_heads = args.heads
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=args.tokens,
        rope_theta=500_000.0,
        use_cache=False,
    )
    sizes = dx.trained.NsaSizes() if args.tokens >= 4096 else dx.trained.NsaSizes(8, 4, 16, 4, 1, 1, window=32)
    return convert_to_nsa(LlamaForCausalLM(config), sizes, compression="weighted", gate_init=(0.3, 0.5, 0.3))


def shard_model(model, mesh, device):
    """FSDP2: every layer by itself, then the rest; in bf16 on a GPU."""
    model = model.to(device).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh} if device.type == "cpu" else {"mesh": mesh, "mp_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def batch_of(step, tokens):
    """(1, tokens + 1) bytes of text, the same on every rank."""
    text = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    text = text.repeat(-(-2 * tokens // len(text)) + 1)
    start = step * tokens % (len(text) - tokens - 1)
    return text[None, start : start + tokens + 1]


class Training:
    """A sharded model, its optimizer, and the current step."""

    def __init__(self, args, mesh, device):
        self.args, self.mesh, self.device, self.step = args, mesh, device, 0
        self.split = dxd.SequenceSplit.zigzag(args.tokens, mesh.size(), 128 if args.tokens >= 4096 else 16)
        self.model = shard_model(make_model(args), mesh, device)
        dxd.SplitModules(self.model, mesh, self.split)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def run_step(self):
        """Train on one sequence that all ranks share; return the mean loss of its tokens."""
        rank = self.mesh.get_local_rank()
        text = batch_of(self.step, self.args.tokens)
        own = self.split.shard(text[:, :-1], rank).to(self.device)
        targets = self.split.shard(text[:, 1:], rank).to(self.device)
        positions = self.split.positions(rank, self.device)[None]
        visible = torch.ones_like(own)  # no padding; positions with a gap would be taken for packed sequences
        logits = self.model(input_ids=own, position_ids=positions, attention_mask=visible, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / self.args.tokens
        (loss * self.mesh.size()).backward()  # FSDP takes the mean of the ranks' gradients: this makes it the sum
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def state(self):
        """Return what a checkpoint holds, each rank its own shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self, folder):
        """Write each rank's own shards."""
        checkpoint.save(self.state(), checkpoint_id=str(folder / f"step_{self.step}"))

    def resume(self, folder, step=None):
        """Go on from the newest checkpoint, or from that of a step; with any number of ranks."""
        steps = sorted(int(path.parent.name.removeprefix("step_")) for path in folder.glob("step_*/.metadata"))
        if not steps:
            return
        state = self.state()
        checkpoint.load(state, checkpoint_id=str(folder / f"step_{steps[-1] if step is None else step}"))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])


def check_resuming(args, mesh, device, losses):
    """Train the last steps again from the checkpoint before them; the losses must be the same.

    On a GPU, the order of a sum of gradients differs from run to run, so that only the first of these losses is the
    same, and later ones within 2 %.

    Raises:
        SystemExit: they are not.
    """
    first = args.steps - args.save_every
    again = Training(args, mesh, device)
    again.resume(args.out, first)
    found = [again.run_step() for _ in range(args.save_every)]
    wanted = losses[-args.save_every :]
    limits = [1e-5, *[2e-2 if device.type == "cuda" else 1e-5] * (args.save_every - 1)]
    if any(abs(a - b) > limit * abs(b) for a, b, limit in zip(found, wanted, limits, strict=True)):
        raise SystemExit(f"a resumed run has other losses: {found} after {first} steps, {wanted} at first")
    if dist.get_rank() == 0:
        print(f"resumed after step {first}: losses {found}, {wanted} at first", flush=True)


def leave_group():
    """Leave the process group when its threads are idle.

    A thread of gloo gives back the tensors of a collective after it has woken the caller, and needs Python for it.
    FSDP's caches keep these threads alive to the end of the process. On a busy machine one may be so late that Python
    has shut down: "terminate called without an active exception". Barriers hold no tensors and give them time.
    """
    for _ in range(GLOO_THREADS):
        dist.barrier()
    dist.destroy_process_group()


def main():
    """Train, save, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and losses.json")
    parser.add_argument("--model", help="folder of a converted model (dynaxx convert)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=65536, help="of the sequence that all ranks share")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split(","))), default=(16, 4))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--check-resuming", action="store_true", help="train the last steps twice and compare")
    args = parser.parse_args()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", timeout=timedelta(minutes=3))
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("sequence",))
    training = Training(args, mesh, device)
    training.resume(args.out)
    losses = []
    while training.step < args.steps:
        start = time.perf_counter()
        losses.append(training.run_step())
        if dist.get_rank() == 0:
            print(f"step {training.step}: loss {losses[-1]:.4f}, {time.perf_counter() - start:.2f} s", flush=True)
        if training.step % args.save_every == 0:
            training.save(args.out)
    if dist.get_rank() == 0:
        found = {"losses": losses, "tokens": args.tokens, "ranks": dist.get_world_size()}
        if device.type == "cuda":
            found["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            print(f"peak memory {found['GiB']} GiB", flush=True)
        (args.out / "losses.json").write_text(json.dumps(found))
    if args.check_resuming:
        check_resuming(args, mesh, device, losses)
    leave_group()


if __name__ == "__main__":
    main()
