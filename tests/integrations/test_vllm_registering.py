# SPDX-License-Identifier: Apache-2.0
"""How the plugin enters a real vLLM: what it needs of vLLM, its entry point, and policies that stop an engine."""

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import dynaxx as dx
import vllm_source
from dynaxx.integrations import vllm as plugin
from dynaxx.integrations.vllm import contract as vllm_contract
from vllm_models import SPARSE, policy_file, run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_vllm_is_what_the_plugin_needs():
    assert vllm_contract.broken(vllm_contract.SHARED) == []
    assert vllm_contract.broken(vllm_contract.CPU) == []
    assert vllm_contract.broken(vllm_contract.CUDA) == []


def test_sources_say_what_imports_say():
    import vllm

    root = Path(vllm.__file__).parents[1]

    def read(name):
        if not (root / name).exists():
            raise KeyError(name)
        return (root / name).read_text()

    assert vllm_source.problems(vllm_source.Sources(read)) == {"CPU": [], "GPU": []}


def test_the_entry_point_leads_to_the_plugin():
    (found,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "dynaxx")
    assert found.load() is plugin.register


BROKEN = {
    "missing": (None, "no such file"),
    "no JSON": ("{", "is not JSON"),
    "wrong field": ('{"format": "dynaxx.policy", "version": 1, "model": {"model_type": "llama"}}', "`model.layers`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_policy_stops_the_engine(case, tmp_path, llama):
    text, said = BROKEN[case]
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    done = run(tmp_path, llama, [[5, 6]], policy=path, check=False)
    assert done.returncode != 0
    assert said in done.stderr[done.stderr.rindex("Error: ") :]


def test_a_policy_of_another_model_stops_the_engine(tmp_path, llama, gemma):
    path = policy_file(tmp_path, gemma, dx.Rule.of(SPARSE))
    done = run(tmp_path, llama, [[5, 6]], policy=path, check=False)
    assert done.returncode != 0
    assert "the policy is for another model" in done.stderr


def test_a_draft_model_is_refused(llama, tmp_path):
    policy = policy_file(tmp_path, llama, dx.Rule.of(SPARSE))
    draft = {"model": str(llama), "num_speculative_tokens": 2}
    done = run(tmp_path, llama, [[5, 6]], policy=policy, check=False, speculative_config=draft)
    assert "draft models are not supported; use ngram" in done.stderr
