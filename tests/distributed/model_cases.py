# SPDX-License-Identifier: Apache-2.0
"""Cases of transformers models with the sequence split over ranks; `ranks.py` runs them."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.parallelism_config import ParallelismConfig
from ranks import Ranks
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.policy.rollout import Rollout

SMALL = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
         "max_position_embeddings": 2048, "initializer_range": 0.2}  # fmt: skip
LOCAL = ["sliding_attention", "full_attention"]


def device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def model_of(kind, config, heads=(4, 2), **changes):
    torch.manual_seed(0)
    settings = config(**SMALL, num_attention_heads=heads[0], num_key_value_heads=heads[1], **changes)
    return kind(settings).eval().to(device())


def llama(heads=(4, 2), **changes):
    return model_of(transformers.LlamaForCausalLM, transformers.LlamaConfig, heads, **changes)


def gemma3():
    kind, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig
    return model_of(kind, config, sliding_window=100, layer_types=LOCAL)


def gpt_oss():
    kind, config = transformers.GptOssForCausalLM, transformers.GptOssConfig
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}}
    return model_of(kind, config, sliding_window=100, layer_types=LOCAL, **experts)


def mistral():
    return model_of(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=100)


def llama4():
    kind, config = transformers.Llama4ForCausalLM, transformers.Llama4TextConfig
    layers = ["chunked_attention", "full_attention"]
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 96, "layer_types": layers}
    return model_of(kind, config, **experts)


def tokens(*shape, seed=1):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed)).to(device())


def policy_for(model, *rules, **fields):
    return dx.Policy(model=model_facts(model), rules=rules, **{"block_size": 32, **fields})


def check(ranks, model, policy=None, seqlen=700, batch=2, seed=1, **counts):
    """Compare logits with one device's, and count calls."""
    ids = tokens(batch, seqlen, seed=seed)
    with torch.no_grad():
        if policy is None:
            wanted = model(ids, use_cache=False).logits
        else:
            with dx.apply(model, policy):
                wanted = model(ids, use_cache=False).logits
        with dx.apply(model, policy, mesh=ranks.mesh) as handle:
            own = model(**handle.shard(ids)).logits
            got = handle.gather(own)
            if counts:
                assert handle.stats() == counts, handle.stats()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)


def case_own_patterns_equal_one_device(ranks: Ranks):
    for build in (llama, gemma3, gpt_oss, mistral, llama4):
        check(ranks, build(), sparse_calls=0, own_pattern_calls=2)


def case_policies_equal_one_device(ranks: Ranks):
    model = llama()
    rules = {
        "by position": dx.Rule.of(dx.SlidingWindow(96) | dx.Sink(4)),
        "row by row": dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.2, dx.MeanPool())),
        "row by row, by mean queries": dx.Rule.of(dx.Sink(4) | dx.TopK(3)),
    }
    for rule in rules.values():
        check(ranks, model, policy_for(model, rule), sparse_calls=2, own_pattern_calls=0)
    first = dx.Rule.of(dx.SlidingWindow(64), layers=[0])
    check(ranks, model, policy_for(model, first), sparse_calls=1, own_pattern_calls=1)


def case_rules_that_need_whole_heads(ranks: Ranks):
    model = llama(heads=(2 * ranks.count, ranks.count))
    first, others = list(range(ranks.count)), list(range(ranks.count, 2 * ranks.count))
    by_head = [
        dx.Rule.of(dx.SlidingWindow(96), heads=first),
        dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.3, per="head"), heads=others),
    ]
    check(ranks, model, policy_for(model, *by_head), sparse_calls=2, own_pattern_calls=0)
    probe = dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.3, dx.AntiDiagonal()))
    check(ranks, model, policy_for(model, probe), sparse_calls=2, own_pattern_calls=0)


def case_short_sequences_run_the_models_own_pattern(ranks: Ranks):
    model = llama()
    policy = policy_for(model, dx.Rule.of(dx.SlidingWindow(64)), dense_below=701)
    check(ranks, model, policy, sparse_calls=0, own_pattern_calls=2)


