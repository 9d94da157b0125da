# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: the C++ core, compiled with the package or at first use, or gathers in torch if there is no core."""

from dynaxx.core.library import CpuStatus, cpu_status
from dynaxx.kernels.attention.cpu.backward import attention_backward
from dynaxx.kernels.attention.cpu.forward import attention_forward
from dynaxx.kernels.attention.cpu.support import unsupported_reasons
from dynaxx.kernels.runtime.core_threads import own_threads

__all__ = ["CpuStatus", "attention_backward", "attention_forward", "cpu_status", "own_threads", "unsupported_reasons"]
