# SPDX-License-Identifier: Apache-2.0
"""The modules: packed batches equal single sequences, decoding equals training, and models save and compile."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynaxx as dx
from dynaxx.trained import nn

SIZES = nn.NsaSizes(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, first_blocks=1, local_blocks=1, window=10)


def modules(**options):
    torch.manual_seed(0)
    made = {
        "sparse": nn.SparseAttention(24, 6, 2, pattern=dx.SlidingWindow(9) | dx.Sink(2), block_size=16, **options),
        "mean": nn.NativeSparseAttention(24, 6, 2, sizes=SIZES, compression="mean", **options),
        "weighted": nn.NativeSparseAttention(24, 6, 2, sizes=SIZES, compression="weighted", **options),
        "mlp": nn.NativeSparseAttention(24, 6, 2, sizes=SIZES, compression="mlp", **options),
        "switchable": nn.SwitchableAttention(24, 6, 2, sizes=replace(SIZES, slc_count=2, local_blocks=1), **options),
        "moba": nn.MixtureOfBlockAttention(24, 6, 2, block_size=16, top_k=2, **options),
    }
    for module in made.values():
        for name, parameter in module.named_parameters():
            if "proj" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return made


def rotary(tokens, dim=4, first=0):
    angles = torch.arange(first, first + tokens)[:, None] / torch.logspace(0, 2, dim // 2)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


@pytest.mark.parametrize("kind", modules())
@pytest.mark.parametrize("dense", [False, True])
def test_decoding_is_training_token_by_token(kind, dense):
    module, x = modules(head_dim_v=5)[kind], torch.randn(2, 52, 24)
    module.dense = dense
    with torch.no_grad():
        whole = module(x, rotary(52))
        cache, at = nn.LayerCache(capacity=5), 0
        for step in [22, 11, 1, 1, 5, *[1] * 12]:
            part = module(x[:, at : at + step], rotary(step, first=at), cache=cache)
            assert torch.allclose(part, whole[:, at : at + step], atol=2e-5), (at, step)
            at += step


@pytest.mark.parametrize("kind", ["mean", "weighted", "mlp"])
def test_decoding_sequences_of_their_own_lengths(kind):
    """Prompts are packed, then beams are reordered; each sequence continues as if it were alone."""
    module, ends, more = modules(head_dim_v=5)[kind], (0, 21, 21, 28), 30
    x, y = torch.randn(28, 24), torch.randn(3, more, 24)
    alone = lambda i, tail: torch.cat([x[ends[i] : ends[i + 1]], tail])[None]
    with torch.no_grad():
        cache = nn.LayerCache(capacity=5)
        first = module(x, cu_seqlens=ends, cache=cache)
        for a, b in pairwise(ends):
            if b > a:
                assert torch.allclose(first[a:b], module(x[None, a:b])[0], atol=2e-5)
        for at in range(0, 20, 2):
            got = module(y[:, at : at + 2], cache=cache)
        for i in range(3):
            assert torch.allclose(got[i], module(alone(i, y[i, :20]))[0, -2:], atol=2e-5)
        cache.reorder(torch.tensor([2, 2, 0]))
        for at in range(20, more):
            got = module(y[:, at, None], cache=cache)
        for i, parent in enumerate((2, 2, 0)):
            whole = alone(parent, torch.cat([y[parent, :20], y[i, 20:]]))
            assert torch.allclose(got[i], module(whole)[0, -1:], atol=2e-5)


def test_a_choice_for_several_steps():
    """An earlier choice equals a new one if every block is selected; otherwise it is renewed every few steps."""
    module, x = modules()["mean"], torch.randn(2, 80, 24)
    with torch.no_grad():
        for count in (5, 3):
            module.sizes, chosen = replace(SIZES, slc_count=count), []
            whole, cache = module(x), nn.LayerCache(reselect_every=4)
            module(x[:, :60], cache=cache)
            for at in range(60, 80):
                chosen.append(cache.blocks() is None)
                got = module(x[:, at, None], cache=cache)
                if count == 5:
                    assert torch.allclose(got[:, 0], whole[:, at], atol=2e-5)
            assert chosen == [True, False, False, False] * 5


@pytest.mark.parametrize("kind", modules())
@pytest.mark.parametrize("dense", [False, True])
def test_packed_is_each_sequence_alone(kind, dense):
    module, ends = modules()[kind], (0, 40, 40, 71, 72)
    module.dense = dense
    x = torch.randn(72, 24)
    got = module(x, rotary(72), cu_seqlens=ends)
    cos, sin = rotary(72)
    for a, b in pairwise(ends):
        if b > a:
            alone = module(x[None, a:b], (cos[a:b], sin[a:b]))[0]
            assert torch.allclose(got[a:b], alone, atol=2e-5)


@pytest.mark.parametrize("kind", modules())
def test_every_parameter_gets_a_gradient(kind):
    module, x = modules()[kind], torch.randn(2, 60, 24, requires_grad=True)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert x.grad.any()


@pytest.mark.parametrize("kind", modules())
def test_fully_sharded_gradients_are_the_same(kind):
    """Use FSDP2 on a mesh of one rank."""
    alone = modules()[kind]
    sharded, x = copy.deepcopy(alone), torch.randn(2, 60, 24)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for module in (alone, sharded):
            module(x).square().sum().backward()
        for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad.full_tensor())
    finally:
        dist.destroy_process_group()


def test_near_dense_gates_start_near_dense():
    """Up to slc_count * slc_block tokens the selected branch is dense attention, and its gate is nearly 1."""
    x = torch.randn(1, 48, 24)
    near = nn.NativeSparseAttention(24, 6, 2, sizes=SIZES, gate_init=(0.001, 0.998, 0.001))
    dense = copy.deepcopy(near)
    dense.dense = True
    with torch.no_grad():
        wrong = (near(x) - dense(x)).norm() / dense(x).norm()
    assert wrong < 0.02


def test_a_larger_count_is_closer_to_dense():
    x, module = torch.randn(1, 300, 24), nn.NativeSparseAttention(24, 6, 2, sizes=SIZES, gate_init=nn.nsa.NEAR_DENSE)
    with torch.no_grad():
        module.dense = True
        dense, wrong = module(x), []
        module.dense = False
        for count in (3, 8, 19):
            module.sizes = replace(SIZES, slc_count=count)
            wrong.append(float((module(x) - dense).norm()))
    assert wrong == sorted(wrong, reverse=True)


def test_switchable_attention_is_dense_while_it_selects_every_block():
    """Up to slc_count * slc_block tokens the module is dense attention; in longer sequences its first queries still
    see everything.
    """
    module, x = nn.SwitchableAttention(24, 6, 2, sizes=replace(SIZES, slc_count=4)), torch.randn(1, 65, 24)
    with torch.no_grad():
        sparse = module(x)
        module.dense = True
        dense, short = module(x), module(x[:, :64])
        module.dense = False
        assert torch.equal(module(x[:, :64]), short)
    assert torch.allclose(sparse[:, :64], dense[:, :64], atol=1e-5)
    assert not torch.allclose(sparse[:, 64], dense[:, 64], atol=1e-3)


def test_the_state_dict_restores_the_module():
    for module in modules().values():
        other = copy.deepcopy(module)
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        other.load_state_dict(module.state_dict())
        x = torch.randn(1, 30, 24)
        assert torch.equal(module(x), other(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiler_goes_around_it():
    module, x = modules()["mlp"], torch.randn(1, 40, 24)
    compiled = torch.compile(torch.nn.Sequential(torch.nn.LayerNorm(24), module), backend="aot_eager")
    eager = torch.nn.Sequential(torch.nn.LayerNorm(24), module)
    assert torch.allclose(compiled(x), eager(x), atol=1e-5)
    compiled(x).sum().backward()


@pytest.mark.parametrize("kind", modules())
def test_no_sequences_and_no_tokens(kind):
    module = modules()[kind]
    for shape in ((0, 5, 24), (2, 0, 24)):
        assert module(torch.zeros(shape)).shape == shape


def test_a_cache_is_unchanged_by_what_it_refuses():
    """A layer with one kv head must not fill all heads of another layer's cache."""
    module, other, x = modules()["sparse"], nn.SparseAttention(24, 6, 1, pattern=dx.Causal()), torch.randn(1, 9, 24)
    cache = nn.LayerCache()
    with torch.no_grad():
        want = module(x)
        module(x[:, :5], cache=cache)
        with pytest.raises(ValueError, match="every layer needs a cache of its own"):
            other(x[:, 5:6], cache=cache)
        assert cache.lengths == [5]
        torch.testing.assert_close(module(x[:, 5:], cache=cache), want[:, 5:], atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="may differ in head_dim only"):
        nn.LayerCache().append(torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 2, 4))


