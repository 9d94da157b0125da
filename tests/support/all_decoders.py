# SPDX-License-Identifier: Apache-2.0
"""Apply dynaxx to a tiny random model of every decoder in transformers, and list what happens.

`python tests/support/all_decoders.py` takes some ten minutes and writes docs/guides/all_decoders.md. It compares logits
of a whole and of a padded batch, and greedy tokens, with those of the model's own attention. `families.py` has the
thorough comparison of some families.
"""

from __future__ import annotations

import inspect
import multiprocessing
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from families import WINDOW

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "all_decoders.md"
HEAD = "# Every decoder of transformers\n"
MAX_PARAMETERS = 30_000_000
SECONDS = 90  # for one model

# Small values of the configs' fields: each config takes those that it has.
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, **WINDOW,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "d_model": 32, "num_heads": 4, "num_layers": 2,
    "ffn_dim": 32, "word_embed_proj_dim": 32, "embedding_size": 32, "kv_channels": 8, "ffn_hidden_size": 32,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_num_experts": 2,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 32, "moe_k": 1, "moe_topk": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "intermediate_size_mlp": 32,
    "expert_ffn_hidden_size": 16, "zero_expert_num": 0, "attention_chunk_size": 40, "global_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32, "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0,
    "mamba_d_state": 4, "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16,
    "use_mamba_kernels": False, "state_size": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FULL = "full_attention"
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"num_key_value_heads": 4}, {"layer_types": ["linear_attention", FULL]}, {"layer_types": ["mamba", FULL]},
    {"layer_types": ["mamba", "attention"]}, {"layer_types": ["conv", FULL]}, {"attn_layer_indices": [1]},
    {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}, {"rotary_dim": 8},
    {"attention_types": [[["global", "local"], 1]], "window_size": 24},
)  # fmt: skip
LEFT_OUT: tuple[tuple[str, ...], ...] = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "sliding_window"))


def fields_of(config: type) -> set[str]:
    """Return the names that a config takes."""
    found = set(getattr(config, "attribute_map", {}))
    for base in config.__mro__:
        found |= set(getattr(base, "__annotations__", {})) | set(inspect.signature(base.__init__).parameters)
    return found


def tries(config: type) -> Iterator[dict[str, Any]]:
    """Yield small values for a config, the likeliest first."""
    known, other = fields_of(config), getattr(config, "attribute_map", {})
    for variant in VARIANTS:
        given = {name: value for name, value in {**SMALL, **variant}.items() if name in known}
        given = {name: value for name, value in given.items() if other.get(name) not in given}
        if set(variant) <= known:
            yield from ({k: v for k, v in given.items() if k not in left_out} for left_out in LEFT_OUT)


@torch.no_grad()
def answers(model: Any) -> list[torch.Tensor]:
    """Return logits of a batch, logits of a padded batch, and greedy tokens."""
    ids = torch.randint(3, 60, (2, 320), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    greedy = model.generate(ids[:1, :200], max_new_tokens=6, do_sample=False)
    return [model(ids).logits, model(ids, attention_mask=mask).logits[mask.bool()], greedy]


def build(config: Any, kind: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a tiny model that runs, and its answers; the last error if there is none."""
    last: Exception | None = None
    for given in tries(config):
        try:
            made = config(**given)
            made._experts_implementation = "eager"
            with torch.device("meta"):
                size = sum(weight.numel() for weight in kind(made).parameters())
            if size > MAX_PARAMETERS:
                raise ValueError("no small model was found")
            torch.manual_seed(0)
            model = kind(made).eval().float()
            return model, answers(model)
        except Exception as error:
            last = error
    assert last is not None
    raise last


def outcome(config: Any, kind: Any) -> str:
    """Return what `dynaxx.apply` does with a model, without a policy and with one."""
    import dynaxx as dx
    from dynaxx.integrations.transformers import model_facts

    try:
        model, wanted = build(config, kind)
    except Exception:
        return "not tried"
    said = []
    for with_policy in (False, True):
        try:
            rule = dx.Rule.of(dx.SlidingWindow(4096))  # which hides nothing here
            policy = dx.Policy(model=model_facts(model), block_size=64, rules=(rule,)) if with_policy else None
            handle = dx.apply(model, policy) if policy else dx.apply(model)
        except dx.UnsupportedInputError as error:
            said.append("refused: " + "; ".join(each for reasons in error.reasons.values() for each in reasons))
            continue
        with handle:
            got = answers(model)
            dense = handle.stats()["dense_calls"]
            ran = {name: count for name, count in handle.stats().items() if name.endswith("_calls") and count}
        if any((a - b).abs().max() > 1e-4 * (1 + b.abs().max()) for a, b in zip(got[:2], wanted[:2], strict=True)):
            said.append("WRONG")
        elif not torch.equal(got[2], wanted[2]):
            said.append("other tokens")
        else:
            said.append("served" if set(ran) != {"dense_calls"} else f"dense: {', '.join(sorted(dense))}")
    if said[0].startswith("refused") or said[0] == said[1]:
        return said[0]
    return f"without a policy {said[0]}, with one {said[1]}"


def _in_process(config: Any, kind: Any, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        results.put(outcome(config, kind))
    except Exception as error:
        results.put(f"raises {type(error).__name__}")
        raise


def outcomes() -> dict[str, str]:
    """Return the outcome of each class, each in a process of its own with a time limit."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as DECODERS

    transformers.logging.set_verbosity_error()
    found: dict[str, str] = {}
    for config in DECODERS:
        kind = DECODERS[config][0] if isinstance(DECODERS[config], tuple) else DECODERS[config]
        if found.get(kind.__name__, "not tried") != "not tried":
            continue
        results: Any = multiprocessing.get_context("fork").Queue()
        process = multiprocessing.get_context("fork").Process(target=_in_process, args=(config, kind, results))
        process.start()
        try:
            found[kind.__name__] = results.get(timeout=SECONDS)
        except Exception:
            found[kind.__name__] = "not tried"
        process.kill()
        process.join()
        print(kind.__name__, found[kind.__name__], file=sys.stderr, flush=True)
    return found


def page(found: dict[str, str]) -> str:
    """Return the text of the page."""
    import transformers

    groups: dict[str, list[str]] = {}
    for name, said in sorted(found.items()):
        reason = re.sub(r"\(\w*Attention\w*(, \w+)*\) |\w+Attention(, \w+)* ", "", said)
        groups.setdefault(reason, []).append(f"`{name}`")
    order = sorted(groups, key=lambda reason: (reason == "not tried", reason != "served", -len(groups[reason])))
    lines = [f"| {len(groups[each])} | {each} | {', '.join(groups[each])} |" for each in order]
    intro = f"""
What `dynaxx.apply` does with a tiny random model of each class of `AutoModelForCausalLM` in transformers
{transformers.__version__}, without a policy and with one that hides nothing. Logits of a whole and of a padded batch
equal those of the model's own attention within 1e-4 of the largest, and greedy tokens are the same.
`python tests/support/all_decoders.py` writes the list. It found no small config for the classes that were not tried.

"""
    return HEAD + intro + "| classes | `dynaxx.apply` | names |\n|--:|---|---|\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOUND = outcomes()
    PAGE.write_text(page(FOUND), encoding="utf-8")
    sys.exit(any("WRONG" in said or "other tokens" in said for said in FOUND.values()))
