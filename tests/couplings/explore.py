"""Many random programs: what became of each, and whether it couples the rows of its batch.

Whether a program couples is decided by running it: split without a proof (`verify=False`) it
is compared with the whole batch, over several slicings. Exact in all of them: it does not couple,
and a refusal was not needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from helpers.seeds import seed_all

from .build import world
from .grammar import Sentence, sentence
from .judge import SEED, Trouble, Verdict, World, judge

MOST_REFUSED = 0.005
"""The share of programs that do not couple and may be refused all the same."""


def _made(s: Sentence) -> World:
    seed_all(SEED)
    return world(s)


def trouble_of(s: Sentence) -> Trouble:
    if s.trouble in ("2", "3", "rows"):
        steps = 0 if s.trouble == "rows" else min(int(s.trouble), s.rows)
        return Trouble(f"{s.trouble} micro-batches", steps=steps)
    phase, _, first = s.trouble.partition(", ")
    return Trouble(s.trouble, phase, 0 if first else 1, s.share)


def slicings(n: int) -> list[tuple[int, ...]]:
    found = [(n - n // 2, n // 2), (1,) * n]
    if n > 2:
        found += [(n - 1, 1), (1, n - 1)]
    if n > 4:
        found.append((2, n - 4, 2))
    return found


def couples(s: Sentence) -> str:
    """ "coupled", "apart", or why neither: split without a proof it is "refused" or "raised"."""
    for lengths in slicings(s.rows):
        found = judge(partial(_made, s), Trouble("slices", slices=lengths), verify=False)
        if found.kind == "silent":
            return "coupled"
        if found.kind != "exact":
            return "raised" if found.kind == "raised" else "refused"
    # A bound on the mean couples, whether these rows meet it or not.
    return "coupled" if s.reduction == "bounded" else "apart"


@dataclass
class Found:
    """Of many programs."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By what the program is and what became of it."""
    seeds: list[int] = field(default_factory=list)
    """Of the programs that had another result, and those that were refused too late."""
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Those that do not couple."""

    def add(self, s: Sentence, kind: str, verdict: Verdict) -> None:
        became = verdict.kind
        if became == "exact" and not verdict.split:
            became = "whole"
        elif became == "named":
            became = "refused"
        self.counts[kind, became] += 1
        if became in ("silent", "late", "changed"):
            self.seeds.append(s.seed)
            self.wrong.append(f"seed {s.seed}, {kind}: {verdict} ({s})")
        elif kind == "apart" and became in ("refused", "raised"):
            self.refused.append(f"seed {s.seed}: {verdict} ({s})")

    def told(self) -> list[str]:
        """A line for each kind of program."""
        kinds = sorted({kind for kind, _ in self.counts})
        lines = []
        for kind in kinds:
            found = {b: n for (k, b), n in self.counts.items() if k == kind}
            each = ", ".join(f"{n} {became}" for became, n in sorted(found.items()))
            lines.append(f"{kind}: {sum(found.values())}: {each}")
        return lines

    def apart(self) -> int:
        return sum(n for (kind, _), n in self.counts.items() if kind == "apart")

    def failures(self) -> list[str]:
        """What must not be; refusals without need up to a share of them are no failure."""
        many = len(self.refused) > MOST_REFUSED * self.apart()
        return self.wrong + (self.refused if many else [])


def become(s: Sentence) -> Verdict:
    return judge(partial(_made, s), trouble_of(s), s.rows)


def explore(seeds: Iterable[int]) -> Found:
    found = Found()
    logger = logging.getLogger("oomkit")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)  # the number of allocations depends on it
    try:
        for seed in seeds:
            s = sentence(seed)
            found.add(s, couples(s), become(s))
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
    return found
