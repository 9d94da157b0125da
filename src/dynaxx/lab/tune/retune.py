# SPDX-License-Identifier: Apache-2.0
"""`dynaxx retune`: renew a policy from recorded statistics or from new text, and show the changes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaxx.integrations.transformers.apply_policy import apply
from dynaxx.lab.models import LoadedModel
from dynaxx.lab.perplexity import evaluating
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.texts import ids_of, start_of, with_start
from dynaxx.policy import Guard, Policy, Profile
from dynaxx.policy.diff import PolicyDiff, diff
from dynaxx.policy.renew import HeadRenewal, renew

REQUESTS = 96  # prompts of a new recording, enough for windows of 64 calls
MIN_REQUESTS = 32  # smallest number of prompts in a recording


@dataclass(frozen=True)
class RetuneResult:
    """The renewed policy and its changes."""

    policy: Policy
    diff: PolicyDiff
    renewals: tuple[HeadRenewal, ...]
    calls: int  # smallest number of calls per layer
    recorded: bool  # whether the policy has a new reference

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        renewals = [{**each._asdict(), "factor": None if each.factor == float("inf") else each.factor}
                    for each in self.renewals]  # fmt: skip
        return {
            "changed": bool(self.renewals),
            "calls": self.calls,
            "recorded": self.recorded,
            "renewals": renewals,
            "diff": self.diff.to_dict(),
        }

    def summary(self) -> str:
        """Return the text that the command prints."""
        layers = len({each.layer for each in self.renewals})
        lines = [f"{len(self.renewals)} heads of {layers} layers get new budgets, from {self.calls} calls per layer"]
        if not self.renewals:
            lines = ["reference recorded" if self.recorded else "every head reaches its recall goal"]
            lines[0] += f", from {self.calls} calls per layer; budgets are unchanged"
        if self.renewals:
            before, goal = (
                sum(getattr(r, name) for r in self.renewals) / len(self.renewals) for name in ("recall", "goal")
            )
            lines.append(f"their mean recall was {before:.3f} in the statistics; the goal is {goal:.3f}")
        lines.append(self.diff.summary())
        if self.renewals:
            lines.append("validate it before you rely on it: dynaxx validate MODEL POLICY")
        return "\n".join(lines)


def retune(
    policy: Policy,
    *,
    statistics: Profile | None = None,
    loaded: LoadedModel | None = None,
    text: str = "",
    requests: int = REQUESTS,
    lengths: Sequence[int] = (),
    recall: float | None = None,
    record_only: bool = False,
    seed: int = 0,
    command: str = "dynaxx retune",
    progress: Progress | None = None,
) -> RetuneResult:
    """Renew a policy's budgets, and its reference if there is a model to record it.

    Args:
        policy: the policy to renew.
        statistics: statistics that a running process recorded under this policy. Otherwise give `loaded` and `text`.
        loaded: a model, to record statistics now.
        text: a sample of the model's traffic.
        requests: number of prompts to run.
        lengths: lengths of the prompts, drawn at random; by default from the policy's border on.
        recall: one goal for all heads instead of the reference's.
        record_only: keep the budgets, and only replace the reference.
        seed: seed for the choice of prompts.
        command: the command, stored as evidence.
        progress: reports each prompt.

    Raises:
        ValueError: there is no source of statistics or two, or the text or lengths are too short.
        PolicyError: the statistics belong to other rules, or there is no goal.
    """
    if (statistics is None) == (loaded is None):
        raise ValueError("give exactly one source of statistics, --stats FILE or --model MODEL")
    again = {"requests": requests, "lengths": lengths, "seed": seed, "command": command, "progress": progress}
    seen = statistics if statistics is not None else record(policy, loaded, text, **again)  # type: ignore[arg-type]
    renewals: list[HeadRenewal] = []
    new = policy
    if not record_only:
        new, renewals = renew(policy, seen, recall=recall, command=command)
    if record_only or loaded is not None:  # statistics hold only for the rules under which they were recorded
        new = new.replace(reference=record(new, loaded, text, **again) if renewals and loaded else seen)  # type: ignore[arg-type]
    return RetuneResult(
        policy=new,
        diff=diff(policy, new),
        renewals=tuple(renewals),
        calls=min(each.calls for each in seen.layers),
        recorded=record_only or loaded is not None,
    )


def record(
    policy: Policy,
    loaded: LoadedModel,
    text: str,
    *,
    requests: int = REQUESTS,
    lengths: Sequence[int] = (),
    time_budget: float | None = None,
    time_limit: float = math.inf,
    seed: int = 0,
    command: str = "dynaxx retune",
    progress: Progress | None = None,
) -> Profile:
    """Run prompts from random places in a text and record every call of every sparse layer.

    Args:
        policy: the policy under which the prompts run.
        loaded: the model and its tokenizer.
        text: a sample of the model's traffic.
        requests: number of prompts to run.
        lengths: lengths of the prompts, drawn at random; by default from the policy's border on.
        time_budget: seconds after which no further prompt starts, once there are `MIN_REQUESTS`.
        time_limit: seconds after which no further prompt starts in any case.
        seed: seed for the choice of prompts.
        command: the command, stored as evidence.
        progress: reports each prompt.

    Raises:
        ValueError: the time limit allows fewer than `MIN_REQUESTS` prompts, the text is too short, or the policy is
            dense at these lengths or everywhere.
    """
    model, tokenizer = loaded
    ids = ids_of(tokenizer, text)
    begin = start_of(tokenizer)
    border = policy.border
    limit = min(len(ids), getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(ids))
    times = (1, 2, 4) if time_budget is None else (1, 2)  # the longest take most of the time
    lengths = lengths or [each for each in (max(n * border, n * 256) for n in times) if each < limit]
    wrong = [each for each in lengths if not max(border, 2) <= each < limit]
    if wrong or not lengths:
        raise ValueError(
            f"lengths must be from {max(border, 2):,} (where the policy becomes sparse) to below {limit:,} (the limit "
            f"of model and text), got {wrong[0] if wrong else limit:,}"
        )
    rows = policy.guard.rows if policy.guard else Guard().rows
    watched = policy.replace(guard=Guard(sample=1.0, rows=rows), rollout={}, reference=None)
    rng = random.Random(seed)
    with evaluating(model), apply(model, watched) as handle, torch.no_grad():
        handle.background.patient = True
        with (progress or SilentProgress()).task("Recording attention", total=requests) as task:
            started, done = time.monotonic(), 0
            while done < requests:
                late = time_budget is not None and time.monotonic() - started > time_budget
                if done < MIN_REQUESTS and time.monotonic() - started > time_limit:
                    raise ValueError(f"there was time for {done} prompts, but {MIN_REQUESTS} are needed")
                if late and done >= MIN_REQUESTS:
                    task.advance(requests - done)
                    break
                seqlen = rng.choice(list(lengths))
                start = rng.randrange(len(ids) - seqlen)
                prompt = with_start(
                    torch.tensor([ids[start : start + seqlen]], device=model.device, dtype=torch.int64), begin
                )
                model(prompt, use_cache=False, logits_to_keep=1)
                done += 1
                task.advance(1, f"{seqlen:,} tokens")
        handle.wait()
        found = handle.statistics(command)
    if found is None:
        why = ", ".join(handle.stats()["dense_calls"]) if policy.rules else "the policy has no rules"
        raise ValueError(
            f"no layer ran sparse ({why}), so there is nothing to record; pass lengths that the policy covers"
        )
    return found.model_copy(update={"requests": done})
