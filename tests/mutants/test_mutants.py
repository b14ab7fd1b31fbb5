"""The catalogue fits the sources and the tests; the runner judges rightly."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.sample import LEFT_OUT

from .__main__ import mapped_tests
from .catalogue import CATALOGUES, MUTANTS
from .mutant import ROOT, Mutant, StaleEdit
from .table import summary, table
from .verdict import Verdict, judge

PLAIN = Mutant("plain", "nothing", "csrc/core/a.c", "x = 1", "x = 2", ("test_a.py::test_b",))
NOTED = {"running": "tests/test_a.py::test_b", "passed": 1, "failed": [], "errors": []}


@functools.cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


EVERY = [mutant for catalogue in CATALOGUES.values() for mutant in catalogue]


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_the_edit_fits_the_source_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert mutant.mutated(source) != source
    assert mutant.path.suffix in (".c", ".cpp", ".py")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / "tests" / file).is_file(), test
        assert not name or name.partition("[")[0] in _functions(file), test


def test_pytest_finds_their_tests(request: pytest.FixtureRequest) -> None:
    """By their whole names: the values of parameters may have others by now."""
    names = {f"tests/{test}" for mutant in MUTANTS for test in mutant.tests}
    left_out = request.config.stash.get(LEFT_OUT, [])
    # All of them are here, where all tests run.
    for node in (*(item.nodeid for item in request.session.items), *left_out):
        names -= {node, node.partition("[")[0], node.partition("::")[0]}
    if not names:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *sorted(names)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.returncode == 0, found.stdout[-1000:] + found.stderr


def test_names_and_invariants_are_their_own() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in EVERY}) == len(EVERY)
    assert len({mutant.breaks for mutant in EVERY}) == len(EVERY)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_an_edit_that_no_longer_applies_says_so() -> None:
    assert PLAIN.mutated("int x = 1;") == "int x = 2;"
    with pytest.raises(StaleEdit, match="occurs 0 times in csrc/core/a.c"):
        PLAIN.mutated("int x = 3;")
    with pytest.raises(StaleEdit, match="occurs 2 times"):
        PLAIN.mutated("x = 1; x = 1;")
    with pytest.raises(StaleEdit, match="'y'"):
        replace(PLAIN, also=(("y", "z"),)).mutated("x = 1;")


def test_only_a_test_that_fails_or_crashes_catches() -> None:
    failed = {**NOTED, "failed": [["tests/test_a.py::test_b", "assert 1 == 2"]]}
    assert judge(PLAIN, 1, failed, "").caught
    assert judge(PLAIN, 1, failed, "").told == "test_a.py::test_b"
    crash = judge(PLAIN, -11, NOTED, "")
    assert crash.caught and "crash: SIGSEGV" in crash.told
    assert judge(PLAIN, 0, NOTED, "").told == "SURVIVED 1 tests"
    for code, noted in ((0, NOTED), (4, NOTED), (2, {**NOTED, "errors": [["a", "b"]]}), (1, {}),
                        (1, {**NOTED, "errors": [["a", "fixture"]]}), (-11, {})):  # fmt: skip
        assert not judge(PLAIN, code, noted, "").caught, (code, noted)


def test_each_mapped_test_runs_once_without_a_mutant() -> None:
    mutants = [
        replace(PLAIN, tests=tests)
        for tests in (("a.py",), ("a.py::t", "b.py::t[1]"), ("b.py::t", "c.py::t[2]"))
    ]
    assert mapped_tests(mutants) == ["a.py", "b.py::t", "c.py::t[2]"]


def test_the_table_says_what_caught_and_what_did_not() -> None:
    verdicts = [
        Verdict(PLAIN, True, "test_a.py::test_b (crash: SIGSEGV)", seconds=2.0),
        Verdict(replace(PLAIN, name="other"), False, "SURVIVED 3 tests"),
    ]
    assert "2 mutants, 1 caught (1 by a crash), 1 not" in summary(verdicts, 3.0)
    text = table(verdicts, 3.0)
    assert "caught by test_a.py::test_b" in text and "NOT CAUGHT: SURVIVED 3 tests" in text
