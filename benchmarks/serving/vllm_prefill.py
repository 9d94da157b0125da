# SPDX-License-Identifier: Apache-2.0
"""Time a long prompt in vLLM's own engine on the CPU: vLLM's backend, then a policy, dense and sparse, in one run.

    .venv-vllm/bin/python benchmarks/serving/vllm_prefill.py MODEL policy.json --tokens 8000 --threads 2

Each engine has a process of its own; the text is Python's documentation, another part of it for every run, so nothing
comes from a prefix cache. Prints seconds to the first token, by the clock and of the processor, which neighbours on the
machine disturb less; each the median of `--runs`. A policy's run is trusted only if it was active and its calls sparse.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip


def measure(arguments):
    """Measure one engine in this process: seconds by what ran, and the policy's status."""
    from pydoc_data.topics import topics

    from vllm import LLM, SamplingParams

    from dynaxx.integrations.vllm.plugin import status, switch

    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=arguments.tokens + 64,
        max_num_batched_tokens=arguments.chunk,
        disable_log_stats=True,
    )
    ids = llm.get_tokenizer()("\n\n".join(topics.values()), add_special_tokens=False)["input_ids"]

    def seconds(run):
        at = run * arguments.tokens // 2
        prompt = {"prompt_token_ids": ids[at : at + arguments.tokens]}
        begun = time.perf_counter(), time.process_time()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    def timed():
        return [statistics.median(each) for each in zip(*map(seconds, range(arguments.runs)), strict=True)]

    llm.generate([{"prompt_token_ids": ids[-300:]}], SamplingParams(max_tokens=2), use_tqdm=False)  # warm up
    wait_for_quiet(arguments.lock)
    try:
        if not os.environ.get("DYNAXX_POLICY"):
            return {"vLLM's own backend": timed()}
        result = {"policy, sparse": timed()}
        assert status()["active"], status()
        assert status()["sparse_calls"], status()
        result["density"] = status()["density"]
        switch(False)
        return result | {"policy, switched to dense": timed()}
    finally:
        if arguments.lock:
            os.remove(arguments.lock)


def wait_for_quiet(lock):
    """Take a lock file that others who measure on this machine take, too."""
    while lock:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            return
        except FileExistsError:
            time.sleep(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("policy")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lock", default="", help="a lock file to hold while timing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    found = {}
    for policy in ("", arguments.policy):
        env = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(arguments.threads), "DYNAXX_POLICY": policy}
        command = [sys.executable, *sys.argv, "--one"]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found |= json.loads(done.stdout.strip().splitlines()[-1])
    own = found["vLLM's own backend"]
    density = found.pop("density")
    for name, (clock, cpu) in found.items():
        print(f"{name:<28} {clock:7.2f} s {own[0] / clock:5.2f}x   CPU {cpu:7.2f} s {own[1] / cpu:5.2f}x")
    print(f"density of the sampled sparse calls: {density}")


if __name__ == "__main__":
    main()