def case_windows_are_kept_under_a_policy(ranks: Ranks):
    model = gemma3()
    policy = policy_for(model, dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.2, dx.MeanPool()), layers=[1]))
    check(ranks, model, policy, sparse_calls=1, own_pattern_calls=1)


def case_losses_and_gradients_equal_one_device(ranks: Ranks):
    for build in (llama, gpt_oss):
        model, ids = build().train(), tokens(2, 600)
        labels = ids.clone()
        labels[:, ::7] = -100
        loss = model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        wanted = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        model.zero_grad()
        with dx.apply(model, mesh=ranks.mesh) as handle:
            own = model(**handle.shard(ids, labels=labels)).loss
            own.backward()
        total = own.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-5)
        for name, x in model.named_parameters():
            if name not in wanted:
                continue
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            dist.all_reduce(grad)
            torch.testing.assert_close(
                grad, wanted[name], rtol=2e-3, atol=2e-5, msg=lambda text, name=name: name + text
            )


def case_fully_sharded_parameters_get_the_same_gradients(ranks: Ranks):
    ids = tokens(1, 600)
    whole, model = llama().train(), llama().train()
    whole(ids, labels=ids, use_cache=False).loss.backward()
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    with dx.apply(model, mesh=ranks.mesh) as handle:
        loss = model(**handle.shard(ids, labels=ids)).loss
        (loss * ranks.count).backward()  # FSDP takes the mean of the ranks' gradients
    for (name, x), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        close = dict(rtol=2e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(x.grad.full_tensor(), wanted.grad, **close)


def case_accelerates_parallelism_config_names_the_mesh(ranks: Ranks):
    """Its context parallel dimension splits the sequence, beside ranks with other batches if there are four."""
    replicas = 2 if ranks.count % 4 == 0 else 1
    config = ParallelismConfig(dp_shard_size=replicas, cp_size=ranks.count // replicas)
    mesh = config.build_device_mesh(device())["cp"]
    model = llama()
    ids = tokens(1, 600, seed=ranks.rank // mesh.size())  # of these ranks
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        with dx.apply(model, mesh=mesh) as handle:
            got = handle.gather(model(**handle.shard(ids)).logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)


def case_a_kill_switch_on_one_rank_holds_for_all(ranks: Ranks):
    model = llama()
    policy = policy_for(model, dx.Rule.of(dx.SlidingWindow(64)))
    with dx.apply(model, policy, mesh=ranks.mesh) as handle, torch.no_grad():
        model(**handle.shard(tokens(1, 600)))
        if ranks.rank == 0:
            handle.kill_switch.engage("test")
        model(**handle.shard(tokens(1, 600)))
        assert handle.stats() == {"sparse_calls": 2, "own_pattern_calls": 2}
        if ranks.rank == 0:
            handle.kill_switch.release()
        model(**handle.shard(tokens(1, 600)))
        assert handle.stats() == {"sparse_calls": 4, "own_pattern_calls": 2}


def case_bad_batches_are_refused_on_all_ranks(ranks: Ranks):
    model = llama()
    with dx.apply(model, mesh=ranks.mesh) as handle:
        with pytest.raises(RuntimeError, match="call model"):
            model(tokens(1, 64))
        with pytest.raises(ValueError, match="must be the same on all ranks, got shapes rank 0"):
            handle.shard(tokens(1, 600 + ranks.rank))
        with pytest.raises(ValueError, match="every rank must own at least 2 tokens"):
            handle.shard(tokens(1, 5))
        with pytest.raises(ValueError, match=r"must be .batch, seqlen."):
            handle.shard(tokens(600))
        with pytest.raises(ValueError, match="`split` must be for 600 tokens"):
            handle.shard(tokens(1, 600), split=dx.distributed.SequenceSplit.zigzag(601, ranks.count, 64))
        batch = handle.shard(tokens(1, 600))
        with pytest.raises(ValueError, match="must run on the"):
            model(**{name: x[:, :-1] if torch.is_tensor(x) else x for name, x in batch.items()})
        mask = batch["attention_mask"].clone()
        mask[0, 0] = 0
        with pytest.raises(dx.UnsupportedInputError, match="padding"):
            model(**{**batch, "attention_mask": mask})
        with pytest.raises(ValueError, match="already split"):
            dx.apply(model, mesh=ranks.mesh)
        with pytest.raises(ValueError, match="`window`, `own_pattern` and `name` must be left out"):
            dx.apply(model, mesh=ranks.mesh, name="x")


def case_what_cannot_be_split_is_refused(ranks: Ranks):
    grows = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(dx.UnsupportedInputError, match="depends on the longest position"):
        dx.apply(grows, mesh=ranks.mesh)
    model = llama(heads=(1, 1))
    probe = dx.Rule.of(dx.TopK(3, dx.AntiDiagonal()))
    with pytest.raises(dx.UnsupportedInputError, match="rules that need whole heads"):
        dx.apply(model, policy_for(model, probe), mesh=ranks.mesh)
    half = policy_for(model, dx.Rule.of(dx.SlidingWindow(64)), rollout=Rollout(share=0.5))
    with pytest.raises(dx.UnsupportedInputError, match="`rollout` must"):
        dx.apply(model, half, mesh=ranks.mesh)
    assert model.config._attn_implementation == "sdpa"


def case_tensor_parallel_ranks_get_their_heads_rules(ranks: Ranks):
    heads = (4 * ranks.count, 2 * ranks.count)
    model = model_of(transformers.LlamaForCausalLM, transformers.LlamaConfig, heads, tie_word_embeddings=False)
    by_head = [
        dx.Rule.of(dx.SlidingWindow(96), heads=list(range(3))),
        dx.Rule.of(dx.SlidingWindow(64) | dx.TopK(0.3, per="head"), heads=list(range(3, heads[0]))),
    ]
    decode = dx.Rule.of(dx.Sink(4) | dx.TopK(0.5), phase="decode", block_size=32)
    policy, ids = policy_for(model, *by_head, decode), tokens(1, 300)
    with dx.apply(model, policy), torch.no_grad():
        wanted, said = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    folder = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    dist.broadcast_object_list(folder)
    if ranks.rank == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    split = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks.count)}
    part = transformers.LlamaForCausalLM.from_pretrained(folder[0], dtype=torch.float32, **split).to(device())
    with dx.apply(part, policy) as handle, torch.no_grad():
        got = part(ids).logits
        assert handle.stats()["sparse_calls"] == 2, handle.stats()
        assert torch.equal(part.generate(ids, max_new_tokens=4, do_sample=False), said)
        assert "heads are sharded" not in handle.stats()["dense_calls"], handle.stats()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)
    dist.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder[0])


def case_the_wrong_device_is_refused(ranks: Ranks):
    if ranks.device == "cpu":
        return
    model = llama()
    with dx.apply(model, mesh=ranks.mesh) as handle, pytest.raises(ValueError, match="must be on the GPU"):
        handle.shard(tokens(1, 600).cpu())
    with pytest.raises(ValueError, match="`model` must be on a GPU"):
        dx.apply(model.cpu(), mesh=ranks.mesh)


def case_removing_restores_the_model(ranks: Ranks):
    model, ids = llama(), tokens(1, 600)
    with torch.no_grad():
        wanted = model(ids).logits
        with dx.apply(model, mesh=ranks.mesh) as handle:
            model(**handle.shard(ids))
        assert torch.equal(model(ids).logits, wanted)
        handle.remove()
        with dx.apply(model, mesh=ranks.mesh) as later:
            handle.remove()
            model(**later.shard(ids))
            assert later.stats()["own_pattern_calls"] > 0
