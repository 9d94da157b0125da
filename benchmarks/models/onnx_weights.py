# SPDX-License-Identifier: Apache-2.0
"""Compare forms of the weights of an exported SmolLM2-135M in ONNX Runtime on a CPU: quality, size and speed.

    python benchmarks/models/onnx_weights.py --sequences 4 --seqlen 1024 --threads 1

Each form reads the same stretches of Python's documentation, with dense attention. Quality is the perplexity, the share
of positions whose most likely token is that of fp32, and the mean divergence of the next token's distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.float16 import convert_float_to_float16

from dynaxx.engines.onnx import export_onnx
from dynaxx.engines.onnx.export import with_int8_weights
from dynaxx.engines.onnx.graph import save_graphs
from dynaxx.engines.onnx.session import SLOW_FUSIONS


def fp16(source, target):
    model = onnx.load(source)
    save(convert_float_to_float16(model, keep_io_types=True), target)


def dynamic(source, target, **settings):
    quantize_dynamic(source, target, weight_type=QuantType.QInt8, use_external_data_format=True, **settings)


def blocks(source, target, **settings):
    """Quantize weights alone, in blocks of input channels."""
    quantizer = MatMulNBitsQuantizer(onnx.load(source), **settings)
    quantizer.process()
    save(quantizer.model.model, target)


def ours(source, target):
    """Store weights as `dynaxx export --option weights=int8` does."""
    save_graphs({target.stem: with_int8_weights(onnx_ir.load(source))}, target.parent)


def save(model, target):
    onnx.save(model, target, save_as_external_data=True, location=f"{target.stem}.bin")


SIGNED = {"bits": 8, "block_size": 32, "is_symmetric": True}
UNSIGNED = {"bits": 4, "block_size": 32}
OURS = "int8, weights=int8 of dynaxx export"
FORMS = {
    "fp32": None,
    "fp16": fp16,
    "int8, quantize_dynamic": dynamic,
    "int8, quantize_dynamic per channel": partial(dynamic, per_channel=True),
    "int8, quantize_dynamic per channel, reduce_range": partial(dynamic, per_channel=True, reduce_range=True),
    "int8 in blocks of 32, fp32 products": partial(blocks, **SIGNED),
    OURS: ours,
    "int4 in blocks of 32, fp32 products": partial(blocks, **UNSIGNED),
    "int4 in blocks of 32": partial(blocks, **UNSIGNED, accuracy_level=4),
}


class Running:
    """A graph with a cache in and out."""

    def __init__(self, path, threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
        )
        self.inputs = self.session.get_inputs()

    def step(self, ids, cache=None):
        """Return logits of all tokens, and the cache."""
        cache = cache or [np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in self.inputs[1:]]
        names = [each.name for each in self.inputs]
        logits, *grown = self.session.run(None, dict(zip(names, [ids, *cache], strict=True)))
        return logits, grown


def log_softmax(logits):
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def quality(model, texts, reference):
    """Return a form's perplexity, its agreement with fp32 and its divergence; an empty reference is filled."""
    losses, same, divergences = [], [], []
    for index, ids in enumerate(texts):
        found = log_softmax(model.step(ids)[0][0, :-1])
        if index == len(reference):
            reference.append(found.astype(np.float32))
        want = reference[index].astype(np.float64)
        losses.append(-np.take_along_axis(found, ids[0, 1:, None], -1))
        same.append(found.argmax(-1) == want.argmax(-1))
        divergences.append((np.exp(want) * (want - found)).sum(-1))
    return math.exp(np.concatenate(losses).mean()), np.concatenate(same).mean(), np.concatenate(divergences).mean()


def timed(clock, run, *arguments):
    begin = clock()
    result = run(*arguments)
    return clock() - begin, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=16, help="tokens of which the decoding time is the median")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="names of forms to compare with fp32, divided by semicolons")
    parser.add_argument("--exports", type=Path, help="folder whose graphs are used again")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    args = parser.parse_args()
    clock = time.process_time if args.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.exports or Path(temporary)
        rows = measure(folder, args, clock)
    perplexity = {row["weights"]: row["perplexity"] / rows[0]["perplexity"] for row in rows}
    bars = [
        {"name": f"{OURS}: perplexity relative to fp32", "workload": f"{args.seqlen:,} tokens", "bar": 1.01,
         "value": perplexity[OURS], "ok": perplexity[OURS] <= 1.01}
    ] if OURS in perplexity else []  # fmt: skip
    print(json.dumps({"rows": rows, "bars": bars}, indent=None if args.json else 1))


def measure(folder, args, clock):
    from pydoc_data.topics import topics

    from dynaxx.lab.models import load_model

    model, tokenizer = load_model("smollm2")
    if not (folder / "dense").exists():
        export_onnx(model, folder / "dense", all_logits=True)
    ids = np.array(tokenizer("\n\n".join(topics.values()))["input_ids"])
    texts = [ids[i * args.seqlen :][: args.seqlen][None] for i in range(args.sequences)]
    del model
    rows, reference = [], []
    names = FORMS if args.only is None else ["fp32", *args.only.split(";")]
    for name in names:
        make, path = FORMS[name], folder / "dense" / "decode.onnx"
        if make is not None:
            made = folder / re.sub(r"\W+", "-", name)
            made.mkdir(exist_ok=True)
            source, path = path, made / "decode.onnx"
            if not path.exists():
                make(source, path)
        running = Running(path, args.threads)
        perplexity, same, divergence = quality(running, texts, reference)
        prefill, (_, cache) = timed(clock, running.step, texts[0])
        token, decode = np.array([[1]]), []
        for _ in range(args.answer):
            seconds, (_, cache) = timed(clock, running.step, token, cache)
            decode.append(seconds)
        size = sum(file.stat().st_size for file in path.parent.iterdir() if file.suffix in (".bin", ".data"))
        size += path.stat().st_size
        rows.append(
            {
                "weights": name,
                "MB": round(size / 1e6),
                "perplexity": perplexity,
                "same token as fp32": f"{same:.2%}",
                "divergence, nats": float(divergence),
                "prompt, s": prefill,
                "token, ms": statistics.median(decode) * 1e3,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
