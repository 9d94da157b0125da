"""Sparse attention over several GPUs: a sequence split over ranks, or heads split over ranks, by torch.distributed."""

from dynaxx.distributed.attention import exchange_plan, sparse_attention
from dynaxx.distributed.choose import SplitCost, sequence_split, split_cost
from dynaxx.distributed.exchange import Traffic, traffic
from dynaxx.distributed.group import PeerError
from dynaxx.distributed.modules import SplitModules
from dynaxx.distributed.nsa import native_sparse_attention
from dynaxx.distributed.plan import ExchangePlan
from dynaxx.distributed.rules import select_split_blocks, sparse_attention_by_rule
from dynaxx.distributed.sharded import ShardedLayout
from dynaxx.distributed.split import SequenceSplit

__all__ = [
    "ExchangePlan",
    "PeerError",
    "SequenceSplit",
    "ShardedLayout",
    "SplitCost",
    "SplitModules",
    "Traffic",
    "exchange_plan",
    "native_sparse_attention",
    "select_split_blocks",
    "sequence_split",
    "sparse_attention",
    "sparse_attention_by_rule",
    "split_cost",
    "traffic",
]
