# SPDX-License-Identifier: Apache-2.0
"""Instruction sets whose CPU cores are tested: the fastest of this processor. The others are compiled first: slow."""

import pytest

from dynaxx.core.build import supported_isas

FASTEST, *OTHERS = supported_isas()
ISAS = [FASTEST, *(pytest.param(isa, marks=pytest.mark.slow) for isa in OTHERS)]
