# SPDX-License-Identifier: Apache-2.0
"""Cases of DeepSpeed on two ranks; `ranks.py` runs them, and `deepspeed_gpu_cases.py` some of them on GPUs."""

import copy
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import dynaxx as dx
from dynaxx.engines.deepspeed import apply_with_ulysses
from dynaxx.integrations.transformers import model_facts

SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
         "initializer_range": 0.2}  # fmt: skip
LENGTH, TRAINED = 300, {"cpu": 1000, "cuda": 2100}  # windows run on dynaxx from 256 tokens on, on a GPU from 2,048


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).eval()


def batch_of(rows=2, length=LENGTH):
    ids = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(length).repeat(rows, 1)


def rows_of(ranks, step, rank):
    """Return the rows on which a rank trains in a step."""
    ids = torch.randint(1, 64, (2, TRAINED[ranks.device]), generator=torch.Generator().manual_seed(100 * step + rank))
    return ids.to(ranks.device)


def start(ranks):
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp._release_sequence_parallel_groups()  # a process has Ulysses once; tests start it again and again
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.rank), WORLD_SIZE=str(ranks.count))
    deepspeed.init_distributed(dist_backend="gloo" if ranks.device == "cpu" else "nccl", auto_mpi_discovery=False)


def policy_of(model, *rules, **fields):
    return dx.Policy(model=model_facts(model), block_size=32, rules=rules, **fields)


def own(ranks, x):
    return x.chunk(ranks.count, 1)[ranks.rank]


def compare(ranks, model, policy, ids, positions, *, before=None, calls="sparse_calls", **options):
    """Compare logits and gradients under Ulysses with those of the whole sequence in one process."""
    start(ranks)
    said = lambda name: lambda text: f"{name}: {text}"
    model, ids, positions = (x.to(ranks.device) for x in (model, ids, positions))
    whole = copy.deepcopy(model)
    handle = (dx.apply(whole) if policy is None else dx.apply(whole, policy)) if before is None else before(whole)
    out = whole(ids, position_ids=positions, use_cache=False).logits
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(ranks.device)
    (out * weights).sum().backward()
    if handle is not None:
        handle.remove()
    with apply_with_ulysses(
        model, policy, sequence_parallel_size=ranks.count, micro_batch_size=len(ids), **options
    ) as under:
        assert (under.rank, under.ranks) == (ranks.rank, ranks.count)
        mine = model(own(ranks, ids), position_ids=own(ranks, positions), use_cache=False).logits
        assert len(ids) == 1 or not own(ranks, positions).is_contiguous()  # as `chunk` gives them
        (mine * own(ranks, weights)).sum().backward()
        stats = under.handle.stats()
    torch.testing.assert_close(mine, own(ranks, out), atol=1e-4, rtol=1e-4)
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3, msg=said(name))
    assert not calls or stats[calls] > 0, stats
    return stats


def case_the_models_own_attention(ranks: Ranks):
    calls = "own_pattern_calls" if ranks.device == "cpu" else ""  # on a GPU causal attention stays with torch
    compare(ranks, llama(), None, *batch_of(), before=lambda model: None, calls=calls)


def case_rules_by_layer_and_head(ranks: Ranks):
    """Give each head its own window; layer 1 is dense."""
    model = llama()
    rules = [
        dx.Rule.of(dx.SlidingWindow(20 + 17 * head) | dx.Sink(2), layers=[layer], heads=[head])
        for layer in (0, 2)
        for head in range(6)
    ]
    stats = compare(ranks, model, policy_of(model, *rules), *batch_of())
    assert stats["sparse_calls"] == 2


def case_selection(ranks: Ranks):
    model = llama()
    rules = (
        dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(32) | dx.TopK(0.3), layers=[0, 1]),
        dx.Rule.of(dx.SlidingWindow(32) | dx.TopK((1, 2, 3, 2, 1, 4), per="head"), layers=[2]),
    )
    compare(ranks, model, policy_of(model, *rules), *batch_of())


def case_one_kv_head_for_two_ranks(ranks: Ranks):
    model = llama(num_key_value_heads=1)
    compare(ranks, model, policy_of(model, dx.Rule.of(dx.Sink(4) | dx.TopK(2, per="head"))), *batch_of())
    together = policy_of(model, dx.Rule.of(dx.Sink(4) | dx.TopK(2)))
    with pytest.raises(dx.UnsupportedInputError, match="choose together"):
        apply_with_ulysses(model, together, sequence_parallel_size=2, micro_batch_size=2)


def case_windows_of_the_model(ranks: Ranks):
    """Run windows shorter and longer than a rank's share, which local masks cannot show."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    for window in (40, 150, 200):
        config = Gemma3TextConfig(**SIZES, sliding_window=window, query_pre_attn_scalar=16,
                                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
        model = Gemma3ForCausalLM(config).eval()
        model.set_attn_implementation("sdpa")
        compare(ranks, model, policy_of(model, dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64), layers=[1])), *batch_of())
        compare(ranks, copy.deepcopy(model), None, *batch_of(), before=lambda model: None, calls="")


def case_packed_documents(ranks: Ranks):
    """Documents end within a rank's share, and exactly at its end."""
    for lengths in ((100, 50, 150), (70, 230), (299, 1)):
        model, (ids, _) = llama(), batch_of(rows=1)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        compare(ranks, model, policy_of(model, dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(40))), ids, positions)
        compare(ranks, llama(), None, ids, positions, before=lambda model: None, calls="")


