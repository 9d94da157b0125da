"""Documents: their Python runs, their links lead somewhere, and they name no machine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SLOW = ("analysis.md", "kernels_cpu.md")  # a minute of a real model, and the whole benchmark


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page) and page.name not in SLOW], ids=lambda page: page.name
)
def test_examples_run(page, tmp_path, monkeypatch):
    """In the page's order: a later one may use what an earlier one made."""
    monkeypatch.chdir(tmp_path)  # some write files
    names = {}
    for block in examples(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml"], ids=lambda page: page.name)
def test_no_machine_is_named(page):
    assert not re.search(r"/(home|root|work|tmp)/|file://", page.read_text(encoding="utf-8"))
