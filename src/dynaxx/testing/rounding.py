# SPDX-License-Identifier: Apache-2.0
"""Prediction of the rounding errors of attention and its gradients, to first order, for any order of summation.

Errors are propagated through the formulas as root mean squares (rms). Roundings are assumed to be independent and as
large as possible, u = eps / 2 of the rounded value (their actual rms is 0.4 of that). The model:

- A sum of n terms t is rounded at each of its n partial sums. In a random order, the mean square of the m-th partial
  sum is m (n - m) / n**2 sum(t**2) + (m / n)**2 sum(t)**2. The error of the sum is therefore
  u sqrt(n (sum(t**2) / 6 + sum(t)**2 / 3)).
- Matrix instructions of GPUs truncate instead of rounding, by up to 2 u and always towards zero. They add 16 terms at
  a time, so there are fewer truncations. For products of fp16 with 32 to 256 terms, the measured error was 0.25 to
  0.47 of the prediction (rms, one H200), and for a sum in fp32 0.38 to 0.40. Truncation scales with the sum instead of
  being noise, so its errors are not independent if the sum is used again as a factor. (With gradients of out equal to
  q, dk sums q times the errors of do . v, and was 3 times as inaccurate.)
- A score is such a sum, rounded twice more: by the scale, and by the factor that turns exp into a power of 2. The
  absolute error of a score is the relative error of its weight.
- In the forward pass, weights are divided by their own sum, so out changes by sum(p e (v - out)). The weights of the
  backward pass are computed from new sums and a rounded lse, whose error all weights of a query share.
- ds = p (dp - delta) scale with dp = do . v and delta = do . out - dlse. The errors of dp and delta remain even if
  their values cancel. delta is computed from the stored out.
- p, ds and out may be rounded to the inputs' dtype. If out is composed of parts (merged, or with a sink), the parts
  and their gradients are rounded, too.

Legend: B batch, H q heads, N queries, M keys, D head_dim of q and k, E head_dim of v; e_x is the error of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class _Weights(NamedTuple):
    """Weights of all pairs, and their errors; a sink is an additional key."""

    p: Tensor  # (B, H, N, M), 0 for hidden pairs
    e_score: Tensor  # (B, H, N, M), error of the capped score
    slope: Tensor  # (B, H, N, M), derivative of the softcap
    e_slope: Tensor  # (B, H, N, M)
    e_lse: Tensor  # (B, H, N, 1)
    visible: Tensor  # (B, H, N, M)


@torch.no_grad()
def rounding_errors(
    inputs: dict[str, Tensor],
    visible: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    merged: bool = False,
) -> dict[str, float]:
    """Return the largest rms error of any element of out, lse, dq, dk, dv (and dsinks).

    Args:
        inputs: q, k, v as (batch, seqlen, heads, head_dim), and sinks (q_heads,) if there are any.
        visible: bool, broadcastable to (B, H, N, M).
        do: (B, N, H, E), gradient of out; None: compute no gradients.
        dlse: (B, H, N), gradient of lse; None: zero.
        scale: softmax scale, head_dim ** -0.5 by default.
        softcap: as in `sparse_attention`.
        bias: added to the scaled and capped scores, broadcastable to (B, H, N, M).
        merged: whether out is merged from several attention results.
    """
    dtype, scale = inputs["q"].dtype, inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    u = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    stored = lambda x: torch.finfo(dtype).eps / 2 * x.abs() * (x.to(dtype) != x)  # 0 for exact values, such as 0 and 1
    q = inputs["q"].double().transpose(1, 2)
    group_size = q.shape[1] // inputs["k"].shape[2]
    k, v = (inputs[name].double().repeat_interleave(group_size, 2).transpose(1, 2) for name in "kv")
    p, e_score, slope, e_slope, e_lse, visible = _weights(q, k, visible, inputs.get("sinks"), scale, softcap, bias, u)
    if "sinks" in inputs:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
    in_parts, keys, queries = merged or "sinks" in inputs, visible.sum(-1, keepdim=True), visible.sum(-2)[..., None]

    out, e_out = _matmul(p, v, keys, u)
    w = (p * e_score) ** 2 + stored(p) ** 2
    e_out = _rms(e_out, (w @ v**2 - 2 * out * (w @ v) + out**2 * w.sum(-1, keepdim=True)).clamp(min=0).sqrt(), u * out)
    if do is None:
        return _largest({"out": e_out, "lse": e_lse})

    e_stored = stored(p @ v.abs() if in_parts else out)
    do = do.double().transpose(1, 2)
    dlse = torch.zeros_like(q[..., :1]) if dlse is None else dlse.double()[..., None]
    dp, e_dp = _matmul(do, v.mT, do.shape[-1], u)
    delta = (do * out).sum(-1, keepdim=True)
    e_delta = _rms(
        _error_of_sum(delta, ((do * out) ** 2).sum(-1, keepdim=True), do.shape[-1], u),
        (do**2 * (e_out**2 + e_stored**2)).sum(-1, keepdim=True).sqrt(),
        u * dlse,
        u * (delta - dlse),
    )
    if in_parts:
        e_dp = _rms(e_dp, (stored(do * torch.ones_like(do)) ** 2 @ v.mT**2).sqrt())
    difference = dp - delta + dlse
    ds = p * difference * slope * scale
    e_of_pair = abs(scale) * p * _rms(slope * e_dp, (slope * (e_score + 2 * u) + e_slope) * difference)
    e_of_pair = _rms(e_of_pair, stored(ds))
    e_ds = _rms(e_of_pair, abs(scale) * p * slope * _rms(e_delta, e_lse * difference))

    dq, e_dq = _matmul(ds, k, keys, u)
    of_query = _rms(e_delta * scale * ((p * slope) @ k), e_lse * dq)  # errors that all weights of a query share
    found = {
        "out": e_out,
        "lse": e_lse,
        "dq": _rms(e_dq, (e_of_pair**2 @ k**2).sqrt(), of_query),
        "dk": _of_groups(_rms(_matmul(ds.mT, q, queries, u)[1], (e_ds.mT**2 @ q**2).sqrt()), group_size),
    }
    e_p = _rms(p * _rms(e_score, e_lse), stored(p))
    found["dv"] = _of_groups(_rms(_matmul(p.mT, do, queries, u)[1], (e_p.mT**2 @ do**2).sqrt()), group_size)
    if "sinks" in inputs:  # a sink's weight is 1 minus the other weights, and its score is not scaled
        e_sinks = _rms(p * e_delta, _rms(p * _rms(e_score, e_lse), torch.full_like(p, u)) * (delta - dlse))[..., -1]
        found["dsinks"] = e_sinks.square().sum((0, 2)).sqrt()
    return _largest(found)


def _weights(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    u: float,
) -> _Weights:
    """Compute the weights for (B, H, N, D) q and (B, H, M, D) k; the sink comes last."""
    score, e_score = _matmul(q, k.mT, q.shape[-1], u)
    score, e_score, visible = score * scale, e_score * abs(scale), visible.expand(score.shape)
    slope, e_slope = torch.ones_like(score), torch.zeros_like(score)
    if softcap is not None:
        tanh = (score / softcap).tanh()
        slope = 1 - tanh**2
        e_tanh = _rms(slope * _rms(e_score, u * score) / softcap, 2 * u * tanh)
        score, e_score, e_slope = tanh * softcap, e_tanh * softcap, _rms(2 * tanh * e_tanh, u * tanh**2)
    if bias is not None:
        score = score + bias
        e_score = _rms(e_score, 2 * u * bias, u * score)  # the bias is rounded, and so is its sum with the score
    if sinks is not None:
        sinks = sinks.double()[:, None, None].expand(*score.shape[:3], 1)
        score, e_score, slope, e_slope = (
            torch.cat([score, sinks], -1),
            pad(e_score, (0, 1)),
            pad(slope, (0, 1)),
            pad(e_slope, (0, 1)),
        )
        visible = pad(visible, (0, 1), value=True)
    top = score.masked_fill(~visible, -torch.inf)
    lse = top.logsumexp(-1, keepdim=True) if top.shape[-1] else top.sum(-1, keepdim=True)
    p = (score - lse).exp().masked_fill(~visible, 0.0)
    lse, score = lse.masked_fill(~visible.any(-1, keepdim=True), 0.0), score.masked_fill(~visible, 0.0)
    of_factor = 2 * u * (p * score).sum(-1, keepdim=True)  # all scores have the same relative error
    e_lse = _rms(((p * e_score) ** 2).sum(-1, keepdim=True).sqrt(), of_factor, u * lse, torch.full_like(lse, u))
    e_score = _rms(e_score, 2 * u * score, torch.full_like(score, 2 * u))  # errors of the factor and of exp
    return _Weights(p, e_score, slope, e_slope, e_lse, visible)


def _matmul(a: Tensor, b: Tensor, terms: Tensor | int, u: float) -> tuple[Tensor, Tensor]:
    """Compute a @ b, and its error for `terms` terms per sum."""
    found = a @ b
    return found, _error_of_sum(found, a**2 @ b**2, terms, u)


def _error_of_sum(total: Tensor, squares: Tensor, terms: Tensor | int, u: float) -> Tensor:
    return u * (terms * (squares / 6 + total**2 / 3)).sqrt()


def _rms(*errors: Tensor) -> Tensor:
    """Combine independent errors by root sum of squares."""
    total = errors[0].square()
    for error in errors[1:]:
        total = total + error.square()
    return total.sqrt_()


def _largest(errors: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(e.amax()) if e.numel() else 0.0 for name, e in errors.items()}


def _of_groups(errors: Tensor, group_size: int) -> Tensor:
    """Return the errors of sums over the q heads of each group."""
    return _rms(*errors.unflatten(1, (-1, group_size)).unbind(2))
