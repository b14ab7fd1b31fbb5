"""`make prove`: all suites in full, two processes at a time; writes the table.

    python -m prove [--jobs 2] [--suite NAME ...] [--unit NAME ...] [--rest] [--timeout 1800]

A whole run takes hours. So each unit's result is kept as soon as it is there, with the commit
that it ran on (benchmarks/results/prove.json, and the table beside it). --rest runs what has not
run on this commit or has failed there, what ran longest ago first: it goes on where a run was cut
off, and with each new commit through all of it. With --suite or --unit only those, which are kept
together with --rest alone.
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

from .suite import TESTS, Result, Suite
from .suites import SUITES
from .table import KEPT, TABLE, Results, read, save, summary, table

# Seconds; none of the units takes half of it on a machine that does nothing else, but for the
# proofs of sharded programs in parts on a slow one (--timeout).
TIMEOUT = 1800
SEED = "20240607"

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


def commit() -> str:
    """The commit that runs, with a + where the files are not those of it."""

    def git(*command: str) -> str:
        return subprocess.check_output(["git", *command], cwd=TESTS.parent, text=True).strip()

    changed = git("status", "--porcelain", "csrc", "oomkit", "tests")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def runs_no_more(found: Result | None, now: str) -> bool:
    """Did it run on this commit, without a failure?"""
    return found is not None and not found.failures and found.commit == now and now[-1] != "+"


def main() -> int:
    parser = argparse.ArgumentParser(prog="prove", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--unit", action="append", default=[])
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of one unit")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {suite.name: suite for suite in SUITES}
    if arguments.here:
        name, unit, output = arguments.here
        run_here(by_name[name], unit, Path(output))
        return 0
    if unknown := set(arguments.suite) - set(by_name):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {list(by_name)}")
    seed = os.environ.get("OOMKIT_TEST_SEED", SEED)
    now = commit()
    every = {(suite.name, unit): suite for suite in SUITES for unit in suite.units()}
    kept = {key: found for key, found in read(KEPT).items() if key in every}
    if whole := arguments.rest or not (arguments.suite or arguments.unit):
        if seed != SEED:
            parser.error("OOMKIT_TEST_SEED is for --suite or --unit: others are kept")
    work = [
        (name, unit)
        for name, unit in every
        if not arguments.suite or name in arguments.suite
        if not arguments.unit or unit in arguments.unit
        if not (arguments.rest and runs_no_more(kept.get((name, unit)), now))
    ]
    if arguments.rest:  # sorted() leaves what never ran as it is
        work = sorted(work, key=lambda key: kept[key].ran if key in kept else "")
    saving = threading.Lock()
    print(f"seed {seed} (OOMKIT_TEST_SEED), {len(work)} units, {arguments.jobs} processes")
    results: Results = {}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:

        def prove(name: str, unit: str) -> None:
            output = Path(folder) / f"{name} {unit}.json".replace("/", "-")
            command = [sys.executable, "-m", "prove", "--here", name, unit, str(output)]
            result = run_apart(command, output, arguments.timeout)
            result.commit, result.ran = now, time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            with saving:
                results[name, unit] = kept[name, unit] = result
                if whole:
                    in_order = {key: kept[key] for key in every if key in kept}
                    save(KEPT, in_order)
                    TABLE.write_text(table(in_order, seed, len(every)))
            verdict = f"{len(result.failures)} FAILED" if result.failures else "ok"
            line = f"{result.cases} cases, {verdict}, {result.seconds:.0f} s; {result.told}"
            print(f"{name}: {unit}: {line}", flush=True)
            for more in result.lines:
                print(f"    {more}", flush=True)
            for failure in result.failures[:5]:
                print(f"    {failure}", flush=True)

        for future in [pool.submit(prove, *key) for key in work]:
            future.result()
    print(f"\n{summary(results)}\nfrom beginning to end: {time.perf_counter() - begin:.0f} s")
    failed = any(result.failures for result in results.values())
    return 1 if failed or not (results or arguments.rest) else 0


if __name__ == "__main__":
    sys.exit(main())
