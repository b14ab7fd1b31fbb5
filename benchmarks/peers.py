"""oomkit beside other ways to live with too little memory, on the same training.

Real packages, on real CPU training under byte budgets: the allocator raises a real
torch.OutOfMemoryError. README.md beside this file says what is measured and how to read
it. `make peers` makes the environment that this needs.

Usage: python benchmarks/peers.py [--quick] [--output benchmarks/results/peers]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peers import sweep, tables
from peers.trial import Contender
from peers.watch import reference
from peers.workloads import workloads

AGAIN = 1.5  # seconds that the first steps and the oracle's are repeated for

CONTENDERS = [
    "fixed",
    "plain",
    "with_accelerate",
    "with_toma",
    "with_torch_max_mem",
    "with_lightning",
    "composer_policy",
    "with_oomkit",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write FILE.txt and FILE.png")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--workloads", nargs="+", type=int, help="numbers, from 0")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    repetitions = 1 if options.quick else options.repetitions
    works = workloads(pairs=2 if options.quick else 8)
    if options.workloads is not None:
        works = [works[number] for number in options.workloads]
    elif options.quick:
        works = works[-2:]
    references = [reference(work) for work in works]
    contenders = [Contender(name, works, references) for name in {"fixed": 0, "plain": 0}]
    try:
        contenders += [
            Contender(name, works, references)
            for name in options.only
            if name not in ("fixed", "plain")
        ]
        for contender in contenders:
            if isinstance(contender.name, Exception):
                sys.exit(f"{contender.module}: {contender.name}; see requirements/peers.txt")
        text, picture = measure(contenders, works, repetitions, options.quick)
    finally:
        for contender in contenders:
            contender.close()
    text += f"\n\n{time.monotonic() - started:.0f} s in all"
    print(text)
    if options.output is not None:
        options.output.with_suffix(".txt").write_text(text + "\n")
        tables.draw(picture, options.output.with_suffix(".png"))


def measure(
    contenders: list[Contender], works: list[Any], repetitions: int, quick: bool
) -> tuple[str, Any]:
    order = random.Random(0)
    oracle, plain = contenders[:2]
    found = []
    for index, work in enumerate(works):
        base, peak = plain.ask("peak", index)
        budget = int(base + work.share * (peak - base))
        swept = sweep.sweep(oracle, index, work, budget, quick)
        print(f"{work.name}: k* = {swept.k}, budget {budget / 2**20:.1f} MiB", file=sys.stderr)
        found.append(tables.Found(work, base, peak, budget, swept, {}, {}))
    for turn in range(repetitions):
        for index, one in enumerate(found):
            for contender in order.sample(contenders, len(contenders)):
                if any(course.died for course in one.courses.get(contender.name, [])):
                    continue  # it would again, and some take their time
                follow(contender, oracle, index, one, order)
        print(f"repetition {turn + 1} of {repetitions} done", file=sys.stderr)
    ooms = 10 if quick else 100
    calls = {
        contender.name: [contender.ask("healthy", 0, 7) for _ in range(repetitions)]
        for contender in contenders
    }
    for contender in contenders[2:]:  # at once: nothing is timed any more
        contender.begin("leak", 0, ooms)
    left = {contender.name: contender.end("leak", 0) for contender in contenders[2:]}
    rest = {name: (calls[name], left.get(name)) for name in calls}
    return tables.report(found, rest, ooms), found


def follow(
    contender: Contender, oracle: Contender, index: int, one: tables.Found, order: random.Random
) -> None:
    """A whole run, and the first steps beside the oracle's, which run just before or after;
    again where that is short."""
    plan = one.swept.plan
    spent = 0.0
    while spent < AGAIN:
        for program in order.sample([0, 1], 2):
            changes = {"plan": plan} if program or contender is oracle else {}
            if program:
                theirs = oracle.ask("run", index, one.budget, changes, None, True)
            elif spent:
                mine = contender.ask("run", index, one.budget, changes, None, True)
            else:
                mine = contender.ask("run", index, one.budget, changes, plan)
                one.courses.setdefault(contender.name, []).append(mine)
        took, best = tables.first_steps(one, mine), tables.first_steps(one, theirs)
        if took is None or best is None:
            return
        one.begins.setdefault(contender.name, []).append(took / best)
        spent += took + best


if __name__ == "__main__":
    main()
