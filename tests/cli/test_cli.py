# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, messages, and a stdout that holds the result only. Stand-ins replace slow tools."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import dynaxx
from dynaxx import cli
from dynaxx.cli import options
from dynaxx.lab.about import about
from dynaxx.lab.doctor import run as doctor
from dynaxx.lab.machine import Ceilings
from dynaxx.lab.profile import run as profile
from dynaxx.lab.progress import LineProgress
from dynaxx.lab.tune.crossover import LengthTiming
from dynaxx.policy import save_policy
from tiny import TEXT, save_tiny_model

FACTS = {"model_type": "llama", "layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16}
COMMANDS = ("doctor", "profile", "analyze", "tune", "validate", "report", "bench")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(TEXT)
    return save_tiny_model(folder / "tiny")


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """Skip the measured ceilings, which take seconds; use the reference backend only, and one thread."""
    monkeypatch.setattr(
        profile, "measure_ceilings", lambda device, dtype, **_: Ceilings(100.0, 10.0, "float32", "cpu", 2)
    )
    monkeypatch.setattr(doctor, "BACKENDS", ("reference",))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dynaxx_(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


class Result(SimpleNamespace):
    def to_dict(self):
        return {key: value for key, value in vars(self).items() if key != "policy"}


class Analysis(Result):
    def summary(self):
        return "heads: 8"


class Validation(Result):
    def summary(self):
        return "some checks"

    def later_border(self, lengths):
        return None


FACTS = {"model_type": "llama", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
POLICY = dynaxx.Policy(model=FACTS, dense_below=512, rules=(dynaxx.Rule.of(dynaxx.SlidingWindow(16)),))


CHECKED = {"TOKENS": 4096, "check_sparse": lambda policy: None}  # of the module that validates


def stand_in(monkeypatch, name, **functions):
    module = ModuleType(f"dynaxx.lab.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, f"dynaxx.lab.{name}", module)


@pytest.fixture
def tools(monkeypatch):
    """Replace the slow tools by stand-ins; return a list of their calls."""
    calls = {}
    monkeypatch.setattr("dynaxx.lab.time_budget.watch_others", lambda: lambda: False)

    def call(name, result):
        def tool(*args, **kwargs):
            calls.setdefault(name, []).append((args, kwargs))
            return result

        return tool

    def tune(model, tokenizer, text, options, *, progress, time):
        calls.setdefault("tune", []).append(((text, options), {}))
        (options.out / "policy.json").write_text("{}")
        chosen = {"density": 0.2, "ratio": 1.004}
        found = dict(chosen=chosen, best_uniform_density=0.3, dense_below=512, crossover=(), tokens=256, policy=POLICY)
        return Result(**found, ended="done", verdict="sparse", why="20% keep perplexity")

    def write_report(run_dir):
        (run_dir / "report.html").write_text("<html>")
        return run_dir / "report.html"

    analysis = Analysis(tokens=256)
    stand_in(monkeypatch, "analyze.run", analyze=call("analyze", analysis))
    stand_in(monkeypatch, "analyze.bertviz_view", write_bertviz=call("bertviz", None))
    stand_in(monkeypatch, "tune.run", tune=tune, default_block_size=lambda model: 32)
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=call("validate", Validation(passed=True)))
    stand_in(monkeypatch, "report.run", write_report=write_report, FILES={"policy": "policy.json"})
    stand_in(monkeypatch, "bench", run_bench=call("bench", {"rows": []}))
    return calls


# ---- every command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["a-file/x.json", "a-folder"])
@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("bench", ["bench", "--out", "BAD"]),
        ("analyze", ["analyze", "MODEL", "--text", "TEXT", "--bertviz", "BAD"]),
        ("validate", ["validate", "MODEL", "POLICY", "--text", "TEXT", "--out", "BAD"]),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tools, tiny, tmp_path, monkeypatch, tool, args, bad):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder" / "validation.json").mkdir(parents=True)
    facts = {"model_type": "llama", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    dynaxx.save_policy(dynaxx.Policy(model=facts), tmp_path / "policy.json")
    names = {"BAD": bad, "MODEL": tiny, "TEXT": tiny.parent / "text.txt", "POLICY": tmp_path / "policy.json"}
    shown = dynaxx_(*(names.get(arg, arg) for arg in args))
    assert shown.exit_code == 2, shown.output
    assert "a directory" in shown.stderr.strip().splitlines()[-1].lower()
    assert tool not in tools


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["profile", "no-model", "--out", "a-file/run"], "a-file"),
        (["profile", "no-model", "--trace", "a-folder"], "a-folder"),
        (["profile", "no-model", "--lengths", "1k"], "--lengths must be numbers"),
        (["profile", "no-model", "--text", "nowhere.txt"], "nowhere.txt"),
        (["analyze", "no-model", "--out", "a-file/run"], "a-file"),
        (["analyze", "no-model", "--heads", "x"], "--heads must be numbers"),
        (["tune", "no-model", "--out", "a-file/run"], "a-file"),
        (["tune", "no-model", "--lengths", "1k"], "--lengths must be numbers"),
        (["validate", "no-model", "policy.json", "--out", "a-file/run"], "a-file"),
        (["validate", "no-model", "policy.json", "--lengths", "1k"], "--lengths must be numbers"),
        (["validate", "no-model", "policy.json", "--kinds", "poems"], "no kind of text 'poems': there are prose, code"),
        (["validate", "no-model", "policy.json", "--suite", "rulers"], "no task 'rulers': there are niah_single_1"),
        (["validate", "no-model", "policy.json", "--task-samples", "3"], "and --task-samples need --suite"),
        (["retune", "policy.json", "--model", "no-model", "--out", "a-folder"], "a-folder"),
        (["retune", "policy.json", "--model", "no-model", "--lengths", "1k"], "--lengths must be numbers"),
    ],
)
def test_a_typo_is_refused_before_a_model_is_looked_for(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    facts = {"model_type": "llama", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    rules = (dynaxx.Rule.of(dynaxx.SlidingWindow(64)),)
    dynaxx.save_policy(dynaxx.Policy(model=facts, rules=rules), tmp_path / "policy.json")
    shown = dynaxx_(*args)
    assert shown.exit_code == 2, shown.output
    assert message in shown.stderr
    assert "no-model" not in shown.stderr


@pytest.fixture
def broken(tiny, tmp_path):
    """Make a copy of the model with all of one weight the same value, in a dtype."""

    def make(name, value, dtype):
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
        with torch.no_grad():
            model.get_parameter(name).fill_(value)
        model.save_pretrained(tmp_path / "broken")
        AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "broken")
        return tmp_path / "broken"

    return make


@pytest.mark.parametrize("command", ["profile", "analyze", "tune"])
def test_weights_that_are_no_numbers_are_named(broken, tiny, tmp_path, command):
    weight = "model.layers.1.self_attn.q_proj.weight"
    model = broken(weight, float("nan"), torch.float32)
    shown = dynaxx_(command, model, "--text", tiny.parent / "text.txt", "--out", tmp_path / "run", "--quiet")
    assert shown.exit_code == 2, shown.output
    assert f"broken has NaN or infinity in {weight}" in shown.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["analyze", "tune"])
