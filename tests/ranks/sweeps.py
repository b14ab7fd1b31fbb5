"""Steps on several ranks, failed place by place: `python -m ranks.sweeps` writes the table.

    python -m ranks.sweeps [--stride N] [--minutes N] [--output FILE]

Every N-th allocation of forward and backward, of the first steps, on one rank or on several.
What did not come in the time that was given is not in the table.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import programs_ddp, programs_fsdp
from .launch import ROOT, ranks_of

KINDS = ("first", "last", "all", "again", "pair")
TABLE = ROOT / "benchmarks" / "results" / "ranks.txt"


@dataclass
class Swept:
    cases: int = 0
    """Steps with faults."""
    fired: int = 0
    """Faults, on all ranks."""
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def add(self, other: Swept) -> None:
        self.cases += other.cases
        self.fired += other.fired
        self.wrong += other.wrong
        self.hung += other.hung


def units() -> list[str]:
    """`program / ranks / option`"""
    found = []
    for program, options, more in (
        ("programs_ddp", programs_ddp.OPTIONS, ()),
        ("programs_fsdp", programs_fsdp.OPTIONS, programs_fsdp.OF_FOUR),
    ):
        found += [f"{program} / 2 / {option}" for option in options]
        found += [f"{program} / 4 / {option}" for option in (*options, *more)]
    return found


def sweep(unit: str, stride: int = 1, offset: int = 0, limit: float = 6000.0) -> Swept:
    program, world, option = unit.split(" / ")
    given = {"options": [option], "kinds": list(KINDS), "stride": stride, "offset": offset}
    given["at"] = [0, 1, 2] if world == "2" else [1]
    ended = ranks_of(f"{program}:sweep", int(world), limit, **given)
    result = Swept()
    for one in ended:
        if one.hung:
            result.hung.append(f"{unit}: rank {one.rank} stood at\n{one.output[-3000:]}")
        elif one.status != 0:
            result.wrong.append(f"{unit}: rank {one.rank} ended: {one.error}")
        else:
            found = one.result[option]
            result.wrong += [f"{unit}: {failure}" for failure in found["failures"]]
    if ended[0].status == 0:
        found = ended[0].result[option]
        result.cases, result.fired = found["cases"], found["fired"]
    return result


def table(found: dict[str, Swept], stride: int) -> str:
    """Lines by program, number of ranks and option."""
    lines = [
        "Steps of which allocations were failed, on one rank or several, once or again in the",
        "retry: the first, second and third step of each program. Equal: parameters, buffers and",
        "gradients to the last bit those of an undisturbed run of the same slices (to 1e-12 on",
        "four ranks), and gradients to 1e-9 those of one process with the rows of all ranks.",
        "Every allocation." if stride == 1 else f"Of {stride} allocations one.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
        f"{'program':14s} {'ranks':>5s} {'option':14s} {'steps':>7s} {'faults':>7s} "
        f"{'wrong':>6s} {'hung':>5s}",
    ]
    total = Swept()
    for unit, one in found.items():
        program, world, option = unit.split(" / ")
        lines.append(
            f"{program.removeprefix('programs_'):14s} {world:>5s} {option:14s} {one.cases:7d} "
            f"{one.fired:7d} {len(one.wrong):6d} {len(one.hung):5d}"
        )
        total.add(one)
    lines.append(
        f"{'all':14s} {'':5s} {'':14s} {total.cases:7d} {total.fired:7d} "
        f"{len(total.wrong):6d} {len(total.hung):5d}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--output", type=Path, help=f"usually {TABLE}")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    found: dict[str, Swept] = {}
    every = units()
    random.Random(3).shuffle(every)
    for unit in every:
        if time.monotonic() > until:
            break
        found[unit] = sweep(unit, given.stride, offset=len(found) % given.stride)
        one = found[unit]
        print(
            f"{unit}: {one.cases} steps, {len(one.wrong)} wrong, {len(one.hung)} hung", flush=True
        )
        for text in (*one.wrong, *one.hung):
            print(text, flush=True)
        if given.output is not None:
            order = [u for u in units() if u in found]
            given.output.write_text(table({u: found[u] for u in order}, given.stride) + "\n")
    return 1 if any(one.wrong or one.hung for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
