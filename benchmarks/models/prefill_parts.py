# SPDX-License-Identifier: Apache-2.0
"""Measure which parts of a whole prefill on a CPU take the time, dense and sparse.

With one thread the figures are its CPU seconds, which other processes hardly disturb; with more they are seconds.

    python benchmarks/models/prefill_parts.py smollm2 --tokens 8192 --layers 5 15 25 --json

Some layers stand for all. Each part is the median of passes in turns. "sparse, choice in torch" is the same policy with
blocks scored and chosen by torch instead of the core.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import evaluating
from dynaxx.lab.texts import encode, load_text
from dynaxx.lab.tune.costs import rule_of
from dynaxx.selection import in_core, select_blocks

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DENSE, CORE, TORCH = "dense", "sparse", "sparse, choice in torch"


def now():
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Clock:
    """Seconds within modules, by name."""

    def __init__(self, layers):
        self.seconds, self.started = defaultdict(float), []
        for layer in layers:
            named = {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp}
            named |= {name: getattr(layer.self_attn, name, None) or getattr(layer.mlp, name) for name in LINEARS}
            for name, module in named.items():
                module.register_forward_pre_hook(lambda *_: self.started.append(now()))
                module.register_forward_hook(lambda *_, name=name: self._ended(name))

    def _ended(self, name):
        self.seconds[name] += now() - self.started.pop()

    def parts(self, total):
        """Return the parts of one pass and start anew."""
        found, self.seconds = self.seconds, defaultdict(float)
        of_attention, of_mlp = (sum(found[name] for name in some) for some in (LINEARS[:4], LINEARS[4:]))
        return {
            "linear layers": of_attention + of_mlp,
            "attention, with rotary embedding": found["attention"] - of_attention,
            "activation of the MLP": found["mlp"] - of_mlp,
            "norms, residuals, the rest": total - found["attention"] - found["mlp"],
            "all": total,
        }


@contextlib.contextmanager
def chosen_by_torch():
    real, in_core.serves = in_core.serves, lambda *_: False
    try:
        yield
    finally:
        in_core.serves = real


def measured(model, policy, ids, turns):
    """Return the median of each part for each way."""
    clock, found = Clock(model.model.layers), defaultdict(list)
    for _ in range(turns):
        for way in (DENSE, CORE, TORCH):
            with contextlib.ExitStack() as stack:
                if way != DENSE:
                    stack.enter_context(apply(model, policy))
                if way == TORCH:
                    stack.enter_context(chosen_by_torch())
                clock.parts(0.0)
                began = now()
                model.model(ids, use_cache=False)
                found[way].append(clock.parts(now() - began))
    return {
        way: {part: statistics.median(each[part] for each in several) for part in several[0]}
        for way, several in found.items()
    }


def time_choice(model, rule, tokens, turns):
    """Return the median seconds of choosing blocks in one layer, by the core and by torch, and the density."""
    facts, found = model_facts(model), {CORE: [], TORCH: []}
    q, k = (torch.randn(1, tokens, heads, facts.head_dim) for heads in (facts.q_heads, facts.kv_heads))
    for _ in range(turns):
        for way, within in ((CORE, contextlib.nullcontext()), (TORCH, chosen_by_torch())):
            with within:
                began = now()
                layout = select_blocks(q, k, rule, block_size=32)
                found[way].append(now() - began)
    return {way: statistics.median(each) for way, each in found.items()}, layout.density()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 15, 25], help="of the model; others are left out")
    parser.add_argument("--budget", type=float, default=0.27, help="share of the blocks for all heads")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, tokenizer = load_model(args.model)
    ids = encode(tokenizer, load_text("pydoc"), args.tokens)
    rule = rule_of(dx.MeanQuery(), args.budget, 32, 64, 64)
    policy = dx.Policy(model=model_facts(model), block_size=32, rules=(dx.Rule.of(rule),))
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in args.layers)
    with evaluating(model), torch.no_grad():
        choice, density = time_choice(model, rule, args.tokens, 2 * args.turns + 1)
        found = measured(model, policy, ids, args.turns)
    found[DENSE]["choice of blocks, within attention"] = None
    for way in (CORE, TORCH):
        found[way]["choice of blocks, within attention"] = choice[way] * len(args.layers)
    rows = [{"part": part, **{way: found[way][part] for way in found}} for part in found[DENSE]]
    result = {"density": density, "rows": rows}
    print(json.dumps(result) if args.json else "\n".join(map(str, [density, *rows])))


if __name__ == "__main__":
    main()
