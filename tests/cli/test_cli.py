# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, messages, and a stdout that holds the result only."""

import errno
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import dynaxx
from command_line import COMMANDS, FACTS, dynaxx_, stand_in
from dynaxx import cli
from dynaxx.cli import options
from dynaxx.cli.running import running
from dynaxx.lab.progress import LineProgress


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
    [
        ("<&- >&- 2>&-", "good.json", 0),
        pytest.param(">&-", "good.json", 0, marks=pytest.mark.slow),
        ("2>&-", "none.json", 2),
    ],
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


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_acts_as_ctrl_c(capsys):
    with pytest.raises(typer.Exit) as stopped, running(False, resumes=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 130
    assert capsys.readouterr().err == "stopped; run the same command again to continue\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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
