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


def fair_part(cases: Sequence[dict[str, int]], keep: int, of: str) -> set[int]:
    """Numbers of `keep` cases (parameter: number of its value), drawn so that they have as many
    values of each parameter as they can."""
    order = list(range(len(cases)))
    random.Random(f"{SEED} {of}").shuffle(order)
    met: set[tuple[str, int]] = set()
    new: list[int] = []
    for i in order:
        if not met.issuperset(cases[i].items()):
            met.update(cases[i].items())
            new.append(i)
    return set([*new, *(i for i in order if i not in new)][:keep])


def mark_rest(items: Sequence[pytest.Item]) -> None:
    """Of tests with the mark `sample` all cases but a fair part get the mark `whole`, as those of
    with_rest()."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sample") and isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        indices = [dict(case.callspec.indices) for case in cases]
        file, _, function = name.partition("::")
        chosen = fair_part(indices, mark.args[0], f"{file.rpartition('/')[2]}::{function}")
        for i, case in enumerate(cases):
            if not WHOLE and i not in chosen:
                case.add_marker(pytest.mark.whole)


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