def test_activations_that_leave_float16_are_an_error_that_says_so(broken, tiny, tmp_path, command):
    model = broken("model.layers.1.input_layernorm.weight", 65_000, torch.float16)
    args = ("--text", tiny.parent / "text.txt", "--tokens", 64, "--block-size", 16, "--dtype", "float16", "--quiet")
    more = ("--no-profile", "--no-analysis") if command == "tune" else ()
    shown = dynaxx_(command, model, *args, *more, "--out", tmp_path / "run")
    assert shown.exit_code == 2, shown.output
    assert "are not finite in float16; try --dtype bfloat16 or float32" in shown.stderr


@pytest.mark.parametrize("command", [*COMMANDS, "convert", "export", "retune"])
def test_help_has_examples(command):
    shown = dynaxx_(command, "--help")
    assert shown.exit_code == 0
    assert "Example" in shown.stdout
    assert f"  dynaxx {command}" in shown.stdout
    assert "--json" in shown.stdout
    assert "\\b" not in shown.stdout, "the mark for lines that must not be joined is shown"
    assert f":\n    dynaxx {command}" in shown.stdout


def test_the_help_of_tune_is_short_and_help_all_is_whole():
    listed = lambda *words: set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", dynaxx_("tune", *words).stdout, re.M))
    short, whole = listed("--help"), listed("--help-all")
    assert len(short - {"--help", "--help-all"}) == 8
    assert short < whole
    assert {"--scorers", "--stretches", "--held-out"} <= whole - short
    assert "More options with --help-all." in dynaxx_("tune", "--help").stdout


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), (("mean", "bounds"), 1, False)),
        (("--effort", "fast"), (("mean",), 1, False)),
        (("--effort", "thorough"), (("mean", "bounds", "tiles"), 2, False)),
        (("--effort", "thorough", "--kinds", "code"), (("mean", "bounds", "tiles"), 2, True)),
        (("--effort", "thorough", "--kinds", "code", "--no-held-out", "--stretches", "1"),
         (("mean", "bounds", "tiles"), 1, False)),
        (("--effort", "fast", "--scorers", "tiles"), (("tiles",), 1, False)),
    ],
)  # fmt: skip
def test_effort_stands_for_options_that_are_not_given(tiny, tmp_path, monkeypatch, options, wanted):
    plans = []

    def run(model, tokenizer, text, plan, **more):
        plans.append(plan)
        raise ValueError("enough")

    monkeypatch.setattr("dynaxx.lab.tune.pipeline.steps.run", run)
    dynaxx_("tune", tiny, "--text", tiny.parent / "text.txt", "--out", tmp_path / "run", "--quiet", *options)
    (plan,) = plans
    assert (plan.scorers, plan.stretches, plan.held_out) == wanted


