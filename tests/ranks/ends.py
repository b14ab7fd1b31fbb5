"""A rank that ends at a random place of a step: `python -m ranks.ends` writes the table.

    python -m ranks.ends [--count N] [--seed N] [--output FILE]

By SIGKILL, SIGSTOP, an error or sys.exit(), over DistributedDataParallel and fully_shard: all
others must get an error that names it, within a time.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from .launch import ROOT, started

TABLE = ROOT / "benchmarks" / "results" / "ranks-ends.txt"
HOW = ("kill", "stop", "raise", "exit")
OPTIONS = {
    False: ("plain", "norm", "two_models", "views", "fp16"),
    True: ("plain", "together", "hsdp", "checkpoint"),
}
LIMIT = {"stop": 12.0}
"""Seconds in which the others must know, if not 6: it is three times what ranks are patient, or an
error waits for others, on a machine that may do other things."""


@dataclass
class Ends:
    seconds: list[float] = field(default_factory=list)
    by_vote: int = 0
    """Ranks that got RankError; others got torch's error with a note."""
    wrong: list[str] = field(default_factory=list)


def one_end(how: str, sharded: bool, seed: int) -> Ends:
    draw = random.Random(seed)
    world = 4 if draw.random() < 0.1 else 2
    given = {"how": how, "sharded": sharded, "option": draw.choice(OPTIONS[sharded]), "seed": seed}
    found = Ends()
    with started("programs_ends:one_ends", world, 60.0, **given) as (processes, folder, finish):
        if how == "stop":
            results = [folder / f"result-{rank}" for rank in range(world)]
            while sum(result.exists() for result in results) < world - 1:
                time.sleep(0.05)
            for process, result in zip(processes, results, strict=True):
                if not result.exists():
                    os.kill(process, signal.SIGKILL)
        ended = finish()
    told = [one.result for one in ended if one.result is not None]
    for one in told:
        victim, text, seconds = one["victim"], one["text"], one["seconds"]
        process = f"rank {victim} "
        found.by_vote += text.startswith("RankError")
        found.seconds.append(seconds)
        if process not in text or not 0.0 <= seconds <= LIMIT.get(how, 6.0):
            found.wrong.append(f"{given} {world} ranks: after {seconds:.1f} s: {text[:600]}")
    if len(told) != world - 1 or any(one.hung for one in ended):
        outputs = " ".join(one.output[-1500:] for one in ended)
        found.wrong.append(f"{given} {world} ranks: {len(told)} came to their end: {outputs}")
    return found


def ends(how: str, sharded: bool, count: int, seed: int) -> Ends:
    found = Ends()
    for number in range(count):
        one = one_end(how, sharded, 1000 * seed + number)
        found.seconds += one.seconds
        found.by_vote += one.by_vote
        found.wrong += one.wrong
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=25, help="of each way and program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--say", action="append", default=[], help="a line for the table")
    parser.add_argument("--output", type=Path, help=f"usually {TABLE}")
    given = parser.parse_args()
    lines = [
        "One rank that ends at a random place of a step, of 2 ranks or (one in ten) 4, in half of",
        "them after or before an out-of-memory error on some rank. Each other rank must get an",
        "error that names it: RankError, or torch's error with a note. Seconds are from the end of",
        "the one to the error of the other; for one that is stopped they have the 4 seconds in",
        "them that the process group was told to wait.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"seed {given.seed}",
        *given.say,
        "",
        f"{'program':8s} {'by':6s} {'ends':>5s} {'told':>5s} {'RankError':>10s} {'wrong':>6s} "
        f"{'median s':>9s} {'longest s':>10s}",
    ]
    failed, total = 0, 0
    for sharded in (False, True):
        for how in HOW:
            found = ends(how, sharded, given.count, given.seed)
            seconds = sorted(found.seconds) or [0.0]
            lines.append(
                f"{'fsdp' if sharded else 'ddp':8s} {how:6s} {given.count:5d} "
                f"{len(found.seconds):5d} {found.by_vote:10d} {len(found.wrong):6d} "
                f"{seconds[len(seconds) // 2]:9.2f} {seconds[-1]:10.2f}"
            )
            print(lines[-1], flush=True)
            for text in found.wrong:
                print(text, flush=True)
            failed, total = failed + len(found.wrong), total + given.count
    lines.append(f"{'all':15s} {total:5d} {'':16s} {failed:6d}")
    if given.output is not None:
        given.output.write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
