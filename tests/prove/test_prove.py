"""The frame of `make prove`: combinations, processes that crash, the table."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import __main__ as main
from .__main__ import end, run_apart
from .pairwise import pairs_of, pairwise
from .suite import TESTS, Result, Suite, read_pytest, run_faults, run_pytest, sampling
from .suites import ELSEWHERE, RUNGS, SUITES
from .table import read, save, summary, table

DIMENSIONS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (1, 2, 3, 4)}


def _all() -> list[dict[str, object]]:
    return [dict(zip(DIMENSIONS, v, strict=True)) for v in itertools.product(*DIMENSIONS.values())]


def test_every_pair_occurs_in_few_combinations() -> None:
    chosen = pairwise(DIMENSIONS, 1)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, _all()))
    assert 12 <= len(chosen) <= 16  # of 48; 3 values times 4 need 12


def test_the_same_seed_gives_the_same_combinations() -> None:
    assert pairwise(DIMENSIONS, 7) == pairwise(DIMENSIONS, 7)
    assert pairwise(DIMENSIONS, 7) != pairwise(DIMENSIONS, 8)


def test_impossible_combinations_and_given_ones() -> None:
    given = [{"a": 3, "b": "x", "c": True, "d": 4}]
    chosen = pairwise(DIMENSIONS, 1, lambda c: not (c["a"] == 1 and c["b"] == "x"), given)
    assert chosen[0] == given[0]
    assert not any(c["a"] == 1 and c["b"] == "x" for c in chosen)
    possible = [c for c in _all() if not (c["a"] == 1 and c["b"] == "x")]
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, possible))


def test_a_process_that_crashes_or_hangs_is_a_failure(tmp_path: Path) -> None:
    output = tmp_path / "none.json"
    crashed = run_apart([sys.executable, "-c", "import os; os.abort()"], output)
    assert len(crashed.failures) == 1 and "ended with -6" in crashed.failures[0]
    wait = "import threading; threading.Event().wait()"
    hung = run_apart([sys.executable, "-c", wait], output, timeout=0.5)
    assert len(hung.failures) == 1 and "no end after" in hung.failures[0]


def test_a_unit_that_hangs_takes_its_processes_with_it() -> None:
    waits = "import threading; print('here', flush=True); threading.Event().wait()"
    unit = (
        "import subprocess, sys; from prove.__main__ import leave_when_terminated;"
        f"leave_when_terminated(); subprocess.run([sys.executable, '-c', {waits!r}])"
    )
    command = [sys.executable, "-c", unit]
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ours)
    assert process.stdout is not None
    with os.fdopen(os.dup(process.stdout.fileno())) as theirs:
        try:
            assert theirs.readline() == "here\n"
        finally:
            end(process)
        assert theirs.read() == ""  # nobody has the other end


def test_what_pytest_says_is_counted() -> None:
    fine = read_pytest("....\n4 passed, 1 skipped in 0.10s\n", 0, 1.0)
    assert (fine.cases, fine.failures, fine.told) == (4, [], "4 passed, 1 skipped")
    bad = read_pytest(".FF.E\n2 failed, 2 passed, 1 error in 0.10s\n", 1, 1.0)
    assert bad.cases == 5 and len(bad.failures) == 3
    assert len(read_pytest("", 3, 1.0).failures) == 1  # it did not even begin


def test_steps_in_which_an_allocation_failed_are_counted(tmp_path: Path) -> None:
    test = tmp_path / "test_some.py"
    test.write_text(
        "import torch, pytest\n"
        "from oomkit.testing import inject_oom\n"
        "def test_it():\n"
        "    for nth in (1, 2, 10**9):\n"
        "        with inject_oom(nth=nth) as fault:\n"
        "            try:\n"
        "                torch.empty(5), torch.empty(5)\n"
        "            except torch.OutOfMemoryError:\n"
        "                pass\n"
    )
    found = run_faults(str(test))
    assert (found.cases, found.failures, found.told) == (2, [], "1 passed")


def test_the_table_has_a_line_for_each_suite_and_each_unit() -> None:
    results = {
        ("models", "b"): Result(3, ["wrong"], "2 recovered", 1.0, commit="1"),
        ("models", "a"): Result(4, [], "", 1.0, commit="2"),
        ("tests", "x.py"): Result(5, [], "", 1.0, commit="3"),
    }
    assert [line.split() for line in summary(results).splitlines()[1:3]] == [
        ["models", "7", "1", "2", "s", "1", "(1),", "2", "(1)"],
        ["tests", "5", "0", "1", "s", "3"],
    ]
    text = table(results, "1", 4)
    assert "all suites" in text and "12" in text and "  b " in text and "2 recovered" in text
    assert "1 of 4 units have not run" in text and "not run" not in table(results, "1", 3)


@pytest.fixture
def two_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A run of two suites of a unit each; the second fails while it is in the list."""
    failing: list[str] = []

    def run(command: list[str], output: Path, timeout: float) -> Result:
        unit = command[-2]
        return Result(3, ["wrong"] if unit in failing else [], told=unit)

    suites = [Suite(name, lambda name=name: [f"{name}1"], run_pytest) for name in "ab"]
    for name, value in {
        "SUITES": suites,
        "KEPT": tmp_path / "prove.json",
        "TABLE": tmp_path / "prove.txt",
        "run_apart": run,
        "commit": lambda: "first",
    }.items():
        monkeypatch.setattr(main, name, value)
    yield failing


