# SPDX-License-Identifier: Apache-2.0
"""Writing to a layout or page table during its use may change results, but never crashes or hangs."""

import copy
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.core.library import active_library
from dynaxx.layout import pack_layouts
from dynaxx.layout.cache import LayoutCache
from dynaxx.lazy import lazy

PATTERN = dx.SlidingWindow(70) | dx.Sink(3)
core_only = pytest.mark.skipif(active_library() is None, reason="needs the C++ core")


def fresh(seqlen=200, heads=1):
    """Return a new layout for this test."""
    layout = PATTERN.layout(seqlen, block_size=16)
    layouts = [dx.BlockLayout.from_entries(layout.grid(), *layout.entries(), layout.masks) for _ in range(heads)]
    return dx.BlockLayout.stack_heads(layouts)


def inputs(seqlen=200, heads=1, **options):
    torch.manual_seed(0)
    return [torch.randn(1, seqlen, heads, 16, **options) for _ in range(3)]


@pytest.mark.parametrize("name", ["kv_indptr", "kv_num_partial", "kv_indices", "kv_masks"])
@pytest.mark.parametrize("number", [-5, 10**6, 2**31 - 1])
def test_a_checked_layout_that_is_written_to_is_checked_again(name, number):
    layout, (q, k, v) = fresh(), inputs()
    dx.sparse_attention(q, k, v, layout)
    getattr(layout, name)[..., 2:] = number
    with pytest.raises(ValueError, match="must"):
        dx.sparse_attention(q, k, v, layout)


def test_a_changed_layout_means_what_it_says_now():
    layout, (q, k, v) = fresh(), inputs()
    before = dx.sparse_attention(q, k, v, layout)
    assert layout.transposed is not None
    last = int(layout.kv_indptr[0, 0, -2])
    layout.kv_indices[last] = 3  # another block in the last row
    layout.masks.bits.fill_(-1)
    after = dx.sparse_attention(q, k, v, layout)
    assert not torch.equal(before, after)
    wanted = dx.sparse_attention(q, k, v, fresh_copy(layout), backend="reference")
    torch.testing.assert_close(after, wanted, atol=1e-5, rtol=1e-5)


def fresh_copy(layout):
    names = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks", "masks")
    return dx.BlockLayout(
        layout.seqlen_q, layout.seqlen_k, layout.block_size, *(copy.deepcopy(getattr(layout, name)) for name in names)
    )


def test_backward_refuses_a_layout_that_was_changed_since_forward():
    layout, (q, k, v) = fresh(), inputs(requires_grad=True)
    out = dx.sparse_attention(q, k, v, layout)
    layout.kv_indices.zero_()
    with pytest.raises(RuntimeError, match="`layout` was written to"):
        out.sum().backward()


@core_only
@pytest.mark.parametrize("name", ["kv_indptr", "kv_num_partial", "kv_indices", "kv_masks"])
def test_writes_that_torch_does_not_count_never_reach_the_core(name):
    """Write through numpy: forward keeps its copy, and the plan for backward, made later, is checked."""
    layout, (q, k, v) = fresh(), inputs(requires_grad=True)
    before = dx.sparse_attention(q, k, v, layout)
    written = getattr(layout, name).numpy()
    written[...] = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, written.shape, np.int32)
    assert torch.equal(before, dx.sparse_attention(q, k, v, layout))
    try:
        before.sum().backward()
    except (ValueError, RuntimeError, IndexError):
        return
    assert q.grad.isfinite().all()


def test_what_inference_caches_serves_training():
    """Tensors made under inference mode cannot be saved for a backward pass, as compiled attention saves layouts."""
    q, k = torch.randn(1, 210, 2, 32), torch.randn(1, 210, 1, 32)
    rules = (dx.TopK(0.2, per="head"), dx.SlidingWindow(31) | dx.TopK(0.2), dx.SlidingWindow(32) | dx.TopP(0.5))
    for rule in rules:
        with torch.inference_mode():
            dx.select_blocks(q, k, rule)
        assert not any(x.is_inference() for x in dx.select_blocks(q, k, rule).tensors), rule
    with torch.inference_mode():
        spans = dx.trained.nsa_spans(dx.trained.NsaSizes(), (0, 211))
    assert not spans.last_key.is_inference()


def test_inference_tensors_are_served():
    with torch.inference_mode():
        layout = fresh()
        q, k, v = inputs()
        assert dx.sparse_attention(q, k, v, layout).isfinite().all()


def test_a_cached_layout_that_somebody_wrote_to_is_made_anew():
    mine = PATTERN.layout(333, block_size=16)
    numbers = mine.kv_indices.clone()
    assert PATTERN.layout(333, block_size=16) is mine
    mine.kv_indices.fill_(7)
    yours = PATTERN.layout(333, block_size=16)
    assert yours is not mine
    assert torch.equal(yours.kv_indices, numbers)


