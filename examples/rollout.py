# SPDX-License-Identifier: Apache-2.0
"""Bring a policy into production: a tenth of the requests, a guard, a changed file, the kill switch, drift, renewal.

    OMP_NUM_THREADS=1 python examples/rollout.py

SmolLM2-135M on Python's documentation; a minute and a half of one core. Prints what an operator would see.
"""

import argparse
import logging
import random
import tempfile
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.integrations.transformers.handle import Handle
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import pydoc_text
from dynaxx.lab.tune.retune import record, retune
from dynaxx.policy import load_profile, save_policy
from dynaxx.telemetry import recorder

LENGTHS = [96, 128]

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
logging.getLogger("dynaxx").setLevel(logging.CRITICAL)
loaded, text, rng = load_model("smollm2"), pydoc_text(), random.Random(0)
model, tokenizer = loaded
ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
folder = Path(tempfile.mkdtemp())


def prompt(drifted: bool = False) -> torch.Tensor:
    """Draw text from a random place; if drifted, two tokens again and again."""
    seqlen = rng.choice(LENGTHS)
    start = rng.randrange(len(ids) - seqlen)
    return (ids[start : start + 2].repeat(seqlen)[:seqlen] if drifted else ids[start : start + seqlen])[None]


@torch.no_grad()
def serve(requests: int, drifted: bool = False) -> None:
    """Prefill so many prompts, each of some user."""
    for _ in range(requests):
        with dx.policy.request(f"user-{rng.randrange(10**6)}"):
            model(prompt(drifted), use_cache=False, logits_to_keep=1)


def shown(handle: Handle) -> str:
    """Print what the layers did."""
    stats = handle.stats()
    return f"{stats['sparse_calls']} sparse calls, dense by reason: {stats['dense_calls']}"


policy = dx.Policy(
    model=model_facts(model),
    block_size=32,
    rules=(dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(32) | dx.TopK(0.25), layers=[10, 20]),),
    rollout={"share": 0.1},
    guard={"sample": 1.0, "rows": 8, "min_recall": 0.5, "action": "dense"},
    drift={"window": 16},
)
print("recording 48 requests, with which later traffic is compared: half a minute")
policy = policy.replace(reference=record(policy, loaded, text, requests=48, lengths=LENGTHS))
save_policy(policy, folder / "policy.json")

with dx.apply(model, policy, name="smollm2") as handle:
    handle.follow(folder / "policy.json", interval=0.1)
    count = lambda route: recorder().value("dynaxx_requests_total", route=route, model_name="smollm2")
    sparse, dense = count("sparse"), count("dense")  # those that were recorded
    serve(40)
    print(f"10 % of 40 requests: {count('sparse') - sparse:g} sparse, {count('dense') - dense:g} dense")

    follower = handle.follow(folder / "policy.json", interval=3600)
    save_policy(policy.replace(rollout={"share": 1.0}), folder / "policy.json")
    follower.check()
    print(f"after the file changed, the share is {handle.policy.rollout.share:.0%}")
    (folder / "policy.json").write_text('{"format": "dynaxx.pol')
    follower.check()
    print(f"after a file cut short, it still is {handle.policy.rollout.share:.0%}")

    handle.reset_stats()
    handle.kill_switch.engage("an incident")
    serve(2)
    handle.kill_switch.release()
    print(f"killed: {shown(handle)}")

    handle.reset_stats()
    serve(20)
    handle.wait()
    print(f"normal traffic: {shown(handle)}; drift: {[str(each) for each in handle.drift()[:1]]}")
    serve(48, drifted=True)
    handle.wait()
    print(f"strange traffic: {shown(handle)}")
    print(*(f"  {each}" for each in handle.drift()[:3]), sep="\n")
    handle.record(folder / "statistics.json")

renewed = retune(policy, statistics=load_profile(folder / "statistics.json"))
print(*renewed.summary().splitlines()[:6], sep="\n")
