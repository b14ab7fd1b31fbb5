"""Steps on several ranks, failed place by place: `python -m ranks.sweeps` writes the table.

    python -m ranks.sweeps [--stride N] [--minutes N] [--found FILE] [--output FILE]

Every allocation of forward and backward, of the first steps, on one rank or on several: of N
allocations one at a time, for all programs, then the next of them. What was found is added to a
file, line by line: a sweep that was ended goes on where it was, and the table is made of the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .launch import ROOT, ranks_of
from .programs import ddp, fsdp

PROGRAMS = ("ddp", "fsdp")
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

    def said(self) -> str:
        return f"{self.cases} steps, {len(self.wrong)} wrong, {len(self.hung)} hung"


def options_of(program: str, world: int) -> tuple[str, ...]:
    if program == "ddp":
        return ddp.OPTIONS
    return (*fsdp.OPTIONS, *(fsdp.OF_FOUR if world == 4 else ()))


def units() -> list[str]:
    """`program / ranks / option`"""
    return [
        f"{program} / {world} / {option}"
        for program in PROGRAMS
        for world in (2, 4)
        for option in options_of(program, world)
    ]


def sweep(
    program: str,
    world: int,
    options: Sequence[str],
    stride: int = 1,
    offset: int = 0,
    limit: float = 6000.0,
) -> dict[str, Swept]:
    """By option; what ended with an error or hung is in all that were not done by then."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"options": list(options), "kinds": list(KINDS)}
        given |= {"stride": stride, "offset": offset, "into": f"{folder}/found"}
        given["at"] = [0, 1, 2] if world == 2 else [1]
        ended = ranks_of(f"{program}:sweep", world, limit, **given)
        found = {option: Swept() for option in options}
        for one in ended:
            done = Path(f"{folder}/found-{one.rank}")
            lines = done.read_text().splitlines() if done.exists() else []
            for told in map(json.loads, lines):
                swept = found[told["option"]]
                swept.wrong += [f"rank {one.rank}: {failure}" for failure in told["failures"]]
                swept.cases, swept.fired = told["cases"], told["fired"]
            if one.status != 0:
                hung = one.hung or "has not come for" in one.error or "Timed out" in one.error
                for option in options[len(lines) :][:1]:
                    where = found[option].hung if hung else found[option].wrong
                    where.append(f"rank {one.rank}: {one.error}\n{one.output[-3000:]}")
        return found


def table(found: dict[str, Swept], said: list[str]) -> str:
    """Lines by program, number of ranks and option."""
    lines = [
        "Steps of which allocations were failed, on one rank or several, once or again in the",
        "retry: the first, second and third step of each program. Equal: parameters, buffers and",
        "gradients to the last bit those of an undisturbed run of the same slices (to 1e-12 on",
        "four ranks, to 1e-3 where they are sent in 16 bits), and gradients to 1e-9 those of one",
        "process with the rows of all ranks; of one step in three also those of the step after it.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        *said,
        "",
        f"{'program':14s} {'ranks':>5s} {'option':14s} {'steps':>7s} {'faults':>7s} "
        f"{'wrong':>6s} {'hung':>5s}",
    ]
    total = Swept()
    for unit in units():
        one = found.get(unit, Swept())
        program, world, option = unit.split(" / ")
        lines.append(
            f"{program:14s} {world:>5s} {option:14s} {one.cases:7d} "
            f"{one.fired:7d} {len(one.wrong):6d} {len(one.hung):5d}"
        )
        total.add(one)
    lines.append(
        f"{'all':14s} {'':5s} {'':14s} {total.cases:7d} {total.fired:7d} "
        f"{len(total.wrong):6d} {len(total.hung):5d}"
    )
    return "\n".join(lines)


def _read(file: Path, stride: int) -> tuple[dict[str, Swept], set[str]]:
    """What was found so far, and the turns that are done."""
    found: dict[str, Swept] = {}
    turns = set()
    for told in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        for unit, one in told["found"].items():
            found.setdefault(unit, Swept()).add(Swept(**one))
        if told["stride"] == stride:
            turns.add(told["turn"])
    return found, turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--found", type=Path, default=ROOT / "build" / "ranks.jsonl")
    parser.add_argument("--say", action="append", default=[], help="a line for the table")
    parser.add_argument("--output", type=Path, help=f"usually {TABLE}")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    offsets = list(range(given.stride))
    random.Random(3).shuffle(offsets)
    given.found.parent.mkdir(exist_ok=True)
    for offset, program, world in itertools.product(offsets, PROGRAMS, (2, 4)):
        turn = f"{program} / {world} / {offset}"
        if time.monotonic() > until:
            break
        if turn in _read(given.found, given.stride)[1]:
            continue
        begin = time.monotonic()
        of = sweep(program, world, options_of(program, world), given.stride, offset)
        told = {"turn": turn, "stride": given.stride, "seconds": time.monotonic() - begin}
        told["found"] = {f"{program} / {world} / {o}": asdict(one) for o, one in of.items()}
        with given.found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        all_of = Swept()
        for one in of.values():
            all_of.add(one)
        print(f"{turn}: {all_of.said()}", flush=True)
        for text in [text for one in of.values() for text in (*one.wrong, *one.hung)]:
            print(text, flush=True)
    found, _ = _read(given.found, given.stride)
    if given.output is not None:
        given.output.write_text(table(found, given.say) + "\n")
    return 1 if any(one.wrong or one.hung for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
