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
from dataclasses import dataclass, field
from pathlib import Path

from .launch import ROOT, started
from .programs.ends import PATIENCE, victim_of

TABLE = ROOT / "benchmarks" / "results" / "ranks-ends.txt"
HOW = ("kill", "stop", "raise", "exit")
OPTIONS = {
    False: ("plain", "norm", "two_models", "views", "fp16"),
    True: ("plain", "together", "hsdp", "checkpoint"),
}
LIMIT = 45.0
"""Seconds in which the others must know: that of a machine with many more processes than cores, on
which one that was killed takes its time to be gone. What is usual is in the table."""


@dataclass
class Ends:
    count: int = 0
    seconds: list[float] = field(default_factory=list)
    by_vote: int = 0
    """Ranks that got RankError; others got torch's error with a note."""
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Ends) -> None:
        self.count += other.count
        self.seconds += other.seconds
        self.by_vote += other.by_vote
        self.wrong += other.wrong


def one_end(how: str, sharded: bool, seed: int) -> Ends:
    draw = random.Random(seed)
    world = 4 if draw.random() < 0.1 else 2
    option = draw.choice(OPTIONS[sharded])
    machines = draw.choice((1, 1, 2))
    given = {"how": how, "sharded": sharded, "option": option, "seed": seed}
    given["nodes"] = [world // machines] * machines
    given["gloo"] = machines == 1 and draw.random() < 0.25  # no memory to share
    found = Ends(1)
    with started("ends:one_ends", world, 100.0, **given) as (processes, finish):
        if how == "stop":
            stopped = victim_of(seed, world)
            finish(but=stopped)
            os.kill(processes[stopped], signal.SIGKILL)
        ended = finish()
    told = [one.result for one in ended if one.result is not None]
    for one in told:
        victim, text, seconds = one["victim"], one["text"], one["seconds"]
        process = f"rank {victim} "
        found.by_vote += text.startswith("RankError")
        found.seconds.append(seconds)
        if process not in text or not 0.0 <= seconds <= LIMIT:
            found.wrong.append(f"{given} {world} ranks: after {seconds:.1f} s: {text[:600]}")
    if len(told) != world - 1 or any(one.hung for one in ended):
        outputs = " ".join(one.output[-1500:] for one in ended)
        found.wrong.append(f"{given} {world} ranks: {len(told)} came to their end: {outputs}")
    return found


def ends(how: str, sharded: bool, numbers: range, seed: int) -> Ends:
    found = Ends()
    for number in numbers:
        one = one_end(how, sharded, 1000 * seed + number)
        found.add(one)
    return found


def table(found: dict[tuple[bool, str], Ends], seed: int, said: list[str]) -> str:
    lines = [
        "One rank that ends at a random place of a step, of 2 ranks or (one in ten) 4, one in",
        "three on two machines and one in six without memory to share, in two of three with an",
        "out-of-memory error on some rank in the same step. Each other rank must get an error",
        f"that names it, within {LIMIT:.0f} seconds: RankError, or torch's error with a note.",
        "Seconds are from the end of the one to",
        f"the error of the other; for one that is stopped the {PATIENCE:.0f} that the process",
        "group was told to wait are in them.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"seed {seed}",
        *said,
        "",
        f"{'program':8s} {'by':6s} {'ends':>5s} {'told':>5s} {'RankError':>10s} {'wrong':>6s} "
        f"{'median s':>9s} {'longest s':>10s}",
    ]
    total = Ends()
    for (sharded, how), one in found.items():
        seconds = sorted(one.seconds) or [0.0]
        lines.append(
            f"{'fsdp' if sharded else 'ddp':8s} {how:6s} {one.count:5d} {len(one.seconds):5d} "
            f"{one.by_vote:10d} {len(one.wrong):6d} {seconds[len(seconds) // 2]:9.2f} "
            f"{seconds[-1]:10.2f}"
        )
        total.add(one)
    lines.append(
        f"{'all':15s} {total.count:5d} {len(total.seconds):5d} {total.by_vote:10d} "
        f"{len(total.wrong):6d}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=25, help="of each way and program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--say", action="append", default=[], help="a line for the table")
    parser.add_argument("--output", type=Path, help=f"usually {TABLE}")
    given = parser.parse_args()
    found = {(sharded, how): Ends() for sharded in (False, True) for how in HOW}
    for number in range(given.count):
        for (sharded, how), so_far in found.items():
            one = ends(how, sharded, range(number, number + 1), given.seed)
            so_far.add(one)
            for text in one.wrong:
                print(text, flush=True)
        if given.output is not None:
            given.output.write_text(table(found, given.seed, given.say) + "\n")
    print(table(found, given.seed, given.say))
    return 1 if any(one.wrong for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