def test_bad_arguments():
    with pytest.raises(ValueError, match="multiple of"):
        nn.NativeSparseAttention(24, 6, 4)
    with pytest.raises(ValueError, match="compression"):
        nn.NativeSparseAttention(24, 6, 2, compression="max")
    with pytest.raises(ValueError, match="gate_init"):
        nn.NativeSparseAttention(24, 6, 2, gate_init=(0.0, 1.0, 0.0))
    with pytest.raises(TypeError, match="pattern"):
        nn.SparseAttention(24, 6, 2, pattern="window")
    with pytest.raises(ValueError, match="`top_k` must be >= 1 blocks"):
        nn.MixtureOfBlockAttention(24, 6, 2, top_k=0)
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        nn.MixtureOfBlockAttention(24, 6, 2, block_size=7)
    module = modules()["mean"]
    with pytest.raises(ValueError, match="cu_seqlens"):
        module(torch.randn(5, 24))
    with torch.no_grad():
        cache = nn.LayerCache()
        modules()["moba"](torch.randn(8, 24), cu_seqlens=(0, 3, 8), cache=cache)
        with pytest.raises(ValueError, match="different lengths"):
            modules()["moba"](torch.randn(2, 1, 24), cache=cache)
        assert cache.lengths == [3, 5]
        with pytest.raises(ValueError, match="come first in a cache"):
            modules()["moba"](torch.randn(8, 24), cu_seqlens=(0, 3, 8), cache=cache)
    with pytest.raises(ValueError, match="no_grad"):
        module(torch.randn(1, 5, 24), cache=nn.LayerCache())
    cache = nn.LayerCache()
    with torch.no_grad():
        module(torch.randn(1, 5, 24), cache=cache)
        with pytest.raises(ValueError, match="batch"):
            module(torch.randn(2, 5, 24), cache=cache)
    with pytest.raises(ValueError, match="capacity"):
        nn.LayerCache(0)
    with pytest.raises(ValueError, match="reselect_every"):
        nn.LayerCache(reselect_every=0)


def test_names_of_0_1_0_warn():
    with pytest.warns(DeprecationWarning, match="LayerCache"):
        assert nn.NativeCache is nn.LayerCache
    assert "NativeCache" not in dir(nn)
