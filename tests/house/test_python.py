"""The Python of the house: no folder and no function too large, and tests for each folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from house.sources import FOLDERS, PLAIN, ROOT
from house.test_house import LONGEST_FUNCTION, crowded


def long_functions(text: str) -> list[str]:
    """Those with more lines than a function of C may have; what documents them does not count."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            comment = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            if (node.end_lineno or 0) - node.lineno + 1 - comment > LONGEST_FUNCTION:
                found.append(node.name)
    return found


SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "oomkit").rglob("*.py"))


@pytest.mark.parametrize("name", SOURCES)
def test_no_function_is_long(name: str) -> None:
    assert long_functions((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", ["oomkit", "examples", "benchmarks", "requirements"])
def test_no_folder_is_crowded(name: str) -> None:
    assert crowded(ROOT / name) == []


@pytest.mark.parametrize("folder", [*PLAIN, *FOLDERS, "torch"])
def test_a_folder_has_tests(folder: str) -> None:
    """Those that `make quick FOLDER=` runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.search(rf"^TESTS_OF_{folder} := (\w+)$", makefile, re.MULTILINE)
    tests = ROOT / "tests" / (named.group(1) if named else folder)
    assert list(tests.glob("test_*.py")) or list(tests.glob("test_*.c")), tests


@pytest.mark.parametrize(("lines", "found"), [(58, []), (59, ["g"])])
def test_a_long_function_of_python_is_found(lines: int, found: list[str]) -> None:
    text = 'def g():\n    """More\n\n    lines."""\n' + "    x = 1\n" * lines + "    return x\n"
    assert long_functions(text) == found


def test_a_crowded_folder_of_python_is_found(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"{number}.py").touch()
    assert crowded(tmp_path) == ["."]