def test_the_list_of_commands_fits_a_terminal():
    """The list of commands has one whole sentence per command, at 80 columns."""
    shown = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).stdout
    assert "..." not in shown.replace("[ARGS]...", "")


def test_more_threads_than_torch_takes_are_refused():
    shown = dynaxx_("doctor", "--threads", 100_000)
    assert shown.exit_code == 2
    assert "--threads" in shown.stderr


def test_version_and_no_arguments():
    assert dynaxx_("--version").stdout == f"{dynaxx.__version__}\n"
    assert dynaxx_().exit_code == 2
    assert dynaxx_("no-such").exit_code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["profile", "nothing-here"], "no model at 'nothing-here'"),
        (["profile", "MODEL", "--text", "nowhere.txt"], "'pydoc' (comes with Python)"),
        (["profile", "MODEL", "--lengths", "1k"], "--lengths must be numbers"),
        (["profile", "MODEL", "--lengths", "100000"], "from 2 to the model's 1,024 tokens"),
        (["profile", "MODEL", "--device", "cuda:9"], "needs a GPU"),
        (["profile", "MODEL", "--device", "tpu"], "must be auto, cpu or cuda"),
        (["tune", "MODEL", "--search-on", "cuda:9"], "--search-on cuda:9 needs a GPU"),
        (["tune", "MODEL", "--search-on", "tpu"], "--search-on must be auto, cpu or cuda"),
        (["tune", "MODEL", "--time-budget", "soon"], "--time-budget must be a time like 90, 10m or 2h"),
        (["analyze", "MODEL", "--layers", "a"], "--layers must be numbers and ranges"),
        (["analyze", "MODEL", "--layers", "0-99999999999"], "--layers must be numbers and ranges"),
        (["tune", "MODEL", "--tokens", "5000"], "to the model's 1024 positions, got 5000; give --tokens 1024"),
        (["tune", "MODEL", "--text", "SHORT", "--tokens", "512"], "the half of the text to tune on must have at least"),
        (["validate", "MODEL", "no-policy.json"], "error: no-policy.json: no such file"),
        (["report", "no-folder"], "DIR must be a folder"),
        (["report", "."], "holds no results"),
        (["doctor", "--q-heads", "3"], "`q_heads` must be a multiple"),
        (["doctor", "--fuzz", "soon"], "--fuzz must be a time"),
        (["doctor", "--isa", "baseline"], "--isa needs --fuzz"),
        (["doctor", "--block-size", "5"], "5"),
        (
            ["tune", "MODEL", "--block-size", "32x"],
            "--block-size must be a number of tokens like 32, or queries x keys",
        ),
        (["tune", "MODEL", "--block-size", "48x16"], "`block_size` must be one of"),
        (["doctor", "--head-dim", "100000"], "must be at most 131,072 to be checked, got 800,000"),
    ],
)
def test_bad_input_is_code_2_with_a_message(tiny, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    paths = {"MODEL": tiny, "SHORT": tiny / "config.json"}
    shown = dynaxx_(*(paths.get(arg, arg) for arg in args))
    assert shown.exit_code == 2, shown.output
    assert shown.stdout == ""
    assert shown.stderr.strip().splitlines()[-1].startswith("error: ")
    assert message in shown.stderr
    assert os.listdir(tmp_path) == []


def test_a_missing_extra_says_what_to_install(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "transformers", None)
    shown = dynaxx_("profile", tiny)
    assert shown.exit_code == 2
    assert "pip install 'dynaxx[transformers]'" in shown.stderr


def test_without_typer_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from dynaxx.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'dynaxx[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="shell")
@pytest.mark.parametrize(
    ("streams", "policy", "code"),
    [("<&- >&- 2>&-", "good.json", 0), (">&-", "good.json", 0), ("2>&-", "none.json", 2)],
)
def test_closed_streams_change_no_exit_code(streams, policy, code, tmp_path):
    dynaxx.save_policy(dynaxx.Policy(model=FACTS), tmp_path / "good.json")
    command = f"{sys.executable} -m dynaxx diff good.json {policy} {streams}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr


def test_a_log_on_a_full_disk_loses_lines_and_not_the_work():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with LineProgress(Full()).task("working") as task:
        task.advance()


def test_ctrl_c_is_code_130(tools, monkeypatch, tiny):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    stand_in(monkeypatch, "analyze.run", analyze=interrupted)
    shown = dynaxx_("analyze", tiny)
    assert shown.exit_code == 130
    assert shown.stderr.endswith("stopped\n")  # it keeps nothing, and claims nothing


def test_ctrl_c_of_tune_says_that_it_goes_on(tools, monkeypatch, tiny, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    stand_in(monkeypatch, "analyze.run", analyze=interrupted)
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 130
    assert shown.stderr.endswith("stopped; run the same command again to continue\n")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_real_ctrl_c_ends_quietly(tmp_path):
    command = [sys.executable, "-m", "dynaxx", "doctor", "--seqlen", "4096"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )
    for line in process.stderr:  # wait until it is at work
        if "oracle" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")])
def test_too_little_memory_is_a_message(monkeypatch, tiny, error):
    def fail(*args, **kwargs):
        raise error

    stand_in(monkeypatch, "analyze.run", analyze=fail)
    shown = dynaxx_("analyze", tiny)
    assert shown.exit_code == 2
    assert "shorter lengths" in shown.stderr


def test_a_bug_is_not_hidden(monkeypatch, tiny):
    stand_in(monkeypatch, "analyze.run", analyze=lambda *args, **kwargs: {}["key"])
    assert isinstance(dynaxx_("analyze", tiny).exception, KeyError)


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("DYNAXX_DEBUG", "1")
    assert isinstance(dynaxx_("report", "no-folder").exception, ValueError)


# ---- one by one --------------------------------------------------------------------------------------------------


def test_doctor(monkeypatch):
    args = ("doctor", "--q-heads", 2, "--kv-heads", 1, "--head-dim", 16, "--seqlen", 64, "--block-size", 16)
    shown = dynaxx_(*args, "--json", "--quiet")
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert json.loads(shown.stdout)["ok"] is True
    assert "all checks passed" in dynaxx_(*args).stdout
    monkeypatch.setattr(doctor.Expected, "forward", lambda *args: [doctor.ErrorReport("out", 1.0, 0.1)])
    wrong = dynaxx_(*args, "--json")
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["ok"] is False


def test_profile(tiny, tmp_path):
    args = ("profile", tiny, "--text", tiny.parent / "text.txt", "--lengths", "32,64", "--price-per-hour", 2)
    shown = dynaxx_(*args, "--json", "--out", tmp_path, "--trace", tmp_path / "t.json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout) == json.loads((tmp_path / "profile.json").read_text())
    assert json.loads(shown.stdout)["model"] == "tiny"
    assert (tmp_path / "t.json").is_file()
    human = dynaxx_(*args, "--quiet", "--out", tmp_path)
    assert "attention's share of prefill" in human.stdout
    assert f"wrote {tmp_path / 'profile.json'}" in human.stdout


def test_analyze(tools, tiny, tmp_path):
    shown = dynaxx_("analyze", tiny, "--text", tiny.parent / "text.txt", "--layers", "0,3-5", "--out", tmp_path,
                    "--bertviz", tmp_path / "b.html", "--json")  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    (_, _, text), options = tools["analyze"][0]
    assert 0 < len(text) < len(TEXT)  # the calibration part
    assert options["layers"] == (0, 3, 4, 5)
    assert options["heads"] is None
    assert "bertviz" in tools
    assert json.loads((tmp_path / "analysis.json").read_text())["tokens"] == 256


def test_validate(tools, monkeypatch, tiny, tmp_path):
    chosen, policy = dynaxx.Policy(model=FACTS), tmp_path / "policy.json"
    save_policy(chosen, policy)
    args = ("validate", tiny, policy, "--lengths", "64,128")
    assert dynaxx_(*args).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", "validation.json"}, "beside the policy"
    (_, _, document, text), options = tools["validate"][0]
    assert document == chosen
    assert len(text) > 300_000
    assert options["lengths"] == (64, 128)
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *args, **kwargs: Validation(passed=False))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/dynaxx", "validate", "a model", "--json"])
    failed = dynaxx_(*args, "--json")
    assert failed.exit_code == 1
    found = json.loads(failed.stdout)
    assert found["passed"] is False
    assert found["about"] == about(AutoModelForCausalLM.from_pretrained(tiny), text, chosen)
    assert found["command"] == "dynaxx validate 'a model' --json"
    (tmp_path / "report.html").write_text("the page of what was validated before")
    assert f"wrote {tmp_path / 'report.html'}" in dynaxx_(*args).stdout, "a page never outlives its results"
    elsewhere = tmp_path / "elsewhere"
    assert dynaxx_(*args, "--out", elsewhere).exit_code == 1
    assert {path.name for path in elsewhere.iterdir()} == {"validation.json"}


def test_report(tools, tmp_path):
    (tmp_path / "policy.json").write_text("{}")
    assert f"wrote {tmp_path / 'report.html'}" in dynaxx_("report", tmp_path).stdout
    assert json.loads(dynaxx_("report", tmp_path, "--json").stdout) == {"report": str(tmp_path / "report.html")}


def test_bench(tools, monkeypatch, tmp_path):
    shown = dynaxx_("bench", "--seqlen", 1024, "--device", "cpu", "--json", "--out", tmp_path / "b.json", "--seed", 3)
    assert json.loads(shown.stdout) == {"rows": []}
    assert (tmp_path / "b.json").is_file()
    ((device,), options) = tools["bench"][0]
    assert (device, options["seqlen"], options["seed"]) == ("cpu", 1024, 3)

    def told(device, say, **options):
        say("one figure")
        return {"rows": []}

    stand_in(monkeypatch, "bench", run_bench=told)
    assert dynaxx_("bench").stdout == "one figure\n"

    def wrong(device, **options):
        raise RuntimeError("out: error 1, budget 0.1")

    stand_in(monkeypatch, "bench", run_bench=wrong)
    failed = dynaxx_("bench", "--json")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "budget" in failed.stderr


# ---- tune: the whole way -------------------------------------------------------------------------------------------


def tune_args(tiny, out, *more):
    return (
        "tune",
        tiny,
        "--text",
        tiny.parent / "text.txt",
        "--out",
        out,
        "--lengths",
        "32,64",
        "--tokens",
        128,
        *more,
    )


def test_tune_goes_the_whole_way(tools, tiny, tmp_path):
    out = tmp_path / "run"
    shown = dynaxx_(*tune_args(tiny, out, "--time-budget", "10m", "--tolerance", "0.02", "--json"))
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["ok"] is True
    assert found["tuning"]["chosen"]["density"] == 0.2
    assert {path.name for path in out.iterdir()} == {
        "run.json", "profile.json", "analysis.json", "policy.json", "validation.json", "report.html",
    }  # fmt: skip
    (text, options), _ = tools["tune"][0]
    assert text == TEXT
    assert (options.time_budget, options.tolerance, options.tokens) == (600.0, 0.02, 128)
    assert tools["validate"][0][0][2] is POLICY
    assert tools["validate"][0][1]["lengths"] == (32, 64)
    shown = dynaxx_(*tune_args(tiny, out))
    assert "prompts run sparse from 512 tokens, shorter ones dense" in shown.stdout
    assert f'run it: dynaxx.apply(model, dynaxx.load_policy("{out / "policy.json"}"))' in shown.stdout


def test_tune_does_not_repeat_what_it_did(tools, tiny, tmp_path):
    first = dynaxx_(*tune_args(tiny, tmp_path))
    assert first.exit_code == 0, first.stderr
    before = (tmp_path / "profile.json").stat().st_mtime_ns
    dynaxx_(*tune_args(tiny, tmp_path))
    assert (tmp_path / "profile.json").stat().st_mtime_ns == before
    assert len(tools["analyze"]) == 1
    assert len(tools["tune"]) == 2  # keeps its own state
    dynaxx_(*tune_args(tiny, tmp_path, "--seed", 1))  # the sample of the analysis depends on it
    assert (tmp_path / "profile.json").stat().st_mtime_ns == before
    assert len(tools["analyze"]) == 2
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert (settings["seed"], settings["tolerance"], settings["scorers"]) == (1, 0.01, ["mean", "bounds"])
    dynaxx_(*tune_args(tiny, tmp_path, "--seed", 1, "--restart"))
    assert len(tools["analyze"]) == 3


def test_tune_leaves_out_what_is_not_wanted(tools, tiny, tmp_path):
    flags = ("--no-profile", "--no-analysis", "--no-validation", "--no-report")
    assert dynaxx_(*tune_args(tiny, tmp_path, *flags)).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "policy.json"}


def test_tune_fails_when_the_policy_does(tools, monkeypatch, tiny, tmp_path):
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *args, **kwargs: Validation(passed=False))
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 1
    assert "tuned: 20% keep perplexity\n20.0% of the blocks, perplexity +0.40%; one budget" in shown.stdout
    assert "FAILS its validation:\nsome checks" in shown.stdout
    assert "run it" not in shown.stdout
    assert "report.html" in shown.stdout


