# SPDX-License-Identifier: Apache-2.0
"""Longformer's attention on dynaxx: a window, and global tokens with separate projections.

A local query sees the keys of its window and the global keys. The query of a global token sees every key, through
separate projections. The symmetric pattern is therefore computed as two problems. For the first, copies of the global
tokens are placed in front of the sequence. Each row of blocks then visits its window and ceil(globals / block) blocks,
instead of one block per global token.

Shapes: B batch, N tokens, G slots for global tokens (the largest number in a sequence, rounded up), H heads, D
head_dim, E = H * D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.led.modeling_led import LEDEncoderSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from dynaxx.integrations.encoders.shared import Replaced
from dynaxx.layout import BlockLayout
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.ops import sparse_attention
from dynaxx.patterns import Full, GlobalTokens, SlidingWindow

BLOCK = 64  # tokens per block
SLOTS = 16  # the number of global slots is a multiple of this, so that different counts share cached layouts


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass by kind, from its mask."""

    masked: Tensor  # (B, N) bool: padding, which neither sees nor is seen
    special: Tensor  # (B, N) bool: padding and global tokens, whose local results are not used
    entry: Tensor  # (n,) int64: batch entry of each global token, in order
    position: Tensor  # (n,) int64: position of each global token
    slot: Tensor  # (n,) int64: index of each global token within its batch entry
    slots: int  # G, 0 if no entry has a global token

    @classmethod
    def of(cls, mask: Tensor) -> Tokens:
        """Read transformers' (B, N) mask: negative for padding, 0 for local, positive for global tokens."""
        masked, is_global = mask < 0, mask > 0
        entry, position = is_global.nonzero(as_tuple=True)
        slot = (is_global.cumsum(1) - 1)[entry, position]
        most = int(is_global.sum(1).amax()) if mask.numel() else 0
        return cls(masked, masked | is_global, entry, position, slot, -(-most // SLOTS) * SLOTS)

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the global tokens of each entry, with zeros in empty slots: (B, N, E) -> (B, G, E)."""
        slots = hidden.new_zeros(hidden.shape[0], self.slots, hidden.shape[2])
        return slots.index_put((self.entry, self.slot), hidden[self.entry, self.position])

    def slot_used(self) -> Tensor:
        """Return (B, G) bool, the slots that hold a token."""
        used = self.masked.new_zeros(self.masked.shape[0], self.slots)
        used[self.entry, self.slot] = True
        return used

    def window_layout(self, reach: int) -> BlockLayout:
        """Return the layout of all queries over the global keys and their window of `reach` keys on each side."""
        seqlen, slots = self.masked.shape[1], self.slots
        rule = SlidingWindow((reach, reach)) | GlobalTokens(slots)
        layout = rule.layout(seqlen, slots + seqlen, causal=False, block_size=BLOCK, device=self.masked.device)
        return hide_keys(layout, torch.cat([self.slot_used(), ~self.special], dim=1))

    def rows_layout(self, rows: int) -> BlockLayout:
        """Return the layout of `rows` queries over all keys of the sequence."""
        return hide_keys(_full_layout(rows, self.masked.shape[1], self.masked.device), ~self.masked)


def _full_layout(seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockLayout:
    block_size = (16 if seqlen_q < BLOCK else BLOCK, BLOCK)
    return Full().layout(seqlen_q, seqlen_k, causal=False, block_size=block_size, device=device)


def _is_plain(linear: nn.Module) -> bool:
    """Return whether a linear module applies only its weight and bias: no adapter, quantization, hook, offloading."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and "forward" not in vars(linear) and not any(hooks)


class _WindowAttention(Replaced):
    """The forward of window attention, for subclasses of `LongformerSelfAttention` and similar classes."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return a tuple of (B, N, E) from hidden states (B, N, E) and the mask that `Tokens.of` reads."""
        reason = self._dense_reason(attention_mask, output_attentions)
        if reason is not None:
            if not torch.compiler.is_compiling():
                self.dynaxx.dense[reason] += 1
            return super().forward(  # type: ignore[misc]
                hidden_states,
                attention_mask=attention_mask,
                is_index_masked=is_index_masked,
                is_index_global_attn=is_index_global_attn,
                is_global_attn=is_global_attn,
                output_attentions=output_attentions,
            )
        self.dynaxx.sparse += 1
        assert attention_mask is not None, "`_dense_reason` must have refused a missing mask"
        tokens = self._once(attention_mask, "tokens", lambda: Tokens.of(attention_mask))
        out = self._local_rows(hidden_states, attention_mask, tokens)
        out = out.masked_fill(tokens.special[:, :, None, None], 0.0)
        if tokens.slots:
            rows = self._global_rows(hidden_states, attention_mask, tokens)
            out = out.index_put((tokens.entry, tokens.position), rows[tokens.entry, tokens.slot])
        return (out.flatten(2),)

    def _local_rows(self: Any, hidden: Tensor, mask: Tensor, tokens: Tokens) -> Tensor:
        """Return (B, N, H, D), the result of every token as if it were local."""
        reach = self.one_sided_attn_window_size
        q = self._heads(self.query(hidden))
        seen = torch.cat([tokens.gather(hidden), hidden], dim=1) if tokens.slots else hidden
        layout = self._once(mask, reach, lambda: tokens.window_layout(reach))
        return sparse_attention(q, self._heads(self.key(seen)), self._heads(self.value(seen)), layout)

    def _global_rows(self: Any, hidden: Tensor, mask: Tensor, tokens: Tokens) -> Tensor:
        """Return (B, G, H, D), the results of the global tokens."""
        q = self._heads(self.query_global(tokens.gather(hidden)))
        few = 2 * tokens.slots * self.num_heads <= self.embed_dim
        if few and hidden.is_cpu and _is_plain(self.key_global) and _is_plain(self.value_global):
            return self._few_global_rows(q, hidden, mask, tokens)
        k, v = self._heads(self.key_global(hidden)), self._heads(self.value_global(hidden))
        layout = self._once(mask, "global rows", lambda: tokens.rows_layout(tokens.slots))
        return sparse_attention(q, k, v, layout)

    def _few_global_rows(self: Any, q: Tensor, hidden: Tensor, mask: Tensor, tokens: Tokens) -> Tensor:
        """Return the results of few global tokens without projecting the whole sequence.

        With k = W x + b, q . k = (W^T q) . x + q . b, and the last term is equal for all keys. The weighted mean of
        V x + c is V (mean of x) + c. The queries of every head can therefore attend to the hidden states directly. With
        G * H queries of size E this costs a share G * H / E of the two projections.
        """
        heads = lambda linear: linear.weight.view(self.num_heads, self.head_dim, self.embed_dim)
        absorbed = torch.einsum("bghd,hde->bghe", q, heads(self.key_global))
        rows, states = absorbed.flatten(1, 2)[:, :, None].to(hidden.dtype), hidden[:, :, None]  # autocast may differ
        layout = self._once(mask, "few global rows", lambda: tokens.rows_layout(rows.shape[1]))
        mean = sparse_attention(rows, states, states, layout, scale=self.head_dim**-0.5)
        out = torch.einsum("bghe,hde->bghd", mean.view_as(absorbed), heads(self.value_global))
        if self.value_global.bias is not None:
            out = out + self._heads(self.value_global.bias)
        if self.key_global.bias is not None and self.key_global.bias.requires_grad:
            out = out + 0.0 * self._heads(self.key_global.bias)  # so that its gradient is zero instead of None
        return out.to(q.dtype)

    def _heads(self: Any, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _once(self: Any, mask: Tensor, key: Any, make: Any) -> Any:
        return self.dynaxx.once_per_mask(mask, key, make)

    def _dense_reason(self: Any, mask: Tensor | None, output_attentions: bool) -> str | None:
        """Return the reason why the base class must serve the call, or None if the kernels can."""
        if torch.compiler.is_compiling() or getattr(self.config, "onnx_export", False):
            return "compiled or exported"
        if output_attentions:
            return "output_attentions"
        if self.training and self.dropout:
            return "attention dropout"
        return "no mask" if mask is None else None


class WindowLongformer(_WindowAttention, LongformerSelfAttention):  # type: ignore[misc]
    """`LongformerSelfAttention` on dynaxx."""


class WindowLED(_WindowAttention, LEDEncoderSelfAttention):  # type: ignore[misc]
    """`LEDEncoderSelfAttention` on dynaxx."""


REPLACEMENTS = {LongformerSelfAttention: WindowLongformer, LEDEncoderSelfAttention: WindowLED}
