# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: the C++ core, compiled with the package or at first use, or gathers in torch if there is no core."""

from dynaxx.core.library import CpuStatus, cpu_status
from dynaxx.kernels.cpu.backward import attention_backward
from dynaxx.kernels.cpu.forward import attention_forward
from dynaxx.kernels.cpu.support import unsupported_reasons

__all__ = ["CpuStatus", "attention_backward", "attention_forward", "cpu_status", "unsupported_reasons"]
