# SPDX-License-Identifier: Apache-2.0
"""Model repositories in a real Triton Inference Server: `make test-triton` runs it in an environment of its own.

Requests go over real HTTP and gRPC. Answers must equal the tokens that transformers generates for each prompt alone.
"""

import importlib.util
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

if importlib.util.find_spec("pytriton") is None:  # whose server alone is used: it does not import by itself
    pytest.skip("Triton Inference Server has an environment of its own: make test-triton", allow_module_level=True)

import numpy as np
import transformers
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

import dynaxx as dx
from dynaxx.engines.triton_server import RepositorySettings, write_repository
from dynaxx.integrations.transformers import model_facts
from tiny import save_tiny_model
from triton_server import TritonServer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPARSE = (
    dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64) | dx.TopK(0.2)),
    dx.Rule.of(dx.Sink(32) | dx.TopK(2, dx.MinMax()), phase="decode", block_size=32),
)
OTHER = (dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(32)),)
LENGTHS = (1, 3, 17, 63, 64, 65, 130, 300, 511, 700)


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [LENGTHS[i % len(LENGTHS)] + i // len(LENGTHS) for i in range(count)]
    return [torch.randint(2, 320, (n,), generator=generator).tolist() for n in lengths]


class Place:
    """A model, its repository, and what transformers generates with it."""

    def __init__(self, folder):
        self.folder, self.repository = folder, folder / "repository"
        save_tiny_model(folder / "model", max_positions=2048)
        config = transformers.AutoConfig.from_pretrained(folder / "model")
        config.initializer_range = 0.2  # likelier tokens lie further apart
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        self.model.save_pretrained(folder / "model")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        self.kill_file = folder / "kill"
        self.policy = self.of(SPARSE)
        write_repository(folder / "model", self.policy, self.repository)
        write_repository(folder / "model", self.policy, self.repository, RepositorySettings("whole", stream=False))

    def of(self, rules):
        return dx.Policy(model=model_facts(self.model), block_size=64, rules=rules)

    @property
    def policy_file(self):
        return self.repository / "dynaxx" / "1" / "policy.json"

    def expected(self, ids, most, rules=SPARSE):
        """Return the tokens that transformers generates for one prompt; without dynaxx if `rules` is None."""
        ids = torch.tensor([ids])
        generate = lambda: self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most
        )
        if rules is None:
            return generate()[0, ids.shape[1] :].tolist()
        with dx.apply(self.model, self.of(rules)):
            return generate()[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def server(place):
    folder = place.folder / "first"
    folder.mkdir()
    environment = {"DYNAXX_KILL_FILE": str(place.kill_file)}
    with TritonServer(place.repository, folder, environment=environment) as running:
        yield running


def inputs(module, **values):
    """Return Triton's inputs of a request."""
    kinds = {"input_ids": "INT64", "max_tokens": "INT32", "stream": "BOOL", "temperature": "FP32", "top_p": "FP32",
             "seed": "INT64", "text_input": "BYTES"}  # fmt: skip
    types = {"INT64": np.int64, "INT32": np.int32, "BOOL": bool, "FP32": np.float32, "BYTES": object}
    made = []
    for name, value in values.items():
        array = np.array([value if isinstance(value, list) else [value]], dtype=types[kinds[name]])
        made.append(module.InferInput(name, list(array.shape), kinds[name]))
        made[-1].set_data_from_numpy(array)
    return made


class Streams:
    """A gRPC stream. Requests have ids; answers arrive in any order."""

    def __init__(self, server, model="dynaxx"):
        self.client, self.model = grpc.InferenceServerClient(server.grpc), model
        self.answers = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, name, **values):
        self.client.async_stream_infer(
            self.model, inputs(grpc, **values), request_id=name, enable_empty_final_response=False
        )

    def collect(self, count, seconds=300):
        """Return for each request its token pieces, its text and its end, once `count` requests have ended."""
        found, errors, ended = {}, [], 0
        end = time.monotonic() + seconds
        while ended < count:
            result, error = self.answers.get(timeout=end - time.monotonic())
            if error is not None:
                errors.append(str(error))
                ended += 1
                continue
            pieces, texts, reasons = found.setdefault(result.get_response().id, ([], [], []))
            pieces.append(result.as_numpy("output_ids")[0].tolist())
            texts.append(result.as_numpy("text_output")[0, 0].decode())
            reasons.append(result.as_numpy("finish_reason")[0, 0].decode())
            ended += bool(reasons[-1])
        return found, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def post(address, path, **body):
    """Send JSON over HTTP; return the status and the answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}/v2/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def numbers(server):
    """Return the lines of /metrics."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
        return answer.read().decode()


