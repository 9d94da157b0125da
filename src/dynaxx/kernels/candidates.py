"""`Candidates`: the kv blocks that a second stage of scoring looks at."""

from typing import NamedTuple

from torch import Tensor


class Candidates(NamedTuple):
    """One list of kv blocks for each kv head and each panel of q blocks in a row."""

    blocks: Tensor  # (B, Hk, panels, slots) int32; -1 = empty slot, behind the others
    panel: int  # q blocks per panel
