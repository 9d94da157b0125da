# SPDX-License-Identifier: Apache-2.0
"""Documents: their Python runs, their commands exist, their links lead somewhere, and they name no machine."""

import fnmatch
import importlib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

import dynaxx as dx
from dynaxx.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
SLOW = ("analyze.md", "cpu.md", "onnx.md")  # a minute of a real model, the whole benchmark; one in `make test-onnx`
# By docs/_hooks/generate.py, when the site is built.
GENERATED = re.compile(r"docs/(api(/\w+)?|cli|benchmarks/results)\.md")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page) and page.name not in SLOW], ids=name_of)
def test_examples_run(page, tmp_path, monkeypatch):
    """Run a page's examples in order, since a later one may use names of an earlier one."""
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr("dynaxx.lab.models.load_model", lambda name: (small_llama(), None))
    names = {}
    for block in examples(page):
        exec(compile(block, str(page), "exec"), names)


def small_llama():
    """Return a random model in place of the one that a page loads from a package."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=1000, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192)
    ).eval()  # fmt: skip


def test_the_readme_runs_a_model_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    facts = {"model_type": "llama", "layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16}
    dx.save_policy(dx.Policy(model=facts), "run/policy.json")
    (block,) = re.findall(r"```text\n(handle = .*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(block, {"dx": dx, "model": small_llama()})


def commands(page):
    """Return the commands of a page: lines of unnamed code blocks, and code within a line."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences if not language]
    within = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *within]:
        for part in re.split(r" \|+ | && |; ", line.partition(" #")[0]):
            try:
                yield [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]
            except ValueError:  # no command: a quote within code
                continue


def with_helpers(script):
    """Return the text of a script and of the modules beside it that it imports, because they may declare options."""
    text = script.read_text(encoding="utf-8")
    helpers = [script.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)]
    return text + "".join(helper.read_text(encoding="utf-8") for helper in helpers if helper.is_file())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    """Commands of dynaxx, make targets and scripts exist, with the options that pages name."""
    known = typer.main.get_command(app).commands
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in commands(page):
        program, rest = Path(words[0]).name if words else "", words[1:]
        options = [re.split(r"[=/\]]", word)[0] for word in rest if word.startswith("--")]
        said = f"{page.name}: {shlex.join(words)}"
        if program == "dynaxx" and rest and re.fullmatch(r"[a-z-]+", rest[0]):
            assert rest[0] in known, said
            has = {each for param in known[rest[0]].params for each in (*param.opts, *param.secondary_opts)}
            assert set(options) <= has | {"--help"}, said
        elif program == "make":
            assert {word for word in rest if re.fullmatch(r"[a-z-]+", word)} <= set(targets), said
        elif program.startswith("python"):
            script = next((word for word in rest if re.match(r"(examples|benchmarks|tests)/.*\.py$", word)), None)
            if script is not None:
                assert (ROOT / script).is_file(), said
                text = with_helpers(ROOT / script)
                keys = {each: f'"{each[2:].replace("-", "_")}"' for each in options}  # options may come from a dict
                assert [each for each in options if each not in text and keys[each] not in text] == [], said


def anchors(page):
    """Return the headings of a page, written as in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        if GENERATED.fullmatch(os.path.relpath(there, ROOT)):
            continue
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{name_of(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml"], ids=name_of)
def test_no_machine_is_named(page):
    assert not re.search(r"/(home|root|work|tmp)/|file://", page.read_text(encoding="utf-8"))


def test_tables_of_benchmarks_equal_their_results():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        render = importlib.import_module("render")
    finally:
        sys.path.pop(0)
    shown = set()
    for page in render.pages():
        text = page.read_text(encoding="utf-8")
        assert render.rendered_page(text) == text, f"run `python benchmarks/render.py`: {name_of(page)}"
        shown |= {*render.BLOCK.findall(text), *" ".join(render.MORE.findall(text)).split()}
    for page in PAGES:
        shown |= set(re.findall(r"results\.md#(\w+)", page.read_text(encoding="utf-8")))
    assert shown == {path.stem for path in render.RESULTS.glob("*.json")}, "every result is on a page, or linked there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    """Source files that a page names exist and have the named parts; a page may name the end of a path."""
    folders = ("src", "tests", "benchmarks", "examples", "docs", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = re.findall(r"`([\w*/.-]+\.(?:py|cpp|h|j2|yml))(?::([\w.]+))?`", page.read_text(encoding="utf-8"))
    missing = []
    for name, part in named:
        found = [path for path in files if fnmatch.fnmatch(path.as_posix(), f"*/{name}")]
        if not any(defines(path, part) for path in found):
            missing.append(f"{name}:{part}")
    assert missing == []


def defines(path, part):
    """Return whether a file defines a function or class, `name` or `Class.name`; any file defines the empty part."""
    text = path.read_text(encoding="utf-8") if part else ""
    return all(re.search(rf"^\s*(def|class) {name}\b", text, re.M) for name in part.split(".") if name)


def test_the_api_reference_has_every_public_name():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "_hooks" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    listed = {path for names in generate.public_names().values() for _, path in names}
    public = {generate.definition("dynaxx", name) for name in dx.__all__ if not name.startswith("__")}
    assert public <= listed
    pages = generate.api_pages()
    assert all(f"::: {path}\n" in "".join(pages.values()) + "\n" for path in listed)