def number(server, name, *having):
    """Sum a metric over the series whose labels contain the given texts."""
    lines = [line for line in numbers(server).splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in having))


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_fifty_streams_at_once_give_transformers_tokens(place, server):
    asked = prompts(50)
    with Streams(server) as streams:
        for i, ids in enumerate(asked):
            streams.send(str(i), input_ids=ids, max_tokens=3 + i % 6, stream=True)
        found, errors = streams.collect(50)
    assert not errors
    for i, ids in enumerate(asked):
        pieces, texts, reasons = found[str(i)]
        expected = place.expected(ids, 3 + i % 6)
        assert [token for piece in pieces for token in piece] == expected, len(ids)
        assert all(len(piece) == 1 for piece in pieces)
        assert "".join(texts) == place.tokenizer.decode(expected, skip_special_tokens=True)
        assert reasons == [""] * (len(expected) - 1) + ["stop" if expected[-1] == 1 else "length"]
    assert number(server, "nv_inference_count", 'model="dynaxx"') >= 50
    assert number(server, "nv_inference_exec_count", 'model="dynaxx"') < 50, "requests were batched"
    until(lambda: number(server, "dynaxx_layer_calls_total", 'backend="cpu"', 'phase="decode"') > 0)


def test_plain_infer_over_http_and_grpc_fifty_at_once(place, server):
    asked = prompts(50, seed=1)

    def ask(i):
        values = {"input_ids": asked[i], "max_tokens": 4}
        if i % 2:
            with grpc.InferenceServerClient(server.grpc) as client:
                return client.infer("whole", inputs(grpc, **values)).as_numpy("output_ids")[0].tolist()
        with http.InferenceServerClient(server.http, network_timeout=300, connection_timeout=300) as client:
            return client.infer("whole", inputs(http, **values)).as_numpy("output_ids")[0].tolist()

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    assert answers == [place.expected(ids, 4) for ids in asked]


def test_text_over_http(place, server):
    text = "Section 7. The quick brown fox \N{SNOWMAN}"
    expected = place.expected(place.tokenizer(text)["input_ids"], 6)
    status, answer = post(server.http, "models/dynaxx/generate", text_input=text, max_tokens=6)
    assert status == 200
    assert json.loads(answer)["text_output"] == place.tokenizer.decode(expected, skip_special_tokens=True)
    status, answer = post(server.http, "models/dynaxx/generate_stream", text_input=text, max_tokens=6, stream=True)
    pieces = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    assert [piece["output_ids"] for piece in pieces] == expected
    assert pieces[-1]["finish_reason"] == "length"


BAD = [
    ({"max_tokens": 4}, "`text_input` or `input_ids`"),
    ({"input_ids": [5], "text_input": "a"}, "not both"),
    ({"input_ids": [320]}, "between 0 and 319"),
    ({"input_ids": [-1]}, "between 0 and 319"),
    ({"input_ids": [5] * 2048}, "must fit 2048 tokens"),
    ({"input_ids": [5], "max_tokens": 0}, "`max_tokens` must be >= 1"),
    ({"input_ids": [5], "top_p": 0.5}, "need a `temperature`"),
    ({"input_ids": [5], "temperature": -1.0}, "`temperature` must be"),
    ({"input_ids": [5], "max_tokens": [1, 2]}, ""),
    ({"text_input": ""}, "at least one token"),
]


def test_bad_requests_are_refused_and_harm_nobody(place, server):
    good = prompts(10, seed=2)
    with Streams(server) as streams, Streams(server) as others:
        for i, ids in enumerate(good):
            streams.send(str(i), input_ids=ids, max_tokens=4)
            others.send("bad", **BAD[i][0])
        found, errors = streams.collect(10)
        _, refused = others.collect(10)
    assert not errors
    assert [found[str(i)][0] for i in range(10)] == [[place.expected(ids, 4)] for ids in good]
    assert len(refused) == 10
    for values, said in BAD:
        assert any(said in each for each in refused), said
        if values.get("max_tokens") != [1, 2] and values:
            status, answer = post(server.http, "models/dynaxx/generate", **values)
            assert status == 400, answer
            assert said in answer
    client = grpc.InferenceServerClient(server.grpc)
    with pytest.raises(InferenceServerException, match="decoupled"):
        client.infer("whole", inputs(grpc, input_ids=[5], stream=True))
    two = grpc.InferInput("input_ids", [2, 3], "INT64")
    two.set_data_from_numpy(np.full((2, 3), 5))
    with pytest.raises(InferenceServerException, match="one request per prompt"):
        client.infer("whole", [two])
    with pytest.raises(InferenceServerException):
        client.infer("whole", inputs(grpc, text_input=b"\xff\xfe"))
    assert client.infer("whole", inputs(grpc, input_ids=[5], max_tokens=1)).as_numpy("output_ids").shape == (1, 1)


