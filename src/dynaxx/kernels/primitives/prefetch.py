# SPDX-License-Identifier: Apache-2.0
"""Control of how far ahead of its use each load of a loop starts, where the number of stages is too coarse."""

import triton.language as tl

from dynaxx.kernels.device import interpreted

if interpreted():

    def prefetched(x, iterations):
        """Return x; nothing is prefetched under the interpreter."""
        return x

else:

    @tl.core.builtin
    def prefetched(x, iterations, _semantic=None):
        """Return x, which is loaded in a loop, and let Triton start its load `iterations` iterations ahead.

        With pipeline stages, all loads of a loop run equally far ahead and have equally many buffers. Once one load is
        marked, unmarked loads do not run ahead.
        """
        x.handle.set_attr("tt.latency", _semantic.builder.get_int32_attr(tl.core._unwrap_if_constexpr(iterations)))
        return x
