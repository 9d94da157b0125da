# SPDX-License-Identifier: Apache-2.0
"""Bad input ends with exit code 2 and a message of one line; a full disk loses a file, but not the result."""

import errno
import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

import dynaxx as dx

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from dynaxx.cli import app
from dynaxx.lab import files as lab_files
from dynaxx.lab.models import _fingerprint
from dynaxx.storage import new_folder
from given_times import give_ceilings
from tiny import TEXT, save_tiny_model

EVIL = "\x1b]0;owned\x07\u202e"


def dynaxx_(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tiny", max_positions=512)
    (folder / "text.txt").write_text(TEXT)
    return folder / "tiny"


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


HOSTILE = {
    "config is no JSON": written("config.json", "{"),
    "config is a list": written("config.json", "[]"),
    "config is deep": written("config.json", "[" * 100_000),
    "config has huge numbers": written("config.json", '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"),
    "unknown type": config(model_type="nothing-like-it" + EVIL),
    "type is a number": config(model_type=7),
    "no heads": config(num_attention_heads=0),
    "negative layers": config(num_hidden_layers=-3),
    "heads are text": config(num_attention_heads="many"),
    "odd rope": config(rope_parameters={"rope_type": "no such", "factor": "x"}),
    "code of its own": config(auto_map={"AutoModelForCausalLM": "evil.Model"}, model_type="evil"),
    "hidden size does not divide": config(hidden_size=63, head_dim=None),
    "vocabulary does not fit": config(vocab_size=7),
    "activation unknown": config(hidden_act="no such"),
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "weights empty": written("model.safetensors", b""),
    "weights with a huge head": written("model.safetensors", b"\xff" * 64),
    "tokenizer is no JSON": written("tokenizer.json", "{"),
    "tokenizer is a list": written("tokenizer.json", "[]"),
    "index is odd": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
    ),
}


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_hostile_model_folders_are_code_2_and_one_line(spoil, tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    spoil(folder)
    shown = dynaxx_("profile", folder, "--text", tiny.parent / "text.txt", "--lengths", "32", "--quiet")
    assert shown.exit_code == 2, (shown.output, shown.exception)
    assert isinstance(shown.exception, SystemExit)
    line = shown.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "\x1b" not in shown.output


EVIL_CODE = """
from pathlib import Path
Path(r"{mark}").touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, LlamaTokenizerFast as Tokenizer
"""


@pytest.mark.parametrize(
    ("model_type", "command"),
    [
        *product(("llama", "evil"), ("profile", "export openvino", "export triton")),
        ("evil", "export onnx"),
        pytest.param("llama", "export onnx", marks=pytest.mark.slow),
    ],
)
def test_code_of_a_model_folder_never_runs(command, model_type, tiny, tmp_path):
    if command == "export openvino":
        pytest.importorskip("openvino")
    folder, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny, folder)
    (folder / "evil.py").write_text(EVIL_CODE.format(mark=mark))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(EVIL_CODE.format(mark=mark))
    autos = {
        "AutoConfig": "Config",
        "AutoModelForCausalLM": "Model",
        "AutoModel": "Model",
        "AutoTokenizer": "Tokenizer",
    }
    config(auto_map={name: f"evil.{kind}" for name, kind in autos.items()}, model_type=model_type)(folder)
    name, *engine = command.split()
    options = ["--format", *engine, "--out", tmp_path / "out"] if engine else ["--lengths", "32"]
    arguments = [name, folder, *options, "--quiet"]
    shown = CliRunner().invoke(app, [str(argument) for argument in arguments], input="y\n" * 100)
    assert not mark.exists()
    if model_type == "evil":
        assert shown.exit_code == 2, (shown.output, shown.exception)
        assert shown.stderr.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[]", "9" * 5000, "NaN", '{"lengths": 7}', '{"lengths": [{"seqlen": "x"}], "model": []}', "\x00"],
)
@pytest.mark.parametrize("name", ["profile", "analysis", "tuning", "policy", "validation"])
def test_odd_result_files_are_said_in_the_report(name, text, tmp_path):
    (tmp_path / f"{name}.json").write_text(text)
    shown = dynaxx_("report", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert f"{name}.json" in (tmp_path / "report.html").read_text()


def test_pipes_are_refused_as_text_policy_and_results(tiny, tmp_path):
    pipe = tmp_path / "profile.json"
    os.mkfifo(pipe)
    for arguments in (["profile", tiny, "--text", pipe], ["diff", pipe, pipe], ["watch", pipe, "--once"]):
        shown = dynaxx_(*arguments)
        assert shown.exit_code == 2, shown.output
        assert "regular file" in shown.stderr
    assert dynaxx_("report", tmp_path).exit_code == 0


@pytest.mark.parametrize("option", ["9" * 5000, "²", "1-" + "9" * 5000])
def test_numbers_that_are_none_are_refused(option, tiny):
    shown = dynaxx_("profile", tiny, "--lengths", option)
    assert shown.exit_code == 2
    assert "--lengths must be numbers" in shown.stderr
    assert dynaxx_("analyze", tiny, "--tokens", "9" * 5000).exit_code == 2


def test_names_reach_no_terminal_raw(tmp_path):
    shown = dynaxx_("profile", tmp_path / EVIL)
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output
    assert "\u202e" not in shown.output


def test_a_full_disk_is_found_before_the_work(tiny, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lab_files.os, "fsync", full)
    shown = dynaxx_("profile", "no-model", "--out", tmp_path / "run")
    assert shown.exit_code == 2
    assert "no space left" in shown.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_disk_that_fills_up_costs_the_file_and_not_the_result(as_json, tiny, tmp_path, monkeypatch):
    give_ceilings(monkeypatch)

    def full(path, text):
        raise lab_files.OutOfSpaceError(errno.ENOSPC, f"no space left to write {path}")

    monkeypatch.setattr(lab_files, "write_text", full)
    arguments = [
        "profile",
        tiny,
        "--text",
        tiny.parent / "text.txt",
        "--lengths",
        "32",
        "--out",
        tmp_path / "run",
        "-q",
    ]
    shown = dynaxx_(*arguments, *(["--json"] if as_json else []))
    assert shown.exit_code == 2
    assert "no space left" in shown.stderr
    assert "attention's share of prefill" in shown.stdout
    assert not as_json or json.loads(shown.stdout)["lengths"]


def test_validate_without_lengths_serves_short_contexts(tiny, tmp_path):
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.lab.models import load_model

    loaded = load_model(tiny)
    rule = dx.Rule.of(dx.SlidingWindow(64) | dx.Sink(16))
    dx.save_policy(dx.Policy(model=model_facts(loaded.model), block_size=16, rules=(rule,)), tmp_path / "policy.json")
    shown = dynaxx_(
        "validate",
        tiny,
        tmp_path / "policy.json",
        "--text",
        tiny.parent / "text.txt",
        "--out",
        tmp_path,
        "-q",
        "--json",
    )
    assert shown.exit_code in (0, 1), shown.output
    assert max(row["seqlen"] for row in json.loads(shown.stdout)["speed"]) == 512


def test_files_that_differ_anywhere_have_other_fingerprints(tmp_path):
    path = tmp_path / "a.gguf"
    content = bytearray(8 << 20)
    path.write_bytes(content)
    first = _fingerprint(path)
    content[3 << 20] = 1  # between the start, the middle and the end
    path.write_bytes(content)
    assert _fingerprint(path) != first


def test_cache_clean_removes_what_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAXX_CACHE", str(tmp_path / "cache"))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    for name in ("core-0123abcd", "models/v1-x", "gguf", "tiles", "other"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "file").write_bytes(b"12345")
    (tmp_path / "cache" / "models" / "link").symlink_to(precious)
    (tmp_path / "cache" / "core-ffff").symlink_to(precious)
    shown = dynaxx_("cache", "show", "--json")
    assert json.loads(shown.stdout)["bytes"] >= 20
    assert (tmp_path / "cache" / "models").exists()
    assert dynaxx_("cache", "clean").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["core-ffff", "other"]
    assert (precious / "file").read_text() == "x"
    assert dynaxx_("cache", "clean").exit_code == 0
    assert dynaxx_("cache", "burn").exit_code == 2


@pytest.mark.parametrize("family", ["latent", "windowed"])
def test_profile_says_first_what_no_policy_can_run_in(family, tiny, monkeypatch):
    import transformers

    from dynaxx.lab.models import load_model
    from dynaxx.lab.profile import run as profile_module

    give_ceilings(monkeypatch)
    model, tokenizer = load_model(tiny)
    if family == "latent":
        model.config.kv_lora_rank = 8  # as DeepSeek's have it: rules are refused
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, hidden_size=32, intermediate_size=64,
            head_dim=16, vocab_size=len(tokenizer), sliding_window=8, max_position_embeddings=128,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )  # fmt: skip
        model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        found = profile_module.profile(model.eval(), tokenizer, TEXT, lengths=(64, 128))
    if family == "latent":
        assert found.refused
        assert found.verdict.startswith("no policy can run in this model")
        assert not found.worth_it
    else:
        assert not found.refused
        for length in found.lengths:
            s = length.seconds
            assert min(s.windowed, s.attention) > 0
            assert s.attention + s.windowed + s.projections + s.mlp + s.rest == pytest.approx(s.total)
            assert length.max_speedup == pytest.approx(s.total / (s.projections + s.mlp + s.rest)), "windows gain too"
        assert "in layers without a window" in found.verdict
        assert f"layers with a window take {found.lengths[0].windowed_share:.0%} at 64; " in found.verdict


def test_a_folder_that_cannot_be_made_is_named_and_not_its_temporary(tmp_path, monkeypatch):
    def read_only(path, **options):
        if path.exists():  # the folder's parent
            return
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(OSError, match="Read-only") as caught, new_folder(tmp_path / "model"):
        pass
    assert caught.value.filename == str(tmp_path / "model")
