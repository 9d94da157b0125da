# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: attention follows `torch.autocast` as SDPA does, in the op, in models and in a Trainer."""

import pytest
import torch
import transformers
from small_models import SPARSE, llama, policy_for, tokens

import dynaxx as dx


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float32", "float32", "bfloat16"), ("bfloat16",) * 3])
def test_the_op_computes_in_the_dtype_of_autocast(dtypes):
    q, k, v = (torch.randn(1, 96, heads, 32).to(getattr(torch, d)) for heads, d in zip((4, 2, 2), dtypes, strict=True))
    layout = dx.SlidingWindow(40).layout(96, block_size=32)
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = dx.sparse_attention(q, k, v, layout)
    assert torch.equal(out, dx.sparse_attention(*low, layout))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        dx.sparse_attention(*leaves, layout).float().square().sum().backward()
    assert [x.grad.dtype for x in leaves] == [x.dtype for x in leaves]


def test_fp64_stays_fp64_under_autocast():
    q = torch.randn(1, 64, 2, 16, dtype=torch.float64)
    layout = dx.SlidingWindow(20).layout(64, block_size=32)
    with torch.autocast("cpu", torch.bfloat16):
        assert dx.sparse_attention(q, q, q, layout).dtype == torch.float64


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_sparse_under_autocast(compiled):
    model, ids = llama().train(), tokens(1, 160)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            run(ids, labels=ids).loss.backward()
        stats = handle.stats()
        assert stats["sparse_calls"] >= 3
        assert not stats["dense_calls"]
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    torch.compiler.reset()


def test_trainer_with_bf16_trains_sparse(tmp_path):
    model = llama()
    rows = [{"input_ids": tokens(1, 128)[0], "labels": tokens(1, 128)[0]} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), bf16=True, use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to=[],
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        stats = handle.stats()
    assert stats["sparse_calls"] == 2 * 3
    assert not stats["dense_calls"]