def test_tune_without_a_possible_validation_still_reports(tools, monkeypatch, tiny, tmp_path):
    def refuse(*args, **kwargs):
        raise ValueError("the policy is dense below 10,000 tokens")

    stand_in(monkeypatch, "validate.run", **CHECKED, validate=refuse)
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 1
    assert "could not be validated:\nthe policy is dense below" in shown.stdout
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "validation.json").exists()


def test_tune_has_nothing_to_validate_where_sparse_never_pays(tools, monkeypatch, tiny, tmp_path):
    real = vars(sys.modules["dynaxx.lab.tune.run"])

    def dense(*args, **kwargs):
        changed = dict(dense_below=None, verdict="dense", why="not faster here", policy=POLICY.replace(rules=()))
        return Result(**{**vars(real["tune"](*args, **kwargs)), **changed})

    stand_in(monkeypatch, "tune.run", **{**real, "tune": dense})
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *_, **__: pytest.fail("validated"))
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 0, shown.stderr
    assert "dense is right here: not faster here" in shown.stdout
    assert "validation" not in shown.stdout
    assert "run it" not in shown.stdout


@pytest.mark.parametrize(("ended", "code"), [("time", 3), ("interrupted", 130)])
def test_tune_that_decided_nothing_says_so(tools, monkeypatch, tiny, tmp_path, ended, code):
    real = vars(sys.modules["dynaxx.lab.tune.run"])

    def undecided(*args, **kwargs):
        said = dict(ended=ended, verdict="undecided", why="nothing was tried", advice="--time-budget 5m would decide.")
        changed = dict(chosen=None, dense_below=None, policy=POLICY.replace(rules=()))
        return Result(**{**vars(real["tune"](*args, **kwargs)), **said, **changed})

    stand_in(monkeypatch, "tune.run", **{**real, "tune": undecided})
    (tmp_path / "validation.json").write_text("{}")
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == code, shown.stderr
    assert "undecided: nothing was tried\n--time-budget 5m would decide." in shown.stdout
    assert "report.html" in shown.stdout
    assert not (tmp_path / "validation.json").exists(), "a validation of another policy does not stay"


