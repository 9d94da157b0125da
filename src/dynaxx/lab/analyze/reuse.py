# SPDX-License-Identifier: Apache-2.0
"""Measure the recall lost by reusing the blocks of a previous layer, per layer, on real text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from dynaxx.lab.analyze.capture import LayerAttention, visit_attention
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.texts import encode, started
from dynaxx.layout import BlockLayout
from dynaxx.patterns import Sink, SlidingWindow
from dynaxx.selection import Hybrid, TopK, recall, select_blocks

RULE = Hybrid(SlidingWindow(1024) | Sink(128), TopK(0.1))


@dataclass(frozen=True)
class LayerReuse:
    """The share of a layer's attention mass in its own blocks, and in the blocks that it would reuse."""

    layer: int
    source: int  # the layer whose blocks it would reuse
    own: float
    reused: float


@dataclass(frozen=True)
class ReuseCosts:
    """All layers that would reuse the blocks of another layer under a policy's `reuse`."""

    reuse: int
    rule: str
    tokens: int
    layers: tuple[LayerReuse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    def summary(self) -> str:
        """Return the text that the command prints."""
        if not self.layers:
            return f"reuse {self.reuse}: fewer than two layers see their whole context"
        own, reused = (
            sum(getattr(each, name) for each in self.layers) / len(self.layers) for name in ("own", "reused")
        )
        worst = max(self.layers, key=lambda each: each.own - each.reused)
        return (
            f"reuse {self.reuse} with {self.rule}: recall {own:.4f} with each layer's own blocks, {reused:.4f} with "
            f"reused blocks; largest loss in layer {worst.layer}: {worst.own:.4f} to {worst.reused:.4f}"
        )


def measure_reuse(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    reuse: int = 2,
    rule: Hybrid = RULE,
    tokens: int = 4096,
    block_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReuseCosts:
    """Measure the recall that a policy's `reuse` loses, if all layers that see their whole context have `rule`.

    Raises:
        ValueError: `reuse` is below 2, the text is too short, or the model's attention cannot be read.
    """
    if reuse < 2:
        raise ValueError(f"`reuse` must be >= 2 layers, got {reuse}")
    chosen: list[tuple[int, BlockLayout]] = []  # the last layer that selected blocks
    served, found = 0, []
    config = model.config.get_text_config()
    group_size = config.num_attention_heads // config.num_key_value_heads
    with (progress or SilentProgress()).task("Measuring the cost of reuse", total=config.num_hidden_layers) as task:

        def visit(attention: LayerAttention) -> None:
            nonlocal served
            task.advance(1, f"layer {attention.layer}")
            if attention.mask is not None or attention.window is not None:
                return
            q, k = attention.q[None], attention.k[None, :, ::group_size]
            measured = lambda layout: recall(q, k, layout, scale=attention.scale, seed=seed).mean
            layout = select_blocks(q, k, rule, block_size=block_size, scale=attention.scale)
            if chosen and served < reuse:
                source, handed = chosen[0]
                found.append(LayerReuse(attention.layer, source, measured(layout), measured(handed)))
                served += 1
            else:
                chosen[:], served = [(attention.layer, layout)], 1

        with torch.inference_mode():
            visit_attention(model, started(tokenizer, encode(tokenizer, text, tokens)), visit)
    return ReuseCosts(reuse, repr(rule), tokens, tuple(found))
