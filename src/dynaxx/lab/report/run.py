# SPDX-License-Identifier: Apache-2.0
"""Write the report: one self-contained HTML page from the results in a folder.

Each section shows one file that another tool wrote. If the file is missing, the section names the command that writes
it. If the file has an unknown form, the section says so. The rest of the page is not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from dynaxx import __version__
from dynaxx.lab.files import read_json, write_text
from dynaxx.lab.report import sections as parts
from dynaxx.lab.report.verdict import Verdict, change, duration, percent, times, verdict
from dynaxx.printable import printable

FILES = {name: f"{name}.json" for name in ("profile", "analysis", "tuning", "policy", "validation")}
COMMANDS = {
    "profile": "dynaxx profile {model} --out {folder}",
    "analysis": "dynaxx analyze {model} --out {folder}",
    "tuning": "dynaxx tune {model} --out {folder}",
    "policy": "dynaxx tune {model} --out {folder}",
    "validation": "dynaxx validate {model} {folder}/policy.json --out {folder}",
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
    command: str
    shown: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


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
    }
    template = environment.get_template("report.html.j2")
    odd = (*ODD, jinja2.TemplateError)
    documents, problems = _read(run_dir)
    folder = run_dir.resolve().name
    try:
        page = template.render(_page(documents, problems, folder))
    except odd:  # a file differs from what this version writes; find it, and write the page without it
        for name in list(documents):
            try:
                template.render(_page({name: documents[name]}, {}, folder))
            except odd as error:
                said = f"{type(error).__name__}: {printable(error, most=200)}"
                problems[name] = f"{FILES[name]} does not have the form that this version writes ({said})."
                del documents[name]
        page = template.render(_page(documents, problems, folder))
    return write_text(run_dir / "report.html", page)


def _page(documents: dict[str, Any], problems: dict[str, str], folder: str) -> dict[str, Any]:
    """Return the data that the template shows."""
    model = next((str(each["model"]) for each in documents.values() if isinstance(each.get("model"), str)), "MODEL")
    makers: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
        "profile": parts.profile_section,
        "analysis": parts.analysis_section,
        "tuning": parts.tuning_section,
        "policy": parts.policy_section,
        "validation": parts.validation_section,
    }
    usual = {name: command.format(model=model, folder=folder) for name, command in COMMANDS.items()}
    sections = {}
    for name, make in makers.items():
        document = documents.get(name)
        known = (document or {}).get("command") or (
            documents.get("tuning", {}).get("command") if name == "policy" else ""
        )
        section = Section(name, str(known or usual[name]))
        section.problem = problems.get(name, "")
        if document is not None:
            section.shown = make(document, documents)
        sections[name] = section
    try:
        judged = verdict(documents)
    except ODD as error:
        judged = Verdict("open", "The results do not fit together.", f"{type(error).__name__}: {error}")
    return {
        "title": "" if model == "MODEL" else model,
        "today": date.today().isoformat(),
        "verdict": judged,
        "kind_words": KIND_WORDS,
        "version": __version__,
        "validate_it": usual["validation"],
        "machine": parts.machine_facts(documents),
        "commands": list(dict.fromkeys(sections[name].command for name in documents)),
        **sections,
    }


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