def test_a_run_that_was_killed_goes_on(tools, monkeypatch, tiny, tmp_path):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    real = sys.modules["dynaxx.lab.tune.run"]
    stand_in(monkeypatch, "tune.run", **{**vars(real), "tune": killed})
    assert dynaxx_(*tune_args(tiny, tmp_path)).exit_code == 130
    monkeypatch.setitem(sys.modules, "dynaxx.lab.tune.run", real)
    assert dynaxx_(*tune_args(tiny, tmp_path)).exit_code == 0
    assert len(tools["analyze"]) == 1


def test_tune_for_real(monkeypatch, tiny, tmp_path):
    """Run every tool on a tiny model: each can read what the one before has written."""
    timings = [LengthTiming(64, 2.0, 1.0), LengthTiming(128, 2.0, 1.0)]
    monkeypatch.setattr("dynaxx.lab.tune.search.time_lengths", lambda *_, **__: timings)
    args = tune_args(tiny, tmp_path, "--block-size", 16, "--tolerance", 0.5, "--time-budget", "9h", "--quiet")
    shown = dynaxx_(*args)
    assert shown.exit_code in (0, 1), shown.stderr  # whether it is fast enough depends on the machine's other work
    digests = [json.loads((tmp_path / f"{name}.json").read_text())["about"] for name in ("tuning", "validation")]
    assert digests[0]["policy"] == digests[1]["policy"]
    assert digests[0]["model"] == digests[1]["model"]
    assert {"profile.json", "analysis.json", "tuning.json", "policy.json", "report.html"} <= set(os.listdir(tmp_path))
    assert dynaxx.load_policy(tmp_path / "policy.json")
    policy = (tmp_path / "policy.json").read_bytes()
    again = dynaxx_(*args, "--json")
    assert again.exit_code == int(not json.loads(again.stdout)["ok"])
    assert json.loads(again.stdout)["tuning"]["chosen"] == json.loads((tmp_path / "tuning.json").read_text())["chosen"]
    assert json.loads((tmp_path / "policy.json").read_text())["rules"] == json.loads(policy)["rules"]


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("90", 90), ("1.5m", 90), ("2h", 7200), ("5s", 5)])
def test_times(text, seconds):
    assert options.seconds("--fuzz", text) == seconds


def test_the_command_starts_in_a_moment():
    """--help does not import torch. This measures CPU time, the best of three runs."""
    code = (
        "import sys, time; sys.argv = ['dynaxx', '--help']\n"
        "from dynaxx.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules, time.process_time(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split()[0] == "False"