def test_causal_masks_belong_to_the_layout_they_are_in():
    blocks = torch.tensor([[[[0, -1], [0, 1]]]])
    first = dx.BlockLayout.from_block_indices(blocks, 32, block_size=16)
    bits = first.masks.bits.clone()
    first.masks.bits.fill_(0)
    assert torch.equal(dx.BlockLayout.from_block_indices(blocks, 32, block_size=16).masks.bits, bits)


def test_a_packed_layout_has_its_own_lengths():
    ends = torch.tensor([0, 32, 64], dtype=torch.int32)
    layout = pack_layouts([PATTERN.layout(32, block_size=16)] * 2, ends, block_size=16)
    ends.fill_(10**6)
    assert layout.cu_seqlens_q.tolist() == [0, 32, 64]


@pytest.mark.parametrize(
    ("name", "dtype"), [("bits", torch.int8), ("bits", torch.int64), ("bands", torch.int8), ("bands", torch.float32)]
)
def test_masks_of_another_dtype_are_refused(name, dtype):
    layout = fresh()
    parts = {"bits": layout.masks.bits, "bands": layout.masks.bands}
    parts[name] = parts[name].to(dtype)
    with pytest.raises(ValueError, match=rf"`masks.{name}` must be int32"):
        dx.BlockLayout(
            layout.seqlen_q, layout.seqlen_k, layout.block_size, *layout.tensors[:4],
            dx.layout.ElementMasks(**parts, kv_block=16)
        )  # fmt: skip


def test_copies_and_pickles_of_a_used_layout_work():
    layout, (q, k, v) = fresh(), inputs(requires_grad=True)
    out = dx.sparse_attention(q, k, v, layout)
    out.sum().backward()
    for other in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert torch.equal(dx.sparse_attention(q, k, v, other), out)
        other.drop_stale()
        assert other.derived is not layout.derived


@core_only
def test_a_page_table_that_another_thread_writes_to():
    torch.manual_seed(0)
    k, v = torch.randn(40, 16, 2, 16), torch.randn(40, 16, 2, 16)
    table, used = torch.arange(40, dtype=torch.int32).view(2, 20), torch.tensor([300, 320], dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache(k, v, used, table))
    q, stop = torch.randn(2, 1, 4, 16), threading.Event()
    numbers, lengths = table.numpy(), used.numpy()

    def write():
        random = np.random.default_rng(1)
        while not stop.is_set():
            numbers[...] = random.integers(-(2**31), 2**31 - 1, numbers.shape, np.int32)
            lengths[...] = random.integers(-(2**31), 2**31 - 1, lengths.shape, np.int32)
            numbers[...] = np.arange(40, dtype=np.int32).reshape(2, 20)
            lengths[...] = 300

    writer = threading.Thread(target=write)
    writer.start()
    try:
        end, served = time.monotonic() + 1.5, 0
        while time.monotonic() < end or not served:
            try:
                out = dx.sparse_decode(q, cache, dx.PageBudget(5), backend="cpu")
                dx.summarize_pages(cache)
            except ValueError:  # the checks found a number out of range
                continue
            assert not out.isnan().any()
            served += 1
    finally:
        stop.set()
        writer.join()


def test_a_child_that_is_forked_while_a_thread_serves_goes_on():
    """In Python 3.11, cached_property would hold its lock in the child forever."""

    class Slow:
        @lazy
        def value(self):
            started.set()
            time.sleep(0.5)
            return 1

    started = threading.Event()
    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    started.wait()
    child = os.fork()
    if child == 0:
        Slow.value.compute = lambda _: 2
        os._exit(0 if Slow().value == 2 else 1)
    end = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    thread.join()
    assert done == (child, 0)


def test_no_lock_in_cached_attributes():
    from pathlib import Path

    source = Path(dx.__file__).parent
    users = [path for path in source.rglob("*.py") if "@cached_property" in path.read_text()]
    assert not users, "functools.cached_property locks all instances of a class on Python 3.11: use dynaxx.lazy"


def test_a_lazy_attribute_is_computed_once():
    class Once:
        count = 0

        @lazy
        def value(self):
            """Say so."""
            Once.count += 1
            return Once.count

    one = Once()
    assert (one.value, one.value, Once.count) == (1, 1, 1)
    assert Once.value.__doc__ == "Say so."


def test_the_layout_cache_is_bounded_by_number():
    cache = LayoutCache(lambda seqlen: dx.RandomBlocks(2, seed=seqlen).layout(64, block_size=16), most=4)
    for seqlen in range(9):
        cache(seqlen)
    assert len(cache._kept) == 4