def case_a_policy_is_replaced_and_killed(ranks: Ranks):
    start(ranks)
    model, (ids, positions) = llama(), batch_of()
    first, second = (policy_of(model, dx.Rule.of(dx.SlidingWindow(n) | dx.Sink(1))) for n in (20, 60))
    expected = []
    for policy in (first, second, None):
        with torch.no_grad(), dx.apply(model, policy) if policy else dx.apply(model):
            expected.append(model(ids, position_ids=positions, use_cache=False).logits)
    run = lambda: model(own(ranks, ids), position_ids=own(ranks, positions), use_cache=False).logits
    with torch.no_grad(), apply_with_ulysses(model, first, sequence_parallel_size=2, micro_batch_size=2) as under:
        close = lambda i: torch.testing.assert_close(run(), own(ranks, expected[i]), atol=1e-4, rtol=1e-4)
        close(0)
        assert under.handle.replace(second)
        close(1)
        under.handle.kill_switch.engage()
        close(2)
        under.handle.kill_switch.release()
        close(1)
        other = llama()  # of the same process, not under Ulysses
        with dx.apply(other, first):
            torch.testing.assert_close(other(ids, position_ids=positions).logits, expected[0], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected[2], atol=1e-4, rtol=1e-4)


def case_what_is_refused(ranks: Ranks):
    start(ranks)
    model, (ids, positions) = llama(), batch_of()
    sizes = {"sequence_parallel_size": 2, "micro_batch_size": 2}
    with pytest.raises(ValueError, match="`sequence_parallel_size` must be >= 2"):
        apply_with_ulysses(model, sequence_parallel_size=1, micro_batch_size=2)
    odd = llama(num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ValueError, match="divisible"):
        apply_with_ulysses(odd, **sizes)
    assert odd.config._attn_implementation == "sdpa"
    start(ranks)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with apply_with_ulysses(model, **sizes):
        with pytest.raises(dx.UnsupportedInputError, match="padding"):
            model(own(ranks, ids), attention_mask=own(ranks, mask), position_ids=own(ranks, positions), use_cache=False)
        with pytest.raises(dx.UnsupportedInputError, match="another model"):
            apply_with_ulysses(llama(), **sizes)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(dx.UnsupportedInputError, match="once in a process"):
        apply_with_ulysses(model, **sizes)
    assert model.config._attn_implementation == "sdpa"


def train(ranks, engine, steps=3):
    """Return the losses of some steps; each rank has its own rows."""
    losses = []
    for step in range(steps):
        ids = rows_of(ranks, step, ranks.rank)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def zero(ranks, model, stage):
    """Return the losses of a model under DeepSpeed's ZeRO, and those of plain torch on the same rows."""
    import deepspeed

    start(ranks)
    plain = copy.deepcopy(model).to(ranks.device).train()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)
    ours = train(ranks, engine)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    theirs = []
    for step in range(3):
        losses = []
        for rank in range(ranks.count):
            ids = rows_of(ranks, step, rank)
            loss = plain(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / ranks.count).backward()
            losses.append(loss.item())
        theirs.append(losses[ranks.rank])
        optimizer.step()
        optimizer.zero_grad()
    return ours, theirs


def windowed():
    """Return a model with its own windows, on dynaxx's kernels."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24))


def case_zero_2_trains_a_windowed_model(ranks: Ranks):
    _trains(ranks, 2)


def case_zero_3_trains_a_windowed_model(ranks: Ranks):
    _trains(ranks, 3)


def _trains(ranks, stage):
    model = windowed()
    handle = dx.apply(model)
    assert handle.active
    ours, theirs = zero(ranks, model, stage)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert handle.stats()["own_pattern_calls"] == 9, handle.stats()


def case_zero_2_trains_native_sparse_attention(ranks: Ranks):
    _trains_nsa(ranks, 2)


def case_zero_3_trains_native_sparse_attention(ranks: Ranks):
    _trains_nsa(ranks, 3)


def _trains_nsa(ranks, stage):
    """Train a Llama whose attention is native sparse attention."""
    from dynaxx.trained.nsa.spans import NsaSizes
    from dynaxx.trained.transformers.nsa_llama import convert_to_nsa

    sizes = NsaSizes(cmp_block=16, cmp_stride=16, slc_block=16, slc_count=3, window=24)
    model = convert_to_nsa(llama(hidden_size=96), sizes)
    ours, theirs = zero(ranks, model, stage)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def case_the_example_of_the_guide(ranks: Ranks):
    """Run the guide's example with a shorter sequence. This is the last case, because its model stays under Ulysses."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "deploy_deepspeed.md"
    (block,) = re.findall(r"```text\n(import deepspeed.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {}
    exec(compile(block.replace("100_000", "600"), str(page), "exec"), names)
    model, here = llama(vocab_size=100), Path.cwd()
    folder = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    start(ranks)
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    try:
        if ranks.rank == 0:
            model.save_pretrained("model")
            dx.save_policy(policy_of(model, dx.Rule.of(dx.Sink(4) | dx.TopK(0.3))), "policy.json")
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
            Path("zero3.json").write_text(json.dumps(config))
        dist.barrier()
        names["train"](ranks.rank, ranks.count, "policy.json")
    finally:
        os.chdir(here)
    dist.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder[0])
