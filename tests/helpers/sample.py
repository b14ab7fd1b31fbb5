"""A fair part of a sweep: `make test` does that part, `make prove` the whole of it.

Which part is drawn from the seed and from the test's own id: tests of other parameters meet other
places, and another OOMKIT_TEST_SEED meets others again. What is printed repeats it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

WHOLE = os.environ.get("OOMKIT_TEST_WHOLE") == "1"
SEED = int(os.environ.get("OOMKIT_TEST_SEED", "20240607"))

LEFT_OUT = pytest.StashKey[list[str]]()
"""Of a session: names of tests that are not to run in it, as those with the mark `whole`."""

T = TypeVar("T")


def _running() -> str:
    """The id of the test that runs, wherever the folder is that it stands in."""
    node, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    file, _, name = node.partition("::")
    return f"{file.rpartition('/')[2]}::{name}"


def _draw(of: str) -> random.Random:
    return random.Random(f"{SEED} {_running()} {of}")


def _say(what: str) -> None:
    print(f"seed {SEED} (OOMKIT_TEST_SEED), {what}; all with OOMKIT_TEST_WHOLE=1")


def sampled(
    cases: Sequence[T],
    keep: int,
    of: str = "",
    *,
    kind: Callable[[T], object] = lambda case: None,
    always: Callable[[T], bool] = lambda case: False,
) -> list[T]:
    """One case of each of `keep` equal stretches; of each kind at least one, and each `always`.

    `of` tells apart what one test draws from, or lists of parameters, where no test runs."""
    if WHOLE or keep >= len(cases):
        return list(cases)
    draw = _draw(of)
    bounds = [len(cases) * i // keep for i in range(keep + 1)]
    chosen = {draw.randrange(a, b) for a, b in itertools.pairwise(bounds)}
    chosen |= {i for i, case in enumerate(cases) if always(case)}
    kinds: dict[object, list[int]] = {}
    for i, case in enumerate(cases):
        kinds.setdefault(kind(case), []).append(i)
    for having in kinds.values():
        if not chosen.intersection(having):
            chosen.add(draw.choice(having))
    _say(f"{len(chosen)} of {len(cases)} cases {of}".rstrip())
    return [cases[i] for i in sorted(chosen)]


def with_rest(chosen: Sequence[T], cases: Sequence[T]) -> list[Any]:
    """Parameters of a test: all cases, of which those that are not chosen have the mark `whole`.
    `make test` leaves them out, and they run where they are named, as by a mutant."""
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.whole)
        for case in cases
    ]


def stride(every: int, of: str = "") -> tuple[int, int]:
    """(first, step) of a sweep whose end is only known when it is reached; 1, 1 of the whole."""
    if WHOLE:
        return 1, 1
    first = _draw(of).randint(1, every)
    _say(f"case {first} and each {every}th from there {of}".rstrip())
    return first, every


def places(every: int, of: str = "") -> Iterator[int]:
    """The numbers of such a sweep; whoever sweeps leaves it at its end."""
    return itertools.count(*stride(every, of))
