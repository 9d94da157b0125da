# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on one GPU or two, through NCCL; `ranks.py` runs them.

The comparing cases are those of `deepspeed_cases.py` on another device. Ulysses needs two ranks; on one rank, its cases
do nothing.
"""

import statistics
import sys
import time

import deepspeed_cases as cases
import torch
from ranks import Ranks

import dynaxx as dx


def case_zero_2_trains_a_windowed_model(ranks: Ranks):
    cases.case_zero_2_trains_a_windowed_model(ranks)


def case_zero_3_trains_a_windowed_model(ranks: Ranks):
    cases.case_zero_3_trains_a_windowed_model(ranks)


def case_zero_2_trains_native_sparse_attention(ranks: Ranks):
    cases.case_zero_2_trains_native_sparse_attention(ranks)


def case_zero_3_trains_native_sparse_attention(ranks: Ranks):
    cases.case_zero_3_trains_native_sparse_attention(ranks)


def case_ulysses_with_the_models_own_attention(ranks: Ranks):
    if ranks.count > 1:
        cases.case_the_models_own_attention(ranks)


def case_ulysses_with_rules_by_layer_and_head(ranks: Ranks):
    if ranks.count > 1:
        cases.case_rules_by_layer_and_head(ranks)


def case_ulysses_with_selection(ranks: Ranks):
    if ranks.count > 1:
        cases.case_selection(ranks)


def case_ulysses_with_windows_of_the_model(ranks: Ranks):
    if ranks.count > 1:
        cases.case_windows_of_the_model(ranks)


def case_ulysses_with_packed_documents(ranks: Ranks):
    if ranks.count > 1:
        cases.case_packed_documents(ranks)


def case_zero_2_in_bf16_lowers_the_loss(ranks: Ranks):
    _lowers_the_loss(ranks, 2)


def case_zero_3_in_bf16_lowers_the_loss(ranks: Ranks):
    _lowers_the_loss(ranks, 3)


def _lowers_the_loss(ranks, stage):
    """Train native sparse attention of real sizes in bf16: the model learns rows that are repeated."""
    import deepspeed

    from dynaxx.trained.nsa.spans import NsaSizes
    from dynaxx.trained.transformers.nsa_llama import convert_to_nsa

    cases.start(ranks)
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.02}  # fmt: skip
    nsa = NsaSizes(cmp_block=32, cmp_stride=16, slc_block=64, slc_count=8, window=256)
    model = convert_to_nsa(cases.llama(**sizes), nsa).to(ranks.device).bfloat16()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)
    # One token in four is the same as four before it, so there is something to learn.
    ids = torch.randint(1, 64, (2, 1024, 4), generator=torch.Generator().manual_seed(ranks.rank))
    ids[:, :, 1:] = ids[:, :, :1]
    ids = ids.flatten(1).to(ranks.device)
    losses, times = [], []
    for _ in range(20):
        start = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    said = f"ZeRO {stage}, rank {ranks.rank} of {ranks.count}: losses {losses[0]:.3f} to {losses[-1]:.3f}"
    print(f"{said}, {statistics.median(times) * 1e3:.1f} ms a step", file=sys.stderr, flush=True)
    assert all(torch.tensor(losses).isfinite()), losses
    assert losses[-1] < losses[0] - 0.5, losses


def case_a_policy_under_ulysses_in_bf16(ranks: Ranks):
    """Compare 8,192 tokens on two GPUs with the whole sequence on one, with heads of 64 in bf16."""
    if ranks.count == 1:
        return
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
             "max_position_embeddings": 8192, "initializer_range": 0.02}  # fmt: skip
    cases.start(ranks)
    model = cases.llama(**sizes).to(ranks.device).bfloat16()
    policy = cases.policy_of(model, dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(512) | dx.TopK(0.25)))
    ids, positions = (x.to(ranks.device) for x in cases.batch_of(rows=1, length=8192))
    run = lambda ids, positions: model(ids, position_ids=positions, use_cache=False).logits.float()
    with torch.no_grad():
        exact = run(ids, positions)
        with dx.apply(model, policy):
            whole = run(ids, positions)
        with cases.apply_with_ulysses(model, policy, sequence_parallel_size=ranks.count, micro_batch_size=1) as under:
            mine = run(cases.own(ranks, ids), cases.own(ranks, positions))
            assert under.handle.stats()["sparse_calls"] == 3, under.handle.stats()
    apart, changed = (mine - cases.own(ranks, whole)).norm() / whole.norm(), (whole - exact).norm() / exact.norm()
    print(f"rank {ranks.rank}: apart {apart:.5f}, the policy changes {changed:.5f}", file=sys.stderr, flush=True)
    assert apart < 0.02, apart  # two ways through bf16; a choice that differs would show
    assert changed > 2 * apart, "the policy changes nothing, so this compares nothing"
