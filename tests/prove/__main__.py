"""`make prove`: all suites in full, two processes at a time; writes the table.

    python -m prove [--jobs 2] [--suite NAME ...] [--unit NAME ...] [--again | --rest]

With --suite or --unit only those, and the table is not written; but with --again they take
the place of what the last whole run had of them, and the table says which were run again.
A whole run takes hours: each unit's result is kept as soon as it is there. After one that was
cut off, --rest runs what it had left and what has failed, of the same commit, or with --suite a
part of that. The table is written when nothing is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .suite import Result, Suite
from .suites import SUITES
from .table import TABLE, Results, summary, table

# Seconds; none of the units takes half of it on a machine that does nothing else.
TIMEOUT = 1800

LAST = TABLE.parents[2] / "build" / "prove.json"  # what the last whole run found
PART = LAST.with_name("prove-part.json")  # and what one found that has not ended

# Before a process loads OpenMP: waiting threads that spin make a busy machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_here(suite: Suite, unit: str, output: Path) -> None:
    """In the process of the unit."""
    import torch

    leave_when_terminated()
    torch.set_num_threads(1)  # the number of allocations depends on it
    logging.getLogger("oomkit").addHandler(logging.NullHandler())
    begin = time.perf_counter()
    try:
        result = suite.prove(unit)
    except Exception:
        result = Result(failures=[traceback.format_exc()])
    result.seconds = time.perf_counter() - begin
    output.write_text(json.dumps(result.as_dict()))


def leave_when_terminated() -> None:
    """By an exception: subprocess.run() then ends its process, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def end(process: subprocess.Popen[str]) -> None:
    """With the processes of its own, where it leaves when it is told to."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def run_apart(command: list[str], output: Path, timeout: float = TIMEOUT) -> Result:
    """A process of its own: one that crashes or hangs is one failure, not the end."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        return Result(failures=[f"no end after {timeout:.0f} seconds"], seconds=timeout)
    if not output.exists():
        told = f"the process ended with {process.returncode}: {stderr[-2000:]}"
        return Result(failures=[told], seconds=time.perf_counter() - begin)
    return Result(**json.loads(output.read_text()))


def save(path: Path, results: Results, **more: object) -> None:
    rows = [(suite, unit, found.as_dict()) for (suite, unit), found in results.items()]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"results": rows, **more}))


def read(path: Path) -> tuple[Results, dict[str, Any]]:
    saved = json.loads(path.read_text())
    return {(suite, unit): Result(**found) for suite, unit, found in saved["results"]}, saved


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=LAST.parents[1], capture_output=True, text=True).stdout


def begun(seed: str) -> tuple[Results, float]:
    """What a run that was cut off has found of this commit, but for failures, and how long it
    took."""
    if not PART.exists():
        return {}, 0.0
    results, saved = read(PART)
    if (saved["commit"], saved["seed"]) != (commit(), seed):
        raise SystemExit("--rest: what was cut off ran on another commit or with another seed")
    return {key: found for key, found in results.items() if not found.failures}, saved["seconds"]


def write(results: Results, seconds: float, seed: str, again: bool) -> None:
    """The table, of this run or with this run's units in place of the last one's."""
    repeated: list[str] = []
    if again:
        whole, last = read(LAST)
        repeated = sorted({*last["repeated"], *(f"{suite}: {unit}" for suite, unit in results)})
        seconds = last["seconds"]
        results = whole | results
    save(LAST, results, seconds=seconds, repeated=repeated)
    TABLE.write_text(table(results, seconds, seed, repeated))
    print(f"wrote {TABLE}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="prove", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--unit", action="append", default=[])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {suite.name: suite for suite in SUITES}
    if arguments.here:
        name, unit, output = arguments.here
        run_here(by_name[name], unit, Path(output))
        return 0
    if unknown := set(arguments.suite) - set(by_name):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {list(by_name)}")
    seed = os.environ.get("OOMKIT_TEST_SEED", "20240607")
    results, before = begun(seed) if arguments.rest else ({}, 0.0)
    every = [(suite, unit) for suite in SUITES for unit in suite.units()]
    work = [
        (suite, unit)
        for suite, unit in every
        if not arguments.suite or suite.name in arguments.suite
        if not arguments.unit or unit in arguments.unit
        if (suite.name, unit) not in results
    ]
    whole = arguments.rest or not (arguments.suite or arguments.unit)
    saving = threading.Lock()
    print(f"seed {seed} (OOMKIT_TEST_SEED), {len(work)} units, {arguments.jobs} processes")
    begin = time.perf_counter() - before
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:

        def prove(suite: Suite, unit: str) -> None:
            output = Path(folder) / f"{suite.name} {unit}.json".replace("/", "-")
            command = [sys.executable, "-m", "prove", "--here", suite.name, unit, str(output)]
            result = run_apart(command, output)
            with saving:
                results[suite.name, unit] = result
                if whole:
                    now = time.perf_counter() - begin
                    save(PART, results, seconds=now, seed=seed, commit=commit())
            verdict = f"{len(result.failures)} FAILED" if result.failures else "ok"
            line = f"{result.cases} cases, {verdict}, {result.seconds:.0f} s; {result.told}"
            print(f"{suite.name}: {unit}: {line}", flush=True)
            for more in result.lines:
                print(f"    {more}", flush=True)
            for failure in result.failures[:5]:
                print(f"    {failure}", flush=True)

        for future in [pool.submit(prove, suite, unit) for suite, unit in work]:
            future.result()
    seconds = time.perf_counter() - begin
    print(f"\n{summary(results, seconds)}")
    failed = any(result.failures for result in results.values())
    in_order = {
        (s.name, unit): results[s.name, unit] for s, unit in every if (s.name, unit) in results
    }
    if arguments.again or (whole and len(in_order) == len(every)):
        write(in_order, seconds, seed, arguments.again)
        PART.unlink(missing_ok=True)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
