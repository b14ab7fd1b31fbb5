"""What a suite is: units that can run in a process each, and what one of them found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import faults

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    told: str = ""
    """For the line of the unit in the table: what came out how often."""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    """Below that line, one each."""
    commit: str = ""
    """On which it ran, and when."""
    ran: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    name: str
    units: Callable[[], list[str]]
    """Names; longest first, so that no process waits for the other at the end."""
    prove: Callable[[str], Result]
    """Of one unit. It runs in a process of its own; an exception is a failure."""


def pytest_suite(name: str, *files: str) -> Suite:
    """Files of tests, each a unit, each test a case."""
    return Suite(name, lambda: list(files), run_pytest)


def sampling() -> list[str]:
    """The files whose tests take a sample of what they sweep, or are left out by `make test`."""
    files = sorted(TESTS.glob("*/test_*.py"))
    signs = ("helpers.sample import", "mark.whole", "mark.sample(")
    return [
        str(f.relative_to(TESTS)) for f in files if any(s in f.read_text("utf-8") for s in signs)
    ]


def run_pytest(file: str) -> Result:
    """With all of what `make test` takes samples of (helpers/sample.py)."""
    return _run_whole([str(TESTS / file)])[0]


def run_faults(*arguments: str) -> Result:
    """The same of some tests; a case is a step in which an allocation has failed."""
    result, output = _run_whole(["-p", "prove.faults", *arguments])
    result.cases = faults.read(output)
    return result


def _run_whole(arguments: list[str]) -> tuple[Result, str]:
    begin = time.perf_counter()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # of our plugin
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rN", "--tb=line", "-p", "no:cacheprovider",
         "-m", "not gpu", "--timeout=0", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OOMKIT_TEST_WHOLE": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    return read_pytest(done.stdout, done.returncode, seconds), done.stdout


def read_pytest(output: str, code: int, seconds: float) -> Result:
    last = output.strip().splitlines()[-1] if output.strip() else ""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|errors?)", last)}
    result = Result(sum(counts.values()), seconds=seconds, told=last.partition(" in ")[0])
    if code != 0:
        result.failures.append(f"pytest ended with {code}: {output[-2000:]}")
        result.failures += ["one more"] * (sum(counts.values()) - counts.get("passed", 0) - 1)
    return result
