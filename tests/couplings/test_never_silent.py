"""Never silently another result: a program that is split is exact, or refused before its update.

Each program is judged beside its undecorated twin in float64, with the decorator's defaults: an
error at allocations of its forward and backward, and micro-batches from the start.
"""

from __future__ import annotations

import itertools

import pytest
from helpers.sample import sampled, with_rest

from couplings import known_exact, known_graphs, known_losses, known_returned, known_states
from couplings.judge import LOUD, Trouble, judge
from couplings.known import KNOWN, TROUBLES, Known

FAMILIES = (known_losses, known_graphs, known_states, known_exact, known_returned)


CASES = list(itertools.product(KNOWN, TROUBLES))


@pytest.mark.parametrize(
    ("name", "trouble"),
    with_rest(sampled(CASES, len(CASES) // 6, "known", kind=lambda case: case[0]), CASES),
)
def test_exact_or_refused_before_the_update(name: str, trouble: str) -> None:
    program = KNOWN[name]
    assert program.make.__module__ in {family.__name__ for family in FAMILIES}
    for each in TROUBLES[trouble]:
        _check(program, each)


def _check(program: Known, trouble: Trouble) -> None:
    verdict = judge(program.world, trouble, program.rows)
    where = f"{program.name}, {trouble}"
    assert verdict.kind in LOUD, f"{where}: {verdict}"
    assert verdict.fired == (trouble.phase is not None), where
    if verdict.kind == "raised":
        assert program.world().raises, f"{where}: {verdict}"
    elif program.exact:
        assert verdict.kind == "exact", f"{where}: {verdict}"
        assert verdict.split, f"{where}: nothing was split"
