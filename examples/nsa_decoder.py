# SPDX-License-Identifier: Apache-2.0
"""A small decoder with dense attention, a window, Native Sparse Attention or an indexer; all else is equal.

Tokens bring along an embedding of the one before them: what a decoder otherwise spends its first layer and most of its
time on before it can look a pair up. What is left to learn of such a task is where to look.
"""

import torch
from torch import nn

import dynaxx as dx
from dynaxx.trained.nn import IndexedSparseAttention, NativeSparseAttention, NsaSizes, SparseAttention

VARIANTS = ("dense", "window", "nsa", "indexed")
INDEX_HEADS = 4


def make_attention(variant, hidden, q_heads, kv_heads, head_dim, sizes, compression):
    """Return the attention module of a variant."""
    if variant == "nsa":
        return NativeSparseAttention(hidden, q_heads, kv_heads, head_dim=head_dim, sizes=sizes, compression=compression)
    if variant == "indexed":  # as many tokens as the NSA variant selects, one by one
        choice = dx.trained.TopKTokens(
            sizes.slc_count * sizes.slc_block
        )  # head_dim columns: as many rotate as in attention
        return IndexedSparseAttention(hidden, q_heads, kv_heads, head_dim=head_dim, choice=choice,
                                      index_heads=INDEX_HEADS, index_dim=head_dim)  # fmt: skip
    block_size = 128 if torch.cuda.is_available() else 64
    module = SparseAttention(hidden, q_heads, kv_heads, head_dim=head_dim, pattern=dx.SlidingWindow(sizes.window),
                             block_size=block_size)  # fmt: skip
    module.dense = variant == "dense"
    return module


class Layer(nn.Module):
    """Attention, then a gated MLP, each with a residual connection."""

    def __init__(self, attention, hidden):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(hidden), attention
        self.norm_2, inner = nn.RMSNorm(hidden), hidden * 8 // 3 // 32 * 32
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((hidden, inner), (hidden, inner), (inner, hidden))
        )

    def forward(self, x, rotary):
        """Return (batch, seqlen, width)."""
        x = x + self.attention(self.norm_1(x), rotary)
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tokens (batch, seqlen) to logits (batch, seqlen, vocab). What variants share starts with equal weights."""

    def __init__(self, variant, *, vocab=256, hidden=512, layers=12, q_heads=8, kv_heads=2, head_dim=64, sizes=None,
                 compression="mlp", rotary=1.0, seed=0):  # fmt: skip
        super().__init__()
        self.head_dim, self.rotary, sizes = head_dim, rotary, sizes or NsaSizes()
        torch.manual_seed(seed)
        self.embedding, self.before = nn.Embedding(vocab, hidden), nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList()
        for index in range(layers):
            torch.manual_seed(1000 * seed + index)
            attention = make_attention(variant, hidden, q_heads, kv_heads, head_dim, sizes, compression)
            torch.manual_seed(1000 * seed + index + 500)
            self.layers.append(Layer(attention, hidden))
        self.norm = nn.RMSNorm(hidden)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", ".down.weight")) and parameter.any():
                parameter.data /= (2 * layers) ** 0.5
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.before.weight, std=0.02)

    def forward(self, tokens, targets=None):
        """Return the logits, or the mean loss over targets that are not -100."""
        x = self.embedding(tokens) + self.before(nn.functional.pad(tokens[:, :-1], (1, 0)))
        rotary = rotary_of(tokens.shape[1], self.head_dim, tokens.device, share=self.rotary)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def rotary_of(seqlen, dim, device, *, base=500_000.0, share=1.0):
    """Return (cos, sin), each (seqlen, dim), where only the fastest `share` of the pairs turns.

    This is p-RoPE (arXiv 2410.06205). Pairs that do not turn match at any distance, and so does the mean of such keys
    over a window.
    """
    pairs = torch.arange(dim // 2, device=device)
    rates = torch.where(pairs < share * (dim // 2), base ** (-2 * pairs / dim), 0.0)
    angles = torch.arange(seqlen, device=device)[:, None] * rates
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
