"""The frame of `make prove`: combinations, processes that crash, the table."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import __main__ as main
from .__main__ import end, run_apart
from .pairwise import pairs_of, pairwise
from .suite import TESTS, Result, read_pytest, run_faults, run_pytest, sampling
from .suites import ELSEWHERE, RUNGS, SUITES
from .table import summary, table

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
        ("models", "b"): Result(3, ["wrong"], "2 recovered", 1.0),
        ("models", "a"): Result(4, [], "", 1.0),
        ("tests", "x.py"): Result(5, [], "", 1.0),
    }
    assert [line.split()[:3] for line in summary(results, 9.0).splitlines()[1:3]] == [
        ["models", "7", "1"],
        ["tests", "5", "0"],
    ]
    text = table(results, 9.0, "1", [])
    assert "all suites" in text and "12" in text and "  b " in text and "2 recovered" in text


def test_units_that_run_again_take_the_place_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LAST", tmp_path / "prove.json")
    monkeypatch.setattr(main, "TABLE", tmp_path / "prove.txt")
    first = {("models", "a"): Result(4, ["wrong"]), ("models", "b"): Result(3)}
    main.write(first, 9.0, "1", again=False)
    assert "again" not in main.TABLE.read_text()
    main.write({("models", "a"): Result(5)}, 2.0, "1", again=True)
    text = main.TABLE.read_text()
    assert "run again by themselves after a mend: models: a\n" in text
    assert "from beginning to end: 9 s" in text
    assert next(line for line in text.splitlines() if line[:6] == "models").split()[1:3] == [
        "8",
        "0",
    ]


def test_what_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "PART", tmp_path / "part.json")
    assert main.begun("1") == ({}, 0.0)
    found = {("models", "a"): Result(4, [], "told", 1.0, ["more"])}
    failed = {("models", "b"): Result(4, ["wrong"])}
    main.save(main.PART, found | failed, seconds=9.0, seed="1", commit=main.commit())
    assert main.begun("1") == (found, 9.0)
    with pytest.raises(SystemExit, match="another seed"):
        main.begun("2")
    monkeypatch.setattr(main, "commit", lambda: "another one")
    with pytest.raises(SystemExit, match="another commit"):
        main.begun("1")


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
