# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on several GPUs with `torch.distributed`: split the sequence or the heads over ranks."""

from dynaxx.distributed.attention import exchange_plan, sparse_attention
from dynaxx.distributed.by_rule.attention import sparse_attention_by_rule
from dynaxx.distributed.choose import SplitCost, sequence_split, split_cost
from dynaxx.distributed.decode import select_split_pages, sparse_decode
from dynaxx.distributed.exchange import Traffic, traffic
from dynaxx.distributed.group import PeerError
from dynaxx.distributed.heads import HeadShare, attend_by_heads, share_heads, sparse_attention_by_heads
from dynaxx.distributed.modules import SplitModules
from dynaxx.distributed.nsa import native_sparse_attention
from dynaxx.distributed.plan import ExchangePlan
from dynaxx.distributed.rules import select_split_blocks
from dynaxx.distributed.sharded import ShardedLayout
from dynaxx.distributed.split import SequenceSplit

__all__ = [
    "ExchangePlan",
    "HeadShare",
    "PeerError",
    "SequenceSplit",
    "ShardedLayout",
    "SplitCost",
    "SplitModules",
    "Traffic",
    "attend_by_heads",
    "exchange_plan",
    "native_sparse_attention",
    "select_split_blocks",
    "select_split_pages",
    "sequence_split",
    "share_heads",
    "sparse_attention",
    "sparse_attention_by_heads",
    "sparse_attention_by_rule",
    "sparse_decode",
    "split_cost",
    "traffic",
]
