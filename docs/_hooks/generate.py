# SPDX-License-Identifier: Apache-2.0
"""Generate pages for mkdocs from the code: every command's help and every public name's docstring.

Nothing written here is committed. mkdocs calls `on_config` once and `on_files` once per build.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from dynaxx.moved import NAMES


def engines() -> list[str]:
    """Return the integrations and engines that have public names."""
    source = Path(__file__).parents[2] / "src" / "dynaxx"
    found = sorted([*source.glob("integrations/*/__init__.py"), *source.glob("engines/*/__init__.py")])
    public = [path for path in found if "__all__" in path.read_text(encoding="utf-8")]
    return [f"dynaxx.{path.parent.parent.name}.{path.parent.name}" for path in public]


# One page per room: file name, title, and the modules whose `__all__` are public. A name appears on the first page
# that lists it; `dynaxx` itself comes last, for names that no room's front door lists.
ROOMS = {
    "attention": ("Attention", ["dynaxx.ops"]),
    "patterns": ("Patterns", ["dynaxx.patterns"]),
    "selection": ("Selection", ["dynaxx.selection"]),
    "layout": ("Layout", ["dynaxx.layout"]),
    "trained": ("Trained sparse attention", ["dynaxx.trained"]),
    "modules": ("Modules to train with", ["dynaxx.trained.nn"]),
    "policy": ("Policy", ["dynaxx.policy"]),
    "integrations": ("Integrations", engines()),
    "distributed": ("Several GPUs", ["dynaxx.distributed"]),
    "video": ("Video", ["dynaxx.video"]),
    "telemetry": ("Telemetry", ["dynaxx.telemetry"]),
    "testing": ("Testing", ["dynaxx.testing"]),
    "more": ("Paged caches, packed batches, errors", [f"dynaxx.{module}" for module in NAMES] + ["dynaxx"]),
}

WITH_BASE = ("BlockLayout",)  # classes whose fields and sizes lie in a base that is not public


def public_names() -> dict[str, list[tuple[str, str]]]:
    """Return (name, path of its definition) for every public name, by page."""
    pages: dict[str, list[tuple[str, str]]] = {}
    seen: set[str] = set()
    for page, (_, modules) in ROOMS.items():
        entries = []
        for module in modules:
            public = getattr(importlib.import_module(module), "__all__", None)
            for name in NAMES[module.removeprefix("dynaxx.")] if public is None else public:
                path = definition(module, name)
                if not name.startswith("__") and path not in seen:
                    seen.add(path)
                    entries.append((name, path))
        pages[page] = sorted(entries, key=lambda entry: entry[0].lower())
    return pages


def definition(module: str, name: str) -> str:
    """Return the dotted path where a public name is defined, since front doors load lazily."""
    owner = importlib.import_module(module)
    source = getattr(owner, "_SOURCE_OF", {}).get(name, module)
    value: Any = inspect.unwrap(getattr(owner, name))
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and home.startswith("dynaxx") and getattr(value, "__name__", None) == name:
        return f"{home}.{name}"
    return f"{source}.{name}"


def api_pages() -> dict[str, str]:
    """Return the Markdown of the API pages by path; mkdocstrings turns each `:::` line into documentation."""
    pages = {}
    index = [
        "# API",
        "",
        "Every public name, generated from its docstring. `import dynaxx as dx` offers most of them.",
        "",
    ]
    for page, names in public_names().items():
        title = ROOMS[page][0]
        lines = [f"# {title}", ""]
        for name, path in names:
            options = ["    options:", "      inherited_members: true"] if name in WITH_BASE else []
            lines += [f"::: {path}", *options, ""]
            if name.startswith("_"):
                raise ValueError(f"{path} is private but listed in __all__")
        pages[f"api/{page}.md"] = "\n".join(lines)
        index += [f"## [{title}](api/{page}.md)", "", ", ".join(f"[`{n}`](api/{page}.md#{p})" for n, p in names), ""]
    return {"api.md": "\n".join(index), **pages}


def cli_page() -> str:
    """Return the Markdown of the command-line page: each command with the text of its `--help`."""
    import typer
    from typer.testing import CliRunner

    from dynaxx.cli import app

    def help_of(*words: str, option: str = "--help") -> str:
        result = CliRunner().invoke(app, [*words, option], prog_name="dynaxx", env={"COLUMNS": "100", "TERM": "dumb"})
        return result.output.strip()

    lines = [
        "# Command line",
        "",
        "The output of `--help`, command by command. [The tools](guides/tools.md) explains them.",
    ]
    lines += ["", "```text", help_of(), "```", ""]
    for name, command in typer.main.get_command(app).commands.items():
        option = "--help-all" if any("--help-all" in each.opts for each in command.params) else "--help"
        lines += [f"## dynaxx {name}", "", "```text", help_of(name, option=option), "```", ""]
    return "\n".join(lines)


def render() -> dict[str, Any]:
    """Return the functions of `benchmarks/render.py`, which makes Markdown of benchmark results."""
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "render.py"))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Put links to further tables where a page names them."""
    return str(render()["with_links"](markdown)) if "<!-- more:" in markdown else markdown


