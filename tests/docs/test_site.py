"""The site: each page is in the navigation, each picture is what its script draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["PICTURES"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_is_in_the_navigation_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.M | re.S)
    entries = [
        line.partition("<")[2].rstrip(">") or line
        for tree in trees
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.glob("**/*.md")}
    assert sorted(entries) == sorted(pages - {"index"})


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    committed = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == PICTURES[name](), "run python docs/pictures/draw.py"
