# SPDX-License-Identifier: Apache-2.0
"""Native Sparse Attention as loops over sequences, queries and heads, following the paper's equations."""

import torch


def softmax_over(q, keys, values, scale):
    """Return output, weights and log-sum-exp of one query over some keys; without keys, zeros, no weights and -inf."""
    if not len(keys):
        return values.new_zeros(values.shape[-1]), keys.new_zeros(0), torch.tensor(-torch.inf, dtype=q.dtype)
    logits = keys @ q * scale
    weights = logits.softmax(0)
    return weights @ values, weights, logits.logsumexp(0)


def windows_of(x, sizes):
    """Gather the windows of one sequence: (tokens, heads, dim) -> (compressed, cmp_block, heads, dim)."""
    starts = range(0, max(0, len(x) - sizes.cmp_block + 1), sizes.cmp_stride)
    parts = [x[start : start + sizes.cmp_block] for start in starts]
    return torch.stack(parts) if parts else x.new_zeros(0, sizes.cmp_block, *x.shape[1:])


def visible_compressed(position, sizes):
    return max(0, (position + 1 - sizes.cmp_block) // sizes.cmp_stride + 1)


def block_scores(weights, blocks, sizes):
    """Eq. 9 with its indices from 1: p_slc[j] = sum over m < l'/d, n < l/d of p_cmp[l'/d * j - m - n]."""
    per_block, per_token = sizes.slc_block // sizes.cmp_stride, sizes.cmp_block // sizes.cmp_stride
    scores = [0.0] * blocks
    for j in range(1, blocks + 1):
        for m in range(per_block):
            for n in range(per_token):
                at = per_block * j - m - n
                if 1 <= at <= len(weights):
                    weight = float(weights[at - 1])
                    scores[j - 1] = max(scores[j - 1], weight) if sizes.pool == "max" else scores[j - 1] + weight
    return scores


def select_one(scores, position, sizes):
    """Return the forced blocks, then the best of the visible blocks."""
    seen = position // sizes.slc_block + 1 if position >= 0 else 0
    forced = [j for j in range(seen) if j < sizes.first_blocks or j >= seen - sizes.local_blocks]
    others = sorted((j for j in range(seen) if j not in forced), key=lambda j: -scores[j])
    return sorted(forced + others[: sizes.slc_count - len(forced)])


def keys_of(blocks, position, sizes):
    return [key for j in blocks for key in range(j * sizes.slc_block, (j + 1) * sizes.slc_block) if key <= position]


def nsa_oracle(q, k, v, k_cmp, v_cmp, gates, sizes, scale, block_indices=None):
    """Return (seqlen_q, q_heads, head_dim_v) of one sequence, and the blocks chosen, (seqlen_q, kv_heads) lists."""
    group, offset = q.shape[1] // k.shape[1], len(k) - len(q)
    blocks = -(-len(k) // sizes.slc_block)
    rows, chosen = [], []
    for t in range(len(q)):
        p, heads = t + offset, []
        seen = visible_compressed(p, sizes)
        chosen.append([])
        for h in range(k.shape[1]):
            members = range(h * group, (h + 1) * group)
            compressed = [softmax_over(q[t, m], k_cmp[:seen, h], v_cmp[:seen, h], scale) for m in members]
            total = sum(weights.detach() for _, weights, _ in compressed)
            mine = select_one(block_scores(total, blocks, sizes), p, sizes)
            if block_indices is not None:
                mine = [j for j in block_indices[t, h].tolist() if j >= 0]
            chosen[-1].append(mine)
            keys = keys_of(mine, p, sizes)
            near = range(max(0, p - sizes.window + 1), p + 1)
            for member, (out, _, _) in zip(members, compressed, strict=True):
                slc = softmax_over(q[t, member], k[keys, h], v[keys, h], scale)[0]
                swa = softmax_over(q[t, member], k[list(near), h], v[list(near), h], scale)[0]
                heads.append(sum(g * x for g, x in zip(gates[t, member], (out, slc, swa), strict=True)))
        rows.append(torch.stack(heads))
    return (torch.stack(rows) if rows else v.new_zeros(0, q.shape[1], v.shape[-1])), chosen