def gpus_page() -> str:
    """Return the Markdown of the table of GPUs, as `dynaxx doctor --gpus` prints it."""
    from dynaxx.kernels.proven import reasons, table

    header, *rows = ("| " + " | ".join(row) + " |" for row in table())
    lines = [
        "# GPUs",
        "",
        "What was shown for each kind of GPU: *measured* has benchmarks, *tests passed* ran there, *compiled, never",
        "run* has machine code that fits the GPU, and *unknown* was not even compiled. The Hopper kernels run on sm_90",
        "alone; all others run the portable ones. `dynaxx doctor --gpus` prints this table, and `dx.explain` says it",
        "of a call.",
        "",
        header,
        "|" + "---|" * len(table()[0]),
        *rows,
        "",
        *(f"- {line}" for line in reasons()),
        "",
        "On a GPU without measurements, `dynaxx doctor --device cuda` checks the kernels against fp64, and",
        "`dynaxx.ops.autotune` measures tiles, and stores them in a file that names the GPU and the versions;",
        "please send us that file.",
    ]
    return "\n".join(lines)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages, the decision records and pages that the navigation forgot."""
    nav: list[Any] = config["nav"]
    (reference,) = (section["Reference"] for section in nav if "Reference" in section)
    reference.insert(-1, {"GPUs": "gpus.md"})
    reference[-1] = {"API": ["api.md", *({ROOMS[page][0]: f"api/{page}.md"} for page in ROOMS)]}
    docs = Path(config["docs_dir"])
    (decisions,) = (section["Decisions"] for section in nav if "Decisions" in section)
    records = sorted((docs / "decisions").glob("*.md"))
    decisions += [page.relative_to(docs).as_posix() for page in records if page.stem != "index"]
    (benchmarks,) = (section["Benchmarks"] for section in nav if "Benchmarks" in section)
    benchmarks.append({"All results": "benchmarks/results.md"})
    named = set(leaves(nav))
    forgotten = [page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md"))]
    forgotten = [page for page in forgotten if page not in named]
    if forgotten:
        (guides,) = (section["Guides"] for section in nav if "Guides" in section)
        guides.append({"More": forgotten})
    return config


def leaves(nav: Any) -> list[str]:
    """Return the paths that a navigation tree names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in leaves(part)]


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Point the search at our copy of a script that the theme would load from a network."""
    above = "../" * page.url.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{above}assets/iframe-worker.js")


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for pages that no Markdown file makes (404.html)."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the build."""
    results = render()["all_results"]()
    pages = {"cli.md": cli_page(), "gpus.md": gpus_page(), "benchmarks/results.md": results, **api_pages()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files
