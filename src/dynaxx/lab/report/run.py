# SPDX-License-Identifier: Apache-2.0
"""Write the report: one self-contained HTML page from the results in a folder.

Each section shows one file that another tool wrote. If the file is missing, damaged, or about another policy, model or
text than the others, the section says so and names the command that writes it. The rest of the page is not affected.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from dynaxx import __version__
from dynaxx.lab.about import differing, policy_digest
from dynaxx.lab.files import read_json, write_text
from dynaxx.lab.report import sections as parts
from dynaxx.lab.report.verdict import Verdict, change, duration, percent, times, verdict
from dynaxx.policy import Policy
from dynaxx.printable import printable

SAME = {
    "tuning": ("policy", "model", "text"),
    "validation": ("policy", "model"),  # a policy may be validated on any text
    "profile": ("model", "text"),
    "analysis": ("model", "text"),
}  # what each document must be about, in the order in which they decide
ANCHORS = {"tuning": ("policy", "model", "text"), "validation": ("policy", "model")}  # what others are held against


def mismatches(documents: dict[str, Any]) -> dict[str, str]:
    """Return why a document is not about the policy, or the model and text, of the others, by its name.

    The policy of the folder decides, then what was tuned, validated, profiled and analyzed, in this order.
    """
    known: dict[str, str] = {}
    problems = {}
    if "policy" in documents:
        try:
            known["policy"] = policy_digest(Policy(**documents["policy"]))
        except ValueError as error:
            line = printable(str(error).partition("\n")[0], most=200)
            problems["policy"] = f"policy.json is no policy of this version ({line})."
    for name, keys in SAME.items():
        if name not in documents:
            continue
        about = documents[name].get("about")
        if not isinstance(about, dict) or any(not isinstance(about.get(key), str) for key in keys):
            problems[name] = f"{name}.json does not say what it is about, as files of older versions do not."
            continue
        others = differing({"about": {key: about[key] for key in keys}}, {"about": known})
        if others:
            newer = ", or of another version of dynaxx" if "model" in others else ""
            problems[name] = f"{name}.json is about another {' and another '.join(others)}{newer}, so it is not shown."
            continue
        known = {key: about[key] for key in ANCHORS.get(name, keys)} | known
    return problems


FILES = {name: f"{name}.json" for name in ("profile", "analysis", "tuning", "policy", "validation")}
COMMANDS = {
    "profile": "profile {model}{text} --out {folder}",
    "analysis": "analyze {model}{text} --out {folder}",
    "tuning": "tune {model}{text} --out {folder}",
    "policy": "tune {model}{text} --out {folder}",
    "validation": "validate {model} {folder}/policy.json{text}",
}
KIND_WORDS = {
    "local": "a window and the first tokens suffice",
    "lines": "single keys or distances dominate; a selector finds their blocks",
    "selected": "the blocks depend on the query; a selector finds them",
    "broad": "half of the blocks hold too little; keep the head dense",
    "windowed": "the layer already has a window; leave it",
}
ODD = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RecursionError)


@dataclass
class Section:
    """One file's section of the page: its data, or why there is none."""

    name: str
    command: str  # writes the file
    made: str = ""  # the command that wrote it, as the file says
    shown: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    moot: str = ""  # why there is nothing to run for it


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a folder from the results there; return its path.

    Reads those of profile.json, analysis.json, tuning.json, policy.json and validation.json that exist. The page needs
    no network and runs no scripts.

    Raises:
        ImportError: jinja2 is not installed; the message says how to install it.
        ValueError: the folder does not exist.
        OSError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"`run_dir` must be a folder with results of dynaxx tools, got {run_dir}")
    template, template_error = _template()
    odd = (*ODD, template_error)
    documents, problems = _read(run_dir)
    problems |= (others := mismatches(documents))
    documents = {name: document for name, document in documents.items() if name not in others}
    try:
        page = template.render(_page(documents, problems, run_dir))
    except odd:  # a file differs from what this version writes; find it, and write the page without it
        for name in list(documents):
            try:
                template.render(_page({name: documents[name]}, {}, run_dir))
            except odd as error:
                said = f"{type(error).__name__}: {printable(error, most=200)}"
                problems[name] = f"{FILES[name]} does not have the form that this version writes ({said})."
                del documents[name]
        page = template.render(_page(documents, problems, run_dir))
    return write_text(run_dir / "report.html", page)


