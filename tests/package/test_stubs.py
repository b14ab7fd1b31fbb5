"""The options in the stub are those of the built function, and the page of options has them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import oomkit

ROOT = Path(__file__).resolve().parents[2]


def options_of(stub: str) -> list[str]:
    """The fields of _Options."""
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ClassDef) and node.name == "_Options":
            return [f.target.id for f in node.body if isinstance(f, ast.AnnAssign)]
    raise AssertionError("oomkit/_C.pyi has no _Options")


def test_the_stub_has_the_options_of_the_built_function() -> None:
    parameters = inspect.signature(oomkit.auto_batch).parameters.values()
    built = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    stub = options_of((ROOT / "oomkit" / "_C.pyi").read_text())
    assert set(stub) == built, "add the option to _Options in oomkit/_C.pyi"
    assert len(stub) == len(set(stub))
    table = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert [option for option in stub if f"`{option}`" not in table] == []
