# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed length each use the rule of their bucket and return in their order."""

import pytest
import torch

import dynaxx as dx
from dynaxx.ops.buckets import Bucket, attend_in_buckets, bucket_by_length
from dynaxx.testing import make_qkv

BUCKETS = [
    Bucket(32, dx.Causal()),
    Bucket(100, dx.SlidingWindow(20) | dx.Sink(2)),
    Bucket(None, dx.SlidingWindow(20) | dx.TopK(1)),
]


def test_each_request_is_as_alone_and_in_order():
    lengths = (150, 7, 64, 150, 33, 0, 100, 32, 64, 101)
    requests = [[x[0].requires_grad_() for x in make_qkv(1, n, n, 4, 2, 16, seed=i)] for i, n in enumerate(lengths)]
    outs = attend_in_buckets(requests, BUCKETS, block_size=16)
    assert len(outs) == len(requests)
    for (q, k, v), out in zip(requests, outs, strict=True):
        rule = BUCKETS[0 if len(k) <= 32 else 1 if len(k) <= 100 else 2].rule
        layout = dx.select_blocks(q[None], k[None], rule, block_size=16)
        want = dx.sparse_attention(q[None], k[None], v[None], layout)[0]
        torch.testing.assert_close(out, want)
        weights = torch.randn_like(out)
        for a, b in zip(torch.autograd.grad((out * weights).sum(), (q, k, v), retain_graph=True),
                        torch.autograd.grad((want * weights).sum(), (q, k, v)), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


def test_softcap_and_sinks_are_those_of_the_op():
    requests = [[x[0] for x in make_qkv(1, n, n, 4, 2, 16, seed=n)] for n in (20, 70, 130)]
    options = {"scale": 0.5, "softcap": 2.0, "sinks": torch.randn(4)}
    outs = attend_in_buckets(requests, BUCKETS, block_size=16, **options)
    for (q, k, v), bucket, out in zip(requests, BUCKETS, outs, strict=True):
        layout = dx.select_blocks(q[None], k[None], bucket.rule, block_size=16, scale=0.5)
        torch.testing.assert_close(out, dx.sparse_attention(q[None], k[None], v[None], layout, **options)[0])
    with pytest.raises(ValueError, match="softcap"):
        attend_in_buckets(requests, BUCKETS, softcap=0.0)


def test_groups():
    assert bucket_by_length([5, 200, 32, 33], BUCKETS) == [[0, 2], [3], [1]]
    assert bucket_by_length([], BUCKETS) == [[], [], []]


def test_bad_buckets_and_requests_are_refused():
    with pytest.raises(ValueError, match="increasing limits"):
        bucket_by_length([1], BUCKETS[::-1])
    with pytest.raises(ValueError, match="request 1 has 101 keys"):
        bucket_by_length([1, 101], BUCKETS[:2])
    with pytest.raises(ValueError, match="request 0 must be"):
        attend_in_buckets([make_qkv(1, 8, 8, 2, 1, 16)], BUCKETS)
    assert attend_in_buckets([], BUCKETS) == []
