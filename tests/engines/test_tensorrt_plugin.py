# SPDX-License-Identifier: Apache-2.0
"""Plugins of TensorRT, registered and driven through NVIDIA's own Python classes; the libraries are a stand-in.

The kernel runs under Triton's interpreter, and on a GPU from its PTX. `make test-tensorrt` runs this with the bindings.
"""

import ctypes
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorrt_stand_in
import torch

import dynaxx as dx
from dynaxx.engines.tensorrt import LAYOUT_INPUTS, layout_tensors, plugin
from dynaxx.engines.tensorrt.plugin_policy import attend_by_policy
from dynaxx.kernels.attention.reference import attention_forward
from dynaxx.policy import ModelFacts, policy_text
from interpreter import INTERPRETED, on_gpu, run_interpreted, starts_interpreter

pytest.importorskip("triton")

needs_bindings = pytest.mark.skipif(
    INTERPRETED or not tensorrt_stand_in.has_bindings() or shutil.which("cc") is None,
    reason="TensorRT's bindings have an environment of their own: make test-tensorrt",
)
FACTS = ModelFacts(model_type="llama", layers=2, q_heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def trt(tmp_path_factory):
    return tensorrt_stand_in.load(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def ops(trt):
    return plugin.register_plugins()


def problem(seqlen_q=200, seqlen_k=200, *, heads=(4, 2), dims=(64, 64), batch=2, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen_q, heads[0], dims[0])
    k, v = (torch.randn(batch, seqlen_k, heads[1], dim) for dim in dims)
    return [x.to(device, dtype) for x in (q, k, v)]


def layout_of(seqlen_q, seqlen_k, block=32):
    return (dx.Sink(4) | dx.SlidingWindow(70)).layout(seqlen_q, seqlen_k, block_size=block, device="cpu")


def driven(trt, q, k, v, layout, *, capability=89):
    """Return the plugin in the state after TensorRT has asked for its shapes."""
    tables = layout_tensors(layout)
    block = layout.block_size
    attributes = {"scale": 0.125, "q_block": block[0], "kv_block": block[1], "capability": capability}
    made = tensorrt_stand_in.Driven(trt, "dynaxx::sparse_attention", attributes, aot=True)
    of_data = {torch.float32: trt.float32, torch.float16: trt.float16, torch.bfloat16: trt.bfloat16}[q.dtype]
    made.shapes([of_data] * 3 + [trt.int32] * 6, [tuple(x.shape) for x in (q, k, v, *tables.values())])
    return made, tables


@needs_bindings
def test_both_plugins_are_registered_once(trt, ops):
    assert plugin.register_plugins() is ops
    assert {name for _, name in trt.get_plugin_registry().creators} == {"sparse_attention", "policy_attention"}
    assert ops.sparse_attention.num_outputs == 2
    assert ops.sparse_attention.input_tensor_names == ["q", "k", "v", *LAYOUT_INPUTS]
    assert ops.policy_attention.impl_attr_names == ["policy", "layer", "scale"]


@needs_bindings
@pytest.mark.parametrize("dims", [(64, 64), (80, 48)])
def test_shapes_follow_from_the_inputs(trt, ops, dims):
    q, k, v = problem(130, 300, dims=dims, dtype=torch.bfloat16)
    made, _ = driven(trt, q, k, v, layout_of(130, 300))
    assert made.output_dtypes == [trt.bfloat16, trt.float32]
    assert made.output_sizes == [(2, 130, 4, dims[1]), (2, 4, 130)]


@needs_bindings
@pytest.mark.slow
@pytest.mark.parametrize("block", [32, 64])
def test_a_launch_covers_every_tile_of_queries(trt, ops, block):
    q, k, v = problem(200, 300, dtype=torch.float16)
    layout = layout_of(200, 300, block)
    made, tables = driven(trt, q, k, v, layout)
    name, ptx, launch, numbers = made.kernel()
    tiles = -(-200 // block) * 2 * 4
    assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == (tiles * (1 if block <= 64 else 2), 1, 1)
    assert launch["block_x"] == 128
    assert 0 < launch["shared_mem"] <= 48 << 10
    entries, masks = len(tables["kv_indices"]), len(tables["mask_bands"])
    assert numbers == [2, 200, 300, 4, 2, entries, masks, *layout.kv_indptr.shape[:2]]
    assert f".entry {name}" in ptx
    assert ptx.count(".param .u64") == 11
    assert ptx.count(".param .u32") == 9


@needs_bindings
def test_problems_that_the_kernel_does_not_serve_are_refused(trt, ops):
    attributes = {"scale": 0.125, "q_block": 32, "kv_block": 32, "capability": 89}
    tables = [(1, 1, 8), (1, 1, 7), (9,), (9,), (1, 32, 1), (1, 2)]

    def shapes(dtypes, sizes, **settings):
        made = tensorrt_stand_in.Driven(trt, "dynaxx::sparse_attention", attributes, aot=True)
        made.shapes([*dtypes, *[trt.int32] * 6], [*sizes, *tables], **settings)
        return made

    whole = [(1, 200, 4, 64), (1, 200, 2, 64), (1, 200, 2, 64)]
    with pytest.raises(ValueError, match=r"fp32, fp16 or bf16, got .*INT8 for `q`"):
        shapes([trt.int8] * 3, whole)
    with pytest.raises(ValueError, match="one dtype"):
        shapes([trt.float16, trt.float32, trt.float16], whole)
    with pytest.raises(ValueError, match=r"`k` must be \(batch, seqlen, heads, head_dim\), got 3"):
        shapes([trt.float16] * 3, [whole[0], whole[1][1:], whole[2]])
    with pytest.raises(ValueError, match="head_dim of q must be fixed"):
        shapes([trt.float16] * 3, whole, fixed=lambda tensor, at: False).kernel()


@needs_bindings
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_attends_in_the_memory_of_tensorrt(trt, ops, monkeypatch, dtype):
    dtype = getattr(torch, dtype)
    policy = dx.Policy(model=FACTS, block_size=32, dense_below=100, rules=(dx.Rule.of(dx.Sink(4) | dx.TopK(0.3)),))
    q, k, v = problem(200, 200, dtype=dtype)
    out = torch.full_like(q, torch.nan)
    of_data = {torch.float32: trt.float32, torch.bfloat16: trt.bfloat16}[dtype]
    attributes = {"policy": policy_text(policy), "layer": 1, "scale": 0.125}
    made = tensorrt_stand_in.Driven(trt, "dynaxx::policy_attention", attributes, aot=False)
    assert made.shapes([of_data] * 3, [x.shape for x in (q, k, v)]) == ([of_data], [tuple(q.shape)])
    from dynaxx.engines.tensorrt import plugin_definitions as definitions

    monkeypatch.setattr(definitions, "on_stream", lambda stream: nullcontext())
    monkeypatch.setattr(definitions.torch, "as_tensor", on_cpu)
    linear = trt.TensorFormat.LINEAR
    described = [SimpleNamespace(type=of_data, format=linear, scale=1.0, dims=x.shape) for x in (q, k, v)]
    addresses, strides = ([get(x) for x in (q, k, v)] for get in (torch.Tensor.data_ptr, torch.Tensor.stride))
    made.plugin.enqueue(described, described[:1], addresses, [out.data_ptr()], strides, strides[:1], 0)
    layout = dx.select_blocks(q, k, dx.Sink(4) | dx.TopK(0.3), block_size=32, scale=0.125)
    torch.testing.assert_close(out, dx.sparse_attention(q, k, v, layout, scale=0.125))


def on_cpu(memory, device):
    """Return a tensor in CPU memory instead of the GPU memory that the plugin asks for."""
    told = memory.__cuda_array_interface__
    size, (address, _) = int(told["typestr"][2]), told["data"]
    strides = [stride // size for stride in told["strides"]]
    count = 1 + sum((length - 1) * stride for length, stride in zip(told["shape"], strides, strict=True))
    number, dtype = (ctypes.c_int32, torch.int32) if size == 4 else (ctypes.c_int16, torch.int16)
    return torch.frombuffer((number * count).from_address(address), dtype=dtype).as_strided(told["shape"], strides)


@needs_bindings
def test_the_examples_of_the_guide_add_layers(trt, ops, tmp_path, monkeypatch):
    facts = ModelFacts(model_type="llama", layers=4, q_heads=32, kv_heads=8, head_dim=128)
    dx.save_policy(dx.Policy(model=facts, rules=(dx.Rule.of(dx.TopK(0.3)),)), tmp_path / "policy.json")
    monkeypatch.chdir(tmp_path)
    network = tensorrt_stand_in.Network(trt)
    monkeypatch.setattr(trt, "Builder", lambda logger: SimpleNamespace(create_network=lambda flags: network))
    bound = {}
    context = SimpleNamespace(set_input_shape=lambda name, shape: None, set_tensor_address=bound.__setitem__)
    names = {"context": context, "seqlen": 300, "dx": dx}
    page = Path(__file__).parents[2] / "docs" / "guides" / "deploy_tensorrt.md"
    build, bind, by_policy = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(build, str(page), "exec"), names)
    exec(compile(bind.replace('device="cuda"', 'device="cpu"'), str(page), "exec"), names)
    exec(compile(by_policy, str(page), "exec"), names)
    assert list(bound) == list(LAYOUT_INPUTS)
    assert [(len(inputs), aot) for inputs, aot in network.layers] == [(9, True), (3, False)]


def test_below_the_border_and_without_a_rule_all_keys_are_seen():
    policy = dx.Policy(model=FACTS, block_size=32, dense_below=1000, rules=(dx.Rule.of(dx.SlidingWindow(40)),))
    q, k, v = problem(70, 70)
    causal = dx.Causal().layout(70, 70, block_size=32, device="cpu")
    exact = dx.sparse_attention(q, k, v, causal, scale=0.125)
    found = attend_by_policy(q, k, v, policy=policy_text(policy), layer=0, scale=0.125)
    torch.testing.assert_close(found, exact)
    step = attend_by_policy(q[:, -1:], k, v, policy=policy_text(policy), layer=0, scale=0.125)
    torch.testing.assert_close(step, exact[:, -1:])


def test_a_policy_as_tune_writes_it_is_served():
    length = 140 if INTERPRETED else 300
    rule = dx.Sink(32) | dx.LocalBlocks(2) | dx.LastQueries(64) | dx.TopK((0.1, 0.3, 0.0, 0.5), per="head")
    tuned = dx.Policy(model=FACTS, block_size=32, rules=(dx.Rule.of(rule),), guard={})
    q, k, v = problem(length, length)
    layout = dx.select_blocks(q, k, rule, block_size=32, scale=0.125)
    found = attend_by_policy(q, k, v, policy=policy_text(tuned), layer=0, scale=0.125)
    torch.testing.assert_close(found, dx.sparse_attention(q, k, v, layout, scale=0.125))


def test_bad_policies_and_arguments_are_refused():
    rule = dx.Rule.of(dx.SlidingWindow(40))
    served = dx.Policy(model=FACTS, block_size=32, rules=(rule,))
    with pytest.raises(ValueError, match="`layer` must be 0 to 1, got 2"):
        plugin.add_policy_attention(None, None, None, None, policy=served, layer=2, scale=0.1)
    with pytest.raises(ValueError, match=r"6 tensors, kv_indptr, .*, got 1"):
        plugin.add_sparse_attention(None, None, None, None, [None], block_size=(32, 32), scale=0.1)
    with pytest.raises(ValueError, match="`scale` must be > 0, got -1"):
        plugin.add_sparse_attention(None, None, None, None, [None] * 6, block_size=(32, 32), scale=-1.0)


def test_layouts_are_inputs_that_are_never_empty():
    unmasked = dx.BlockLayout.from_dense(torch.ones(64, 64, dtype=torch.bool), block_size=32)
    assert not len(unmasked.masks)
    for layout in (layout_of(200, 300), unmasked):
        tables = layout_tensors(layout)
        assert list(tables) == list(LAYOUT_INPUTS)
        assert all(x.dtype == torch.int32 and x.numel() and x.is_contiguous() for x in tables.values())


def interpreted_launch(q, k, v, layout, scale):
    """Run the kernel's entry under Triton's interpreter with the plugin's arguments."""
    from dynaxx.engines.tensorrt import plugin_kernel as kernels

    tables = layout_tensors(layout)
    out = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    numbers = [
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2],
        len(tables["kv_indices"]), len(tables["mask_bands"]), *layout.kv_indptr.shape[:2],
    ]  # fmt: skip
    block_m = min(layout.block_size[0], 32)
    kernels.dynaxx_sparse_attention[layout.q_blocks * q.shape[0] * q.shape[2] * (layout.block_size[0] // block_m),](
        q, k, v, *tables.values(), *numbers, out, lse,
        SCALE=scale, D=q.shape[3], E=v.shape[3],
        BLOCK_D=kernels.padded(q.shape[3]), BLOCK_E=kernels.padded(v.shape[3]),
        Q_BLOCK=layout.block_size[0], KV_BLOCK=layout.block_size[1], BLOCK_M=block_m, BLOCK_N=64,
        SPAN=kernels.SPAN, MAXIMA=kernels.ALL.value,
    )  # fmt: skip
    return out, lse


@pytest.mark.skipif(not INTERPRETED, reason="runs again under the interpreter")
@pytest.mark.parametrize("dims", [(64, 64), (48, 32)])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_entry_computes_attention(dims, per_head):
    q, k, v = problem(50, 90, heads=(4, 2), dims=dims, batch=1)
    layout = dx.select_blocks(q, k, dx.TopK(0.4, per="head"), block_size=32) if per_head else layout_of(50, 90)
    out, lse = interpreted_launch(q, k, v, layout, 0.2)
    wanted, wanted_lse = attention_forward(q, k, v, layout, 0.2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("dims", "block"), [((64, 64), 64), ((128, 128), 128), ((80, 48), 32), ((256, 256), 64)])
def test_the_ptx_computes_attention_on_a_gpu(request, dtype, dims, block):
    """Launch the PTX as TensorRT would: addresses of inputs, numbers, addresses of outputs, and nothing else."""
    dtype = getattr(torch, dtype)
    q, k, v = problem(500, 900, heads=(8, 2), dims=dims, dtype=dtype, device="cuda")
    for layout in (
        (dx.Sink(4) | dx.SlidingWindow(200)).layout(500, 900, block_size=block, device="cuda"),
        dx.select_blocks(q, k, dx.TopK(0.3, per="head"), block_size=block),
    ):
        if tensorrt_stand_in.has_bindings():
            request.getfixturevalue("ops")
            made, tables = driven(request.getfixturevalue("trt"), q, k, v, layout, capability=0)
            name, ptx, launch, numbers = made.kernel()
        else:
            name, ptx, launch, numbers, tables = launch_of(q, k, v, layout)
        out = torch.full((2, 500, 8, dims[1]), torch.nan, dtype=dtype, device="cuda")
        lse = torch.full((2, 8, 500), torch.nan, device="cuda")
        tensorrt_stand_in.launch(ptx, name, launch, [q, k, v, *tables.values()], numbers, [out, lse])
        wanted, wanted_lse = dx.sparse_attention(q, k, v, layout, scale=0.125, return_lse=True)
        exact, _ = attention_forward(q.double(), k.double(), v.double(), layout, 0.125)
        eager, _ = attention_forward(q, k, v, layout, 0.125)
        limit = 2 * float((eager.double() - exact).abs().max()) + 1e-6
        assert float((out.double() - exact).abs().max()) <= limit
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
        assert float((out.double() - wanted.double()).abs().max()) <= 2 * limit


def launch_of(q, k, v, layout):
    """Return the plugin's arguments for TensorRT, without TensorRT's bindings."""
    from dynaxx.engines.tensorrt.plugin_kernel import KernelShape, compile_kernel

    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[q.dtype]
    major, minor = torch.cuda.get_device_capability()
    shape = KernelShape(name, q.shape[3], v.shape[3], layout.block_size, 0.125, major * 10 + minor)
    kernel, tables = compile_kernel(shape), layout_tensors(layout)
    tiles = layout.q_blocks * q.shape[0] * q.shape[2] * kernel.tiles
    launch = {"grid_x": tiles, "grid_y": 1, "grid_z": 1, "block_x": kernel.threads, "block_y": 1, "block_z": 1}
    numbers = [
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2],
        len(tables["kv_indices"]), len(tables["mask_bands"]), *layout.kv_indptr.shape[:2],
    ]  # fmt: skip
    return kernel.name, kernel.ptx, {**launch, "shared_mem": kernel.shared_memory}, numbers, tables