@cache
def _template() -> tuple[Any, type[Exception]]:
    """Return the compiled template of the page, and the error that it raises for what it cannot show."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(f"the report needs jinja2: pip install 'dynaxx[cli]' ({error})") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "change": change,
        "duration": duration,
        "times": times,
        "number": parts.number,
        "whole_options": _whole_options,
    }
    return environment.get_template("report.html.j2"), jinja2.TemplateError


def _whole_options(text: str) -> Any:
    """Return text as HTML in which no line ends within an option such as `--out`, and names in backticks are code."""
    from markupsafe import Markup, escape

    whole = re.sub(r"--[a-z]\S*", r'<span class="option">\g<0></span>', str(escape(text)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", whole))


def _page(documents: dict[str, Any], problems: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the data that the template shows."""
    model = next((str(each["model"]) for each in documents.values() if isinstance(each.get("model"), str)), "")
    makers: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
        "profile": parts.profile_section,
        "analysis": parts.analysis_section,
        "tuning": parts.tuning_section,
        "policy": parts.policy_section,
        "validation": parts.validation_section,
    }
    usual = _commands(documents, folder, model or "MODEL")
    sections = {}
    for name, make in makers.items():
        document = documents.get(name)
        section = Section(name, usual[name], _maker(document))
        section.problem = problems.get(name, "")
        if name == "validation" and documents.get("policy", {}).get("rules") == []:
            section.moot = (
                "The policy has no rules and runs everything dense, so there is nothing to validate or to time."
            )
        if document is not None:
            section.shown = make(document, documents)
        sections[name] = section
    try:
        judged = verdict(documents)
    except ODD as error:
        judged = Verdict("open", "Open", "The results do not fit together.", f"{type(error).__name__}: {error}")
    if "policy" in problems:  # what was measured may be about another one
        headline, sentence = "The policy cannot be read.", f"Make it again with {usual['policy']}."
        judged = Verdict("open", "Open", headline, sentence)
    elif not documents:
        judged = replace(judged, sentence=f"Run {usual['tuning']} to fill this page.")
    return {
        "title": model,
        "today": date.today().isoformat(),
        "verdict": judged,
        "problems": list(problems.values()),
        "kind_words": KIND_WORDS,
        "version": __version__,
        "policy_file": str(folder / FILES["policy"]),
        "validate_it": usual["validation"],
        "machine": parts.machine_facts(documents),
        "commands": list(dict.fromkeys(each.made for each in sections.values() if each.made)),
        **sections,
    }


def _commands(documents: dict[str, Any], folder: Path, model: str) -> dict[str, str]:
    """Return the command that writes each file: for the model and the text of the shown results, into their folder."""
    text = ""
    for name in ("tuning", "profile", "analysis", "validation"):
        words = _words(documents.get(name, {}).get("command"))
        if len(words) > 2 and not words[2].startswith("-"):
            model = words[2]
            text = next((after for word, after in pairwise(words) if word == "--text"), "")
            text = text or next((word.removeprefix("--text=") for word in words if word.startswith("--text=")), "")
            break
    filled = {"model": shlex.quote(model), "folder": shlex.quote(str(folder)), "text": ""}
    filled["text"] = f" --text {shlex.quote(text)}" if text else ""
    return {name: f"dynaxx {form}".format(**filled) for name, form in COMMANDS.items()}


def _maker(document: dict[str, Any] | None) -> str:
    """Return the command that a document names: its own, or for a policy the first one of its evidence."""
    document = document or {}
    named = [document, *(each for each in document.get("evidence") or () if isinstance(each, dict))]
    return next((str(each["command"]) for each in named if each.get("command")), "")


def _words(command: Any) -> list[str]:
    """Return the words of a command line; none if it cannot be read."""
    try:
        return shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return []


def _read(run_dir: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the documents that exist, and the errors of those that cannot be read."""
    documents, problems = {}, {}
    for name, file in FILES.items():
        if not (run_dir / file).exists():
            continue
        try:
            document = read_json(run_dir / file)
        except (ValueError, OSError) as error:
            problems[name] = f"{file} cannot be read: {printable(error, most=200)}."
            continue
        if isinstance(document, dict):
            documents[name] = document
        else:
            problems[name] = f"{file} holds no results."
    return documents, problems
