"""The tests of a mutant, and of the unmutated copy: what came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mutant import Mutant, StaleEdit
from .plugin import REPORT, TREE
from .tree import Base, BuildFailed, make_mutant

TIMEOUT = 1200  # seconds of one pytest
TEST_TIMEOUT = 300  # of one test, which then fails: a mutant may well retry for ever


@dataclass
class Verdict:
    mutant: Mutant
    caught: bool
    told: str
    """By which test; or why not."""
    how: str = ""
    """The first line of what the test said."""
    seconds: float = 0.0


def run_tests(tree: Path, tests: list[str], first: bool = True) -> tuple[int, dict[str, Any], str]:
    """pytest in the copy: its exit code, what the plugin noted, and the end of the output."""
    report = tree / f"report-{os.getpid()}-{abs(hash(tuple(tests)))}.json"
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",  # tests with two threads ask for them
        "OMP_WAIT_POLICY": "PASSIVE",
        TREE: str(tree),
        REPORT: str(report),
    }
    variables.pop("OOMKIT_REQUIRE_CUDA", None)
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no",
        "-p", "mutants.plugin", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT}",
        *(["-x"] if first else []), *(f"tests/{test}" for test in tests),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, {}, f"no end after {TIMEOUT} seconds"
    noted = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, noted, (done.stdout + done.stderr)[-2000:]


def _short(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def judge(mutant: Mutant, code: int, noted: dict[str, Any], output: str) -> Verdict:
    """Caught is a mutant by a test that fails, or in which the process crashes."""
    if not noted:
        return Verdict(mutant, False, f"the tests told nothing: {output}")
    if code < 0 and noted["running"]:
        name = signal.Signals(-code).name
        return Verdict(mutant, True, f"{_short(noted['running'])} (crash: {name})", name)
    if code == 1 and noted["failed"]:
        test, how = noted["failed"][0]
        return Verdict(mutant, True, _short(test), how)
    if code == 0:
        return Verdict(mutant, False, f"SURVIVED {noted['passed']} tests")
    return Verdict(mutant, False, f"pytest ended with {code}: {noted['errors'] or output}")


def prove(base: Base, mutant: Mutant, folder: Path) -> Verdict:
    begin = time.perf_counter()
    try:
        make_mutant(base, mutant, folder)
    except (BuildFailed, StaleEdit) as wrong:
        return Verdict(mutant, False, f"cannot be made: {wrong}")
    verdict = judge(mutant, *run_tests(folder, list(mutant.tests)))
    verdict.seconds = time.perf_counter() - begin
    return verdict


def unmutated(base: Base, tests: list[str]) -> str:
    """Why the tests prove nothing: one fails, or does not run, without any mutant. Or ""."""
    code, noted, output = run_tests(base.folder, tests, first=False)
    if code != 0:
        return f"without a mutant pytest ended with {code}: {output}"
    return f"skipped: {noted['skipped']}" if noted["skipped"] else ""
