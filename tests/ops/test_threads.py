# SPDX-License-Identifier: Apache-2.0
"""Attention called from threads, forked processes and spawned processes is correct and never hangs."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dynaxx as dx
from dynaxx.core import library
from dynaxx.testing import make_qkv

RULE = dx.SlidingWindow(40) | dx.GlobalTokens(3)
SECONDS = 60  # report a hang instead of waiting for it


def results(seed, layout=None):
    """Return out, lse, dq, dk and dv of a problem so small that torch's own operations stay on one thread."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 100, 100, 4, 2, 16, seed=seed))
    layout = RULE.layout(100, block_size=16) if layout is None else layout
    out, lse = dx.sparse_attention(q, k, v, layout, return_lse=True, backend="cpu")
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    return [x.detach() for x in (out, lse, *grads)]


def fresh_layout():
    """Return a layout that has no plan yet."""
    return dx.BlockLayout.from_dense(RULE.layout(100, block_size=16).to_dense(), block_size=(32, 16))


class Results(Dataset):
    def __init__(self, threads):
        self.threads = threads

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return results(index)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_time(call):
    """Return what `call` returns, or fail after SECONDS."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, f"still not done after {SECONDS} s"
    return found[0]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_eight_threads_at_once_on_layouts_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        got = in_time(lambda: list(pool.map(results, range(16))))
    for seed, each in enumerate(got):
        assert_same(each, results(seed))


@pytest.mark.parametrize("attempt", range(3))
def test_eight_threads_at_once_on_one_new_layout(attempt):
    """A layout's plan is made at its first use; several threads that make it at once all get a valid one."""
    layout, start = fresh_layout(), threading.Barrier(8)

    def run(seed):
        start.wait(SECONDS)
        return results(seed, layout)

    with ThreadPoolExecutor(8) as pool:
        got = in_time(lambda: list(pool.map(run, range(8))))
    for seed, each in enumerate(got):
        assert_same(each, results(seed, fresh_layout()))


@pytest.mark.skipif(library.active_library() is None, reason="no C++ core here")
def test_the_plan_made_first_stays(monkeypatch):
    """While one thread makes a plan, another thread makes its own and runs on it."""
    from dynaxx.kernels.attention.cpu import plan

    layout, core, made = fresh_layout(), library.active_library(), []
    right = plan.LayoutPlan.__init__

    def slow(self, *args):
        right(self, *args)
        monkeypatch.setattr(plan.LayoutPlan, "__init__", right)
        made.append(plan.plan_of(layout, core))

    monkeypatch.setattr(plan.LayoutPlan, "__init__", slow)
    assert plan.plan_of(layout, core) is made[0] is plan.plan_of(layout, core)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.parametrize("threads", [None, 2])
def test_a_forked_data_loader_after_the_parent_used_its_threads(threads):
    """torch gives a worker one thread. With more, torch's own large operations hang; the core does not."""
    want = [results(index) for index in range(4)]
    loader = DataLoader(Results(threads), batch_size=None, num_workers=2, multiprocessing_context="fork",
                        timeout=SECONDS)  # fmt: skip
    for got, right in zip(loader, want, strict=True):
        assert_same(got, right)


def test_spawned_processes():
    want = [results(index) for index in range(3)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, torch.set_num_threads, (2,)) as pool:
        for got, right in zip(pool.map_async(results, range(3)).get(SECONDS), want, strict=True):
            assert_same(got, right)


def test_threads_follow_torch():
    """As many tasks run at once as torch has threads."""
    from dynaxx.kernels.attention.cpu import forward
    from dynaxx.kernels.runtime import core_arguments as arguments

    if library.active_library() is None:
        pytest.skip("no C++ core here")
    asked = []

    def watched(*fields):
        args = arguments.forward_args(*fields)
        asked.append(arguments._FORWARD.unpack(args)[-3])
        return args

    for threads in (1, 2):
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward, "forward_args", watched)
            results(0)
            with ThreadPoolExecutor(1) as pool:  # a thread uses torch's thread count, not OpenMP's default
                pool.submit(results, 0).result(SECONDS)
    assert asked == [1, 1, 2, 2]
