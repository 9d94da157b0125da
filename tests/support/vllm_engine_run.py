# SPDX-License-Identifier: Apache-2.0
"""Run a vLLM engine in a separate process, for tests to compare with. Read a JSON request, write a JSON answer.

    python tests/support/vllm_engine_run.py request.json answer.json

The request: {"model": folder, "engine": arguments of LLM, "prompts": [[token, ...], ...], "max_tokens": n}, and
"as_on_cuda" to decode in the way that CUDA graphs capture and to run kernels ahead, "lora" (the folder of an adapter)
and "regex" (of the answers). The answer: {"tokens": [[...]],
"logprobs": [[...]], "margins": [[...]], "status": dynaxx's, "prepared": rules whose kernels ran ahead, "workers": the
status of each rank where there are some, "preemptions": vLLM's metric, if the engine keeps metrics}. A margin is the
best token's log-probability over the second's.
"""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
DEFAULTS = {"enforce_eager": True, "dtype": "float32", "disable_log_stats": True, "max_model_len": 4096}


def make(model, **arguments):
    from vllm import LLM

    return LLM(str(model), **{**DEFAULTS, **arguments})


def generate(llm, prompts, max_tokens, lora=None, regex=None):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    adapter = lora and LoRARequest("adapter", 1, lora)
    shape = regex and StructuredOutputsParams(regex=regex)
    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=not regex, structured_outputs=shape
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, parameters, use_tqdm=False, lora_request=adapter)
    answer = {"tokens": [], "logprobs": [], "margins": [], "cached": []}
    for output in outputs:
        ranked = [sorted((p.logprob for p in each.values()), reverse=True) for each in output.outputs[0].logprobs]
        answer["tokens"].append(list(output.outputs[0].token_ids))
        answer["logprobs"].append([each[0] for each in ranked])
        answer["margins"].append([each[0] - each[1] for each in ranked])
        answer["cached"].append(output.num_cached_tokens)
    return answer


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    if request.get("as_on_cuda"):
        from dynaxx.integrations.vllm.cpu import CpuBuilder, CpuImpl

        CpuBuilder.compiles = CpuImpl.compiles = True
        CpuBuilder.largest_capture = staticmethod(lambda config: 1 << 20)
    llm = make(request["model"], **request.get("engine", {}))
    answer = generate(llm, request["prompts"], request["max_tokens"], request.get("lora"), request.get("regex"))
    from dynaxx.integrations.vllm.engine import current
    from dynaxx.integrations.vllm.plugin import status

    answer["status"] = status()
    engine = current()
    answer["prepared"] = 0 if engine is None else len(engine.prepared)
    if not request.get("engine", {}).get("disable_log_stats", True):
        answer["preemptions"] = sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
    if request.get("engine", {}).get("tensor_parallel_size", 1) > 1:
        answer["workers"] = llm.collective_rpc("dynaxx_status")
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