def test_draws_repeat_with_a_seed(server):
    client = grpc.InferenceServerClient(server.grpc)
    values = {"input_ids": [5, 6, 7], "max_tokens": 8, "temperature": 5.0, "top_p": 0.9}
    drawn = [client.infer("whole", inputs(grpc, **values, seed=s)).as_numpy("output_ids").tolist() for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def streamed(server, asked, most):
    with Streams(server) as streams:
        for i, ids in enumerate(asked):
            streams.send(str(i), input_ids=ids, max_tokens=most)
        found, errors = streams.collect(len(asked))
    assert not errors
    return [found[str(i)][0][0] for i in range(len(asked))]


def test_a_client_that_goes_leaves_the_others(place, server):
    asked = prompts(4, seed=3)
    before = number(server, "dynaxx_layer_calls_total", 'phase="decode"')
    with Streams(server) as gone:
        gone.send("x", input_ids=asked[3], max_tokens=1500, stream=True)
        gone.answers.get(timeout=120)
    assert streamed(server, asked, 5) == [place.expected(ids, 5) for ids in asked]
    time.sleep(1.5)
    steps = (number(server, "dynaxx_layer_calls_total", 'phase="decode"') - before) / 2
    assert steps < 1000, "a cancelled request ran on"


def test_the_kill_switch(place, server):
    asked = prompts(4, seed=4)[2:] + prompts(10, seed=4)[6:]
    sparse, dense = ([place.expected(ids, 8, rules) for ids in asked] for rules in (SPARSE, None))
    assert sparse != dense
    assert streamed(server, asked, 8) == sparse
    place.kill_file.touch()
    assert streamed(server, asked, 8) == dense
    place.kill_file.unlink()
    assert streamed(server, asked, 8) == sparse


def test_policies_are_reloaded(place, server):
    asked = prompts(10, seed=5)[6:]

    def changed(result):
        """Return how often the policy was reloaded, as metrics show it after a request."""
        streamed(server, [[5]], 1)
        return number(server, "dynaxx_policy_reloads_total", f'result="{result}"', 'model_name="dynaxx"')

    new = [place.expected(ids, 8, OTHER) for ids in asked]
    assert new != [place.expected(ids, 8) for ids in asked]
    dx.save_policy(place.of(OTHER), place.policy_file)
    until(lambda: changed("ok") == 1)
    assert streamed(server, asked, 8) == new
    place.policy_file.write_text("{")
    until(lambda: changed("failed") == 1)
    assert streamed(server, asked, 8) == new
    dx.save_policy(place.policy, place.policy_file)
    until(lambda: changed("ok") == 2)
    assert streamed(server, asked, 8) == [place.expected(ids, 8) for ids in asked]


def test_triton_loads_the_model_again_while_it_is_asked(place, server):
    asked, found = prompts(10, seed=6), []
    asking = threading.Thread(target=lambda: found.extend(streamed(server, asked, 20)))
    asking.start()
    time.sleep(0.3)
    status, answer = post(server.http, "repository/models/dynaxx/load")
    assert status == 200, answer
    asking.join(120)
    assert found == [place.expected(ids, 20) for ids in asked]
    assert streamed(server, asked, 5) == [place.expected(ids, 5) for ids in asked]


def test_a_broken_repository_is_refused_with_the_reason(place, server):
    write_repository(place.folder / "model", None, place.repository, RepositorySettings("broken"))
    facts = {**place.policy.model.model_dump(), "layers": 5}
    dx.save_policy(dx.Policy(model=facts), place.repository / "broken" / "1" / "policy.json")
    status, answer = post(server.http, "repository/models/broken/load")
    assert status == 400
    assert "layers" in answer
    assert streamed(server, [[5]], 2) == [place.expected([5], 2)]


def children(process):
    tasks = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(tasks, encoding="ascii") as file:
        return [int(each) for each in file.read().split()]


def test_a_stop_under_load_loses_no_answer_that_it_began(place, tmp_path):
    repository = tmp_path / "repository"
    write_repository(place.folder / "model", place.policy, repository, RepositorySettings(max_batch_size=8))
    running = TritonServer(repository, tmp_path)
    asked = prompts(50, seed=7)
    with running, Streams(running) as streams:
        workers = children(running.process)
        for i, ids in enumerate(asked):
            streams.send(str(i), input_ids=ids, max_tokens=6)
        first = streams.answers.get(timeout=120)
        streams.answers.put(first)
        running.process.terminate()
        found, errors = streams.collect(50)
        assert len(found) + len(errors) == 50
        assert found
        for name, (pieces, _, reasons) in found.items():
            assert [token for piece in pieces for token in piece] == place.expected(asked[int(name)], 6)
            assert reasons[-1]
    assert running.stop() == 0
    assert not [each for each in workers if os.path.exists(f"/proc/{each}")]


def test_smollm2_gives_transformers_text(tmp_path):
    from dynaxx.lab.models import load_model, resolve_model

    model, tokenizer = load_model("smollm2")
    policy = dx.Policy(model=model_facts(model), block_size=64, rules=SPARSE)
    write_repository(resolve_model("smollm2"), policy, tmp_path / "repository", RepositorySettings("smollm2"))
    text = "\n".join(f"{i}. The capital of France is Paris." for i in range(40)) + "\n40. The capital of"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with dx.apply(model, policy) as handle, torch.inference_mode():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert handle.stats()["sparse_calls"] > 30
    with TritonServer(tmp_path / "repository", tmp_path) as running:
        status, answer = post(running.http, "models/smollm2/generate", text_input=text, max_tokens=8)
    assert status == 200, answer
    assert json.loads(answer)["text_output"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
