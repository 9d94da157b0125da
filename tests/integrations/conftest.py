# SPDX-License-Identifier: Apache-2.0
"""Models of the tests in real vLLM engines, and the answers of vLLM's own backend, each made once."""

import pytest

from vllm_models import CHUNKS, PROMPTS, SIZES, run, save


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    import transformers

    return save(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(num_hidden_layers=3, **SIZES))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory):
    """Five windows to one layer that sees everything: two kv cache groups."""
    import transformers

    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=96, query_pre_attn_scalar=20, architectures=["Gemma3ForCausalLM"], **SIZES
    )
    return save(tmp_path_factory.mktemp("gemma"), config)


@pytest.fixture(scope="session")
def own(llama, tmp_path_factory):
    """Return the answers of vLLM's own backend to the prompts of this file; computed once."""
    prompts = [prompt for case in PROMPTS.values() for prompt in case]
    answer = run(tmp_path_factory.mktemp("own"), llama, prompts, **CHUNKS)
    assert answer.pop("status") == {"active": False, "reason": "DYNAXX_POLICY is not set"}
    assert answer.pop("prepared") == 0

    def of(name):
        places = [prompts.index(prompt) for prompt in PROMPTS[name]]
        return {key: [values[at] for at in places] for key, values in answer.items()}

    return of