def prove(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prove", "--jobs", "1", *arguments])
    return main.main()


def test_what_was_cut_off_goes_on(
    two_units: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(monkeypatch, "--suite", "a") == 0 and not main.KEPT.exists()
    assert prove(monkeypatch, "--rest", "--suite", "a") == 0
    assert "1 of 2 units have not run yet" in main.TABLE.read_text()
    two_units.append("b1")
    capsys.readouterr()
    assert prove(monkeypatch, "--rest") == 1
    assert "a: a1" not in capsys.readouterr().out  # it has run
    assert read(main.KEPT)["b", "b1"].failures == ["wrong"]
    two_units.clear()
    assert prove(monkeypatch, "--rest") == 0
    assert "b: b1: 3 cases, ok" in capsys.readouterr().out
    assert prove(monkeypatch, "--rest") == 0 and "0 units" in capsys.readouterr().out
    assert "not run yet" not in main.TABLE.read_text()


def test_on_another_commit_what_ran_longest_ago_runs_first(
    two_units: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prove(monkeypatch)
    kept = read(main.KEPT)
    kept["a", "a1"].ran, kept["b", "b1"].ran = "2026-02-02 00:00", "2026-01-01 00:00"
    save(main.KEPT, kept)
    monkeypatch.setattr(main, "commit", lambda: "second")
    capsys.readouterr()
    assert prove(monkeypatch, "--rest") == 0
    out = capsys.readouterr().out
    assert 0 < out.index("b: b1") < out.index("a: a1")
    assert {found.commit for found in read(main.KEPT).values()} == {"second"}


def test_what_is_kept_of_a_failure_names_no_folder_of_a_machine(tmp_path: Path) -> None:
    told = f'  File "{tmp_path}/some.py", line 1\nValueError: 1/2, proof/judge.py of {tmp_path}/x'
    save(tmp_path / "prove.json", {("models", "a"): Result(1, ["begin" + 2000 * " " + told])})
    (kept,) = read(tmp_path / "prove.json")["models", "a"].failures
    expected = '  File "some.py", line 1\nValueError: 1/2, proof/judge.py of x'
    assert kept.endswith(expected) and "begin" not in kept


def test_numbers_of_another_seed_are_not_kept(
    two_units: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMKIT_TEST_SEED", "1")
    with pytest.raises(SystemExit):
        prove(monkeypatch, "--rest")
    assert prove(monkeypatch, "--suite", "a") == 0 and not main.KEPT.exists()


def test_units_have_names_of_their_own() -> None:
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    for suite in SUITES:
        units = suite.units()
        assert units and len(set(units)) == len(units)


def test_what_is_sampled_is_proven_whole() -> None:
    """Each file that takes samples is a unit of one suite, which sweeps all of it."""
    units = [unit for suite in SUITES if suite.prove is run_pytest for unit in suite.units()]
    assert all((TESTS / unit).is_file() for unit in units) and len(set(units)) == len(units)
    rungs = {file for some in RUNGS.values() for files, _ in some for file in files}
    assert all((TESTS / file).is_file() for file in rungs) and not rungs & set(units)
    assert set(sampling()) <= {*units, *ELSEWHERE, *rungs} and len(sampling()) > 5
    assert set(ELSEWHERE.values()) <= {suite.name for suite in SUITES}
