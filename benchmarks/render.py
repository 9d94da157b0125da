# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the documentation from the JSON files in benchmarks/results.

    python benchmarks/render.py NAME       # print the table of one result
    python benchmarks/render.py            # rewrite every table between its markers
    python benchmarks/render.py --check    # exit with 1 if a page differs from its results

A page asks for a table with two comment lines, and everything between them is replaced:

    <!-- results: attention_gpu -->
    <!-- /results -->

A page names tables that it does not show. When the site is built, `docs/_hooks/generate.py` puts links to them there,
and makes one page of all tables:

    <!-- more: attention_fa4 attention_softcap -->

A sentence asks for one cell by file, row (its first cell, or the start of it) and column:

    <!-- value: prefill_llama8b; 131,072; speed-up -->2.57x<!-- /value -->

What ran where, from all records, is a table, and a sentence asks for the releases of a package that ran on a place:

    <!-- ran -->
    <!-- /ran -->
    vLLM <!-- ran: vllm; CPU -->0.32<!-- /ran -->

A guide lists the rules of a class, each with the first paragraph of its docstring:

    <!-- rules: Scorer -->
    <!-- /rules -->

`benchmarks/record.py` makes result files, `pytest --record` those of tests.
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import ran

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- results: (\w+) -->\n.*?<!-- /results -->", flags=re.DOTALL)
MORE = re.compile(r"<!-- more: ([\w ]+) -->")
VALUE = re.compile(r"<!-- value: (\w+); ([^;]+); ([^;]+?) -->.*?<!-- /value -->")
RAN = re.compile(r"<!-- ran: ([^;]+); (GPU|CPU) -->.*?<!-- /ran -->")
RULES = re.compile(r"<!-- rules: (\w+) -->\n.*?<!-- /rules -->", flags=re.DOTALL)
RAN_TABLE = re.compile(r"<!-- ran -->\n.*?<!-- /ran -->", flags=re.DOTALL)
# Every result file has exactly these fields.
FIELDS = {
    "title": str,  # what the table shows
    "command": str,  # how to measure it again
    "commit": str,  # of the code that was measured
    "date": str,  # YYYY-MM-DD
    "recorded": str,  # "measured", or the document and commit that the figures were transcribed from
    "device": str,  # GPU or CPU
    "versions": dict,  # distribution to version
    "setting": str,  # shapes, dtypes, and what is counted
    "columns": list,
    "rows": list,  # lists of strings, as long as `columns`
    "bars": list,  # the targets: {"bar", "asked", "measured", "met"}
}


def load_result(name: str) -> dict[str, Any]:
    """Read one result file.

    Raises:
        ValueError: the file misses a field, has an unknown one, or has a row of another length than its columns.
    """
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if result.keys() != FIELDS.keys():
        raise ValueError(f"{name}.json must have the fields {list(FIELDS)}, got {list(result)}")
    for field, kind in FIELDS.items():
        if not isinstance(result[field], kind):
            raise ValueError(f"`{field}` of {name}.json must be a {kind.__name__}, got {result[field]!r}")
    for row in result["rows"]:
        if len(row) != len(result["columns"]):
            raise ValueError(f"each row of {name}.json must have {len(result['columns'])} cells, got {row}")
    return result


