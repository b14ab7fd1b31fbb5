"""python -m oomkit explain KIND: the entry of an error or a warning, which its message names."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["entries", "explain", "in_page"]

PAGE = Path(__file__).with_name("errors.md")  # in the sources a link to docs/reference


def in_page(kind: str) -> str:
    """The end of a message while oomkit is not built, so that `explain` does not run."""
    return f" (help: {kind} in {PAGE})"


def entries() -> dict[str, str]:
    """The entries of the page by kind."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.split(r"^### (\S+)\n", re.sub(r"^## .*\n", "", text, flags=re.M), flags=re.M)
    return dict(zip(found[1::2], map(str.strip, found[2::2]), strict=True))


def explain(kind: str) -> str | None:
    """The entry of a kind; None where there is none."""
    entry = entries().get(kind)
    return None if entry is None else f"{kind}\n\n{entry}"
