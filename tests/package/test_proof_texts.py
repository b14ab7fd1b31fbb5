"""Each finding of a proof is in docs/explanation/proof.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from oomkit._proof import judge as _proof

ROOT = Path(__file__).resolve().parents[2]


def _constants(node: ast.AST) -> list[str]:
    found = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    words = [text.strip(" .;:()[]'") for text in found if isinstance(text, str)]
    return [text for text in words if len(text) > 8]


def _findings() -> list[str]:
    tree = ast.parse(Path(_proof.__file__).read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_fail"
    ]
    assert len(calls) >= 10
    return sorted({text for call in calls for text in _constants(call.args[1])})


@pytest.mark.parametrize("text", _findings())
def test_in_the_docs(text: str) -> None:
    page = " ".join(
        (ROOT / "docs" / "explanation" / "proof.md").read_text(encoding="utf-8").split()
    )
    assert re.search(re.escape(text), page), (
        "a finding that docs/explanation/proof.md does not explain"
    )