def table(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; columns that hold numbers are aligned to the right."""
    escaped = [[_escape(cell) for cell in row] for row in [columns, *rows]]
    numeric = [
        column > 0 and all(not row[column] or re.match(r"[*~<>+-]*[\d.]", row[column]) for row in rows)
        for column in range(len(columns))
    ]
    yield "| " + " | ".join(escaped[0]) + " |"
    yield "|" + "|".join("--:" if right else "---" for right in numeric) + "|"
    for row in escaped[1:]:
        yield "| " + " | ".join(row) + " |"


def _escape(cell: str) -> str:
    """Escape `|` in a cell. Code that contains it becomes HTML, because Markdown would show the backslash."""
    cell = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", cell)
    return cell.replace("|", "&#124;")


def render(name: str, every_target: bool = True) -> str:
    """Return the Markdown of one result: its title, table, targets and origin.

    Without `every_target`, targets that were met are counted, and only the others are listed.
    """
    result = load_result(name)
    lines = [f"**{result['title']}.** {result['setting']}.".replace("..", "."), ""]
    lines += table(result["columns"], result["rows"])
    bars = [bar for bar in result["bars"] if every_target or not bar["met"]]
    if bars:
        rows = [[bar["bar"], bar["asked"], bar["measured"], "met" if bar["met"] else "missed"] for bar in bars]
        lines += ["", *table(["target", "asked", "measured", "result"], rows)]
    if not every_target and result["bars"]:
        lines += ["", f"Targets met: {len(result['bars']) - len(bars)} of {len(result['bars'])}."]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    origin = [result["device"], versions, f"commit {result['commit']}", result["date"]]
    recorded = "" if result["recorded"] == "measured" else f" ({result['recorded']})"
    lines += ["", "<small>" + " · ".join(filter(None, origin)) + recorded + "  "]
    lines += [f"`{result['command']}`</small>"]
    return "\n".join(lines)


def with_links(text: str) -> str:
    """Return a page's text with a list of links in place of each comment that names further tables."""

    def links(more: re.Match[str]) -> str:
        titles = (f"- [{load_result(name)['title']}](results.md#{name})" for name in more[1].split())
        return "More tables:\n\n" + "\n".join(titles)

    return MORE.sub(links, text)


def all_results() -> str:
    """Return the Markdown of a page with every table, each under its name."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    sections = [f"## {name} {{ #{name} }}\n\n{render(name)}\n" for name in names]
    return "\n".join(["# All results\n", "Every file of `benchmarks/results/`, by name.\n", *sections])


def cell(name: str, row: str, column: str) -> str:
    """Return one cell of a result, without emphasis.

    Raises:
        ValueError: no column of that name; or no row of that name, and not exactly one that starts so.
    """
    result = load_result(name)
    first = [each[0].strip("*") for each in result["rows"]]
    rows = [each for each, title in zip(result["rows"], first, strict=True) if title.startswith(row)]
    if row in first:
        rows = [result["rows"][first.index(row)]]
    if len(rows) != 1 or column not in result["columns"]:
        raise ValueError(f"{name}.json must have one row {row!r} and a column {column!r}, got {result['columns']}")
    return str(rows[0][result["columns"].index(column)]).strip("*")


def rendered_page(text: str) -> str:
    """Return a page's text with everything between markers made anew."""
    text = VALUE.sub(lambda v: f"<!-- value: {v[1]}; {v[2]}; {v[3]} -->{cell(v[1], v[2], v[3])}<!-- /value -->", text)
    text = RAN.sub(lambda v: f"<!-- ran: {v[1]}; {v[2]} -->{ran.versions(v[1], v[2])}<!-- /ran -->", text)
    text = RAN_TABLE.sub(lambda _: "\n".join(["<!-- ran -->", *table(ran.COLUMNS, ran.rows()), "<!-- /ran -->"]), text)
    text = RULES.sub(lambda of: "\n".join([f"<!-- rules: {of[1]} -->", *rules(of[1]), "<!-- /rules -->"]), text)
    return BLOCK.sub(
        lambda block: f"<!-- results: {block[1]} -->\n{render(block[1], every_target=False)}\n<!-- /results -->", text
    )


def rules(base: str) -> Iterator[str]:
    """Return a table of the registered patterns, scorers or selectors."""
    from dynaxx import selection, video  # they register all of them
    from dynaxx.settings import registered, signature

    kind = getattr(video, base, None) or getattr(selection, base, selection.base.Pattern)
    own = [rule for rule in registered(kind) if ROOT / "benchmarks" not in Path(inspect.getfile(rule)).parents]
    found = [rule for rule in own if base == "GridPattern" or getattr(rule, "stands_alone", True)]
    rows = [[f"`{signature(rule)}`", " ".join(rule.__doc__.split("\n\n")[0].split())] for rule in found]
    return table([base.lower(), "meaning"], rows)


def pages() -> list[Path]:
    """Return every page that shows results."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
    return [
        page for page in every if re.search("<!-- (results|more|value|ran|rules)\\b", page.read_text(encoding="utf-8"))
    ]


def main() -> int:
    """Rewrite or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    parser.add_argument("name", nargs="*", help="print the tables of these results; change nothing")
    arguments = parser.parse_args()
    if arguments.name:
        print("\n\n".join(render(name) for name in arguments.name))
        return 0
    check = arguments.check
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rendered_page(text)
        if new != text:
            stale += 1
            print(f"{'out of date' if check else 'rendered'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
