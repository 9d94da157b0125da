# SPDX-License-Identifier: Apache-2.0
"""The products of attention compile for Blackwell in Gluon, as `docs/internals/blackwell.md` draws them.

One tile: q and k from shared memory give scores in tensor memory, weights return there as the left operand of the
second product. It is never run: no Blackwell GPU is here.
"""

import re
from collections import defaultdict

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.blackwell")
from triton.backends import backends
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled import compiling
from dynaxx.kernels.device import CARDS
from interpreter import INTERPRETED

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # until Triton 3.8
ROWS, KEYS, D = 128, 128, 128
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter"),
    pytest.mark.skipif("nvidia" not in backends, reason="this triton has no compiler for NVIDIA's GPUs"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]


@gluon.jit
def _tile_kernel(q_desc, k_desc, v_desc, p_out, scale, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr):
    q = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], v_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    mbarrier.expect(loaded, q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_tile(q_desc, [0, 0], loaded, q)
    load_tile(k_desc, [0, 0], loaded, k)
    load_tile(v_desc, [0, 0], loaded, v)
    mbarrier.wait(loaded, 0)
    SUMS: gl.constexpr = blackwell.TensorMemoryLayout([128, 128], col_stride=1)
    WEIGHTS: gl.constexpr = blackwell.TensorMemoryLayout([128, 128], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [ROWS, KEYS], SUMS)
    weights = blackwell.allocate_tensor_memory(gl.bfloat16, [ROWS, KEYS], WEIGHTS)
    sums = blackwell.allocate_tensor_memory(gl.float32, [ROWS, D], SUMS)
    blackwell.tcgen05_mma(q, k.permute([1, 0]), scores, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    b_s = scores.load(scores.get_reg_layout())
    weights.store(gl.exp2(b_s * scale).to(gl.bfloat16))
    blackwell.tcgen05_mma(weights, v, sums, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 1)
    b_o = sums.load(sums.get_reg_layout())
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    b_o = gl.convert_layout(b_o, LAYOUT)
    o_m, o_d = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    gl.store(p_out + o_m[:, None] * D + o_d[None, :], b_o)


@pytest.mark.slow
def test_products_in_tensor_memory_compile():
    x = torch.zeros(ROWS, D, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
    desc = TensorDescriptor.from_tensor(x, [ROWS, D], layout)
    with compiling(lambda *given: None, CARDS["B200"]) as patch:
        patch.setattr(_tile_kernel, "device_caches", defaultdict(_tile_kernel.create_binder))
        made = _tile_kernel.warmup(desc, desc, desc, torch.zeros(ROWS, D), 0.1, ROWS, KEYS, D, grid=(1,), num_warps=4)
    assert len(re.findall(r"tcgen05\.mma\.", made.asm["ptx"])) >= 2
    assert "wgmma" not in made.asm["ptx"]
    assert made.metadata.shared <= CARDS["B200"].shared_memory
