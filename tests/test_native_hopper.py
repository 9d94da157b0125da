"""Selected attention's Hopper kernels against fp64, on a GPU."""

import pytest
import torch

from dynaxx.kernels.hopper import support
from dynaxx.testing.native import random_selected_case

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def cases(seeds, **options):
    """Random problems that these kernels serve."""
    for seed in seeds:
        case = random_selected_case(seed, device="cuda", groups=(8, 16, 32, 64), **options)
        if case.spans.sizes.slc_block in support.BLOCKS:
            yield case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_random_cases(head_dim, dtype):
    for case in cases(range(12), dtype=dtype, head_dims=(head_dim,), lengths=(0, 1, 130, 300, 517)):
        for report in case.check("hopper"):
            assert report.ok, f"{report}\n{case.label}"
