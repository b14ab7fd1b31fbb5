"""Pages of the documentation: every link leads somewhere, every table is a table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    + [*ROOT.glob("docs/**/*.md"), *ROOT.glob("csrc/*/README.md")]
)
FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1$", re.M | re.S)
DELIMITERS = re.compile(r"^\|(\s*:?-+:?\s*\|)+$")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def cells(line: str) -> int:
    """Cells of a line as Markdown counts them: a `|` in code needs its backslash, too."""
    return len(re.findall(r"(?<!\\)\|", line.strip())) - 1


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    given = re.findall(r"^\(([\w-]+)\)=$", page.read_text(encoding="utf-8"), re.M)
    return {text.replace(" ", "-") for text in kept} | set(given)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_rows_of_a_table_have_the_cells_of_its_header(page: Path) -> None:
    lines = prose(page).splitlines()
    for at, line in enumerate(lines):
        if line.startswith("|") and (at == 0 or not lines[at - 1].startswith("|")):
            assert at + 1 < len(lines) and DELIMITERS.match(lines[at + 1]), line
            header = line
        if line.startswith("|"):
            assert cells(line) == cells(header), line


def test_a_cell_more_is_counted() -> None:
    assert [cells(line) for line in ("| a | b |", "| a | `b \\| c` |", "|---|---|---|")] == [
        2,
        2,
        3,
    ]
