"""Sparse attention over several GPUs: a sequence split over ranks, or heads split over ranks, by torch.distributed."""

from dynaxx.distributed.attention import exchange_plan, sparse_attention
from dynaxx.distributed.choose import SplitCost, sequence_split, split_cost
from dynaxx.distributed.exchange import Traffic, traffic
from dynaxx.distributed.group import PeerError
from dynaxx.distributed.plan import ExchangePlan
from dynaxx.distributed.sharded import ShardedLayout
from dynaxx.distributed.split import SequenceSplit

__all__ = [
    "ExchangePlan",
    "PeerError",
    "SequenceSplit",
    "ShardedLayout",
    "SplitCost",
    "Traffic",
    "exchange_plan",
    "sequence_split",
    "sparse_attention",
    "split_cost",
    "traffic",
]
