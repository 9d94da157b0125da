# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on one GPU or more through NCCL; `ranks.py` runs them. Written without a GPU at hand: never run yet."""

import os

import torch
from deepspeed_cases import windowed
from ranks import Ranks

import dynaxx as dx


def start(ranks):
    import deepspeed

    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.rank), WORLD_SIZE=str(ranks.count))
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False)


def case_zero_2_trains_a_windowed_model(ranks: Ranks):
    _trains(ranks, 2)


def case_zero_3_trains_a_windowed_model(ranks: Ranks):
    _trains(ranks, 3)


def _trains(ranks, stage):
    """The loss falls, and calls run on dynaxx."""
    import deepspeed

    start(ranks)
    model = windowed().cuda().bfloat16()
    handle = dx.apply(model)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)
    ids = torch.randint(1, 64, (2, 1000), device="cuda", generator=torch.Generator("cuda").manual_seed(ranks.rank))
    losses = []
    for _ in range(20):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    assert handle.stats()["native_calls"] > 0
