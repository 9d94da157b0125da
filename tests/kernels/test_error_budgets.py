# SPDX-License-Identifier: Apache-2.0
"""Error budgets: rounding stays within them, and a real mistake exceeds them."""

import pytest
import torch

import dynaxx as dx
from dynaxx.testing import Expected, check_gradients, make_qkv, oracle_attention, random_problem
from dynaxx.testing.rounding import _error_of_sum, rounding_errors

SINGLE = torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("mean", [0.0, 0.3, 10.0])
def test_a_sum_in_any_order_loses_what_is_said(mean):
    """Add terms one after another in fp32 in 4,000 random orders; compare the root mean square with the worst u."""
    torch.manual_seed(0)
    terms = torch.randn(100, dtype=torch.float64).add(mean).float()
    orders = torch.stack([torch.randperm(100) for _ in range(4000)])
    total = torch.zeros(4000)
    for each in terms[orders].unbind(1):
        total = total + each
    exact = terms.double().sum()
    measured = (total.double() - exact).square().mean().sqrt()
    said = _error_of_sum(exact, terms.double().square().sum(), 100, SINGLE)
    assert 0.25 <= measured / said <= 0.75  # 0.43 if partial sums are spread evenly between powers of 2


def one_key(head_dim, *, dtype, q_heads=1):
    torch.manual_seed(0)
    draw = lambda heads: torch.randn(1, 1, heads, head_dim).to(dtype)
    return {"q": draw(q_heads), "k": draw(1), "v": draw(1)}, draw(q_heads)


def test_a_query_that_sees_one_key():
    """One visible key: out is its value in any precision; dq and dk are 0 up to the rounding of dp and delta."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs, do = one_key(64, dtype=dtype)
        found = rounding_errors(inputs, torch.ones(1, 1, 1, 1, dtype=torch.bool), do)
        assert found["out"] < 10 * SINGLE * float(inputs["v"].abs().max())
        assert 0 < found["dq"] < 100 * SINGLE
        assert 0 < found["dk"] < 100 * SINGLE
        assert found["lse"] < 20 * SINGLE


def test_gradients_of_a_group_add_up():
    """dk sums over the q heads of a group, so its errors add up like independent ones."""
    (inputs, do), visible = one_key(64, dtype=torch.float32, q_heads=32), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    alone = [
        rounding_errors(inputs | {"q": inputs["q"][:, :, h : h + 1]}, visible, do[:, :, h : h + 1])["dk"]
        for h in range(32)
    ]
    together = rounding_errors(inputs, visible, do)["dk"]
    assert max(alone) < together < sum(x * x for x in alone) ** 0.5 * 1.01


def test_a_query_that_sees_nothing_has_no_error():
    (inputs, do), nothing = one_key(16, dtype=torch.float32), torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    assert set(rounding_errors(inputs, nothing, do, torch.zeros(1, 1, 1)).values()) <= {0.0, SINGLE}


def planted(problem, visible, name):
    """Return the formula with one mistake, or None if this problem cannot show the mistake."""
    options = {"scale": problem.scale, "softcap": problem.asks.softcap}
    attend = lambda mask, q, *rest: oracle_attention(q, *rest[:2], mask, **options, sinks=(*rest[2:], None)[0])
    inputs = [x.double() for x in problem.inputs.values()]
    if name in ("a pair lost", "a pair too many"):
        found = visible if name == "a pair lost" else ~visible & visible.any(-1, keepdim=True)
        others = found & (visible.sum(-1, keepdim=True) > 1) if name == "a pair lost" else found
        if not others.any():
            return None
        at = tuple(others.nonzero()[len(others.nonzero()) // 2].tolist())
        wrong = visible.clone()
        wrong[at] ^= True
        if float((attend(wrong, *inputs)[1] - attend(visible, *inputs)[1]).abs()[at[:3]]) < 1e-4:
            return None  # the weight is so small that rounding hides it
        return lambda *x: attend(wrong, *x)
    if problem.scale == 0.0 or not visible.any():
        return None
    if name == "a scale off by 1e-3":
        return lambda q, *rest: attend(visible, q * 1.001, *rest)

    def without(*x):  # drops the gradient of lse
        out, lse = attend(visible, *x)
        return out, lse.detach() + 0 * lse

    return without


@pytest.mark.parametrize(
    "name",
    [
        "a pair lost",
        pytest.param("a pair too many", marks=pytest.mark.slow),
        "a scale off by 1e-3",
        pytest.param("no gradient of lse", marks=pytest.mark.slow),
    ],
)
def test_wrong_results_exceed_their_budget(name):
    tried = 0
    for seed in range(700_000, 700_040):
        problem = random_problem(seed, dtype=torch.float32)
        expected = Expected(problem, seed)
        if problem.eager is not None or "lse" not in expected._exact or not problem.inputs["q"].numel():
            continue
        q = problem.inputs["q"]
        wrong = planted(problem, problem.visible.expand(q.shape[0], q.shape[2], -1, -1), name)
        if wrong is not None:
            tried += 1
            assert not all(report.ok for report in expected.reports(wrong)), f"seed {seed}: {problem.label}"
    assert tried > 15


def test_right_results_stay_within_their_budget():
    """The formula with head_dim reversed, so that sums run in another order, stays within the budgets."""
    for seed in range(700_000, 700_040):
        problem = random_problem(seed)
        expected = Expected(problem, seed)

        def turned(q, k, v, *sinks, attend=problem.eager or problem.exact):
            return attend(q.flip(-1), k.flip(-1), v, *sinks)

        assert all(report.ok for report in expected.reports(turned)), f"seed {seed}: {problem.label}"


@pytest.mark.parametrize("seed", [0, 4_200_930])
def test_gradients_are_other_numbers_than_the_inputs(seed):
    """This seed once drew q as the gradient too; errors that a budget takes as independent then added up."""
    given = []

    def attend(q, k, v, *_):
        out, lse = oracle_attention(q, k, v, torch.ones(1, dtype=torch.bool))
        if out.requires_grad:
            out.register_hook(given.append)
        return out, lse

    inputs = make_qkv(1, 40, 40, 2, 1, 16, seed=seed)
    layout = dx.Full().layout(40, causal=False, block_size=16)
    check_gradients(attend, *inputs, layout, seed=seed)
    problem = random_problem(seed, dtype=torch.float32)
    for drawn, grad in ((inputs, given[0]), (problem.inputs.values(), Expected(problem, seed)._do)):
        assert torch.isin(grad, torch.cat([x.flatten() for x in drawn])).double().mean() < 0.01
