# SPDX-License-Identifier: Apache-2.0
"""GPUs are described by what they are: AMD's capability 9.x is not Hopper, and rates belong to one card."""

from types import SimpleNamespace

import pytest
import torch

from dynaxx.kernels.device import CARDS, INTERPRETER, describe, described_as, gpu_of, processors
from dynaxx.kernels.runtime.arguments import steps_by_tma
from dynaxx.kernels.support.hopper import device_reasons

CPU = torch.device("cpu")


def properties(name="NVIDIA H100 80GB HBM3", capability=(9, 0), shared=228, **given):
    """Return what torch reports for a GPU; NVIDIA's default limit of 48 KiB per program can be raised."""
    usual = {
        "name": name,
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": 132,
        "total_memory": 80 << 30,
        "gcnArchName": name,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_multiprocessor": shared << 10,
        "regs_per_multiprocessor": 65536,
    }
    return SimpleNamespace(**{**usual, **given})


def amd(architecture, capability):
    """Return what torch reports for a GPU of AMD under HIP."""
    name = f"{architecture}:sramecc+:xnack-"
    return properties("AMD Instinct", capability, gcnArchName=name, shared_memory_per_block=64 << 10)


@pytest.mark.parametrize(
    ("architecture", "capability", "shared"),
    [("gfx90a", (9, 0), 64), ("gfx942", (9, 4), 64), ("gfx950", (9, 5), 160), ("gfx1100", (11, 0), 64)],
)
def test_amd_is_never_hopper(architecture, capability, shared):
    gpu = describe(amd(architecture, capability), hip=True)
    assert (gpu.vendor, gpu.architecture, gpu.shared_memory) == ("amd", architecture, shared << 10)
    assert not any((gpu.has_tma, gpu.has_wgmma, gpu.has_tensor_memory, gpu.overlaps_launches))
    assert gpu.overlap == {"PDL": False}
    assert gpu.has_e4m3 == (architecture == "gfx950")


@pytest.mark.parametrize(
    ("card", "tma", "wgmma", "tensor_memory", "e4m3"),
    [
        ("A100", False, False, False, False),
        ("RTX 3090", False, False, False, False),
        ("L4", False, False, False, True),
        ("H100", True, True, False, True),
        ("B200", True, False, True, True),
        ("B300", True, False, True, True),
        ("RTX 5090", True, False, False, True),
    ],
)
def test_units_of_each_architecture(card, tma, wgmma, tensor_memory, e4m3):
    gpu = CARDS[card]
    assert (gpu.has_tma, gpu.has_wgmma, gpu.has_tensor_memory, gpu.has_e4m3) == (tma, wgmma, tensor_memory, e4m3)
    assert gpu.overlaps_launches == tma


def test_sizes_are_what_torch_reports():
    gpu = describe(properties(shared_memory_per_block_optin=232448), hip=False)
    assert (str(gpu), gpu.family) == ("NVIDIA H100 80GB HBM3 (sm_90)", "Hopper")
    assert (gpu.shared_memory, gpu.processors, gpu.registers, gpu.memory) == (232448, 132, 65536, 80 << 30)
    assert describe(properties(), hip=False).shared_memory == 232448  # torch without that field
    assert describe(properties("NVIDIA X", (13, 0)), hip=False).architecture == "sm_130"


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ({}, True),
        ({"multi_processor_count": 114, "name": "NVIDIA H100 PCIe"}, False),
        ({"total_memory": 94 << 30, "name": "NVIDIA H100 NVL"}, False),
        ({"name": "NVIDIA GH100"}, False),
        ({"name": "NVIDIA H200", "total_memory": 140 << 30}, True),
    ],
)
def test_published_rates_belong_to_one_card(given, published):
    gpu = describe(properties(**given), hip=False)
    assert (gpu.bandwidth is not None) == (gpu.half_rate is not None) == published


def test_any_gpu_can_be_described():
    assert gpu_of(CPU) is INTERPRETER
    x = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    with described_as(CARDS["MI300X"]):
        assert (gpu_of(CPU), processors(CPU)) == (CARDS["MI300X"], 304)
        assert not steps_by_tma(x)
        with described_as(CARDS["B200"]):
            assert steps_by_tma(x)
    assert gpu_of(CPU) is INTERPRETER


def test_hopper_kernels_name_the_gpu_that_they_refuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for card in CARDS:
        with described_as(CARDS[card]):
            reasons = device_reasons(torch.device("cuda"))
        if CARDS[card].architecture != "sm_90":
            assert reasons == [f"runs on NVIDIA Hopper (sm_90), got {CARDS[card]}"]
