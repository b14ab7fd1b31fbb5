"""A few random programs; `make prove` runs many (tests/prove/suites.py, "couplings")."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from .build import world
from .explore import Found, couples, explore
from .grammar import PLACES, Sentence, sentence
from .judge import Trouble, Verdict, judge

PROGRAMS = 30
MANY = 3000


@pytest.fixture(scope="module")
def found() -> Found:
    return explore(range(PROGRAMS))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("oomkit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_random_programs_are_exact_or_refused(found: Found) -> None:
    assert not found.wrong, "\n".join(found.wrong)


def test_random_programs_that_do_not_couple_are_not_refused(found: Found) -> None:
    assert not found.refused, "\n".join(found.refused)


def test_programs_of_both_kinds_are_drawn(found: Found) -> None:
    assert sum(found.counts.values()) == PROGRAMS
    coupled = sum(n for (kind, _), n in found.counts.items() if kind == "coupled")
    assert coupled > PROGRAMS / 4
    assert found.apart() > PROGRAMS / 6
    # Nearly all of those that are exact were split.
    assert found.counts["apart", "exact"] > found.apart() * 0.9


def test_the_same_seed_gives_the_same_program() -> None:
    assert sentence(7) == sentence(7)
    assert sentence(7) != sentence(8)
    assert len({str(sentence(seed)).partition(",")[2] for seed in range(100)}) > 95


@pytest.mark.parametrize("place", PLACES)
def test_everything_that_may_be_drawn_runs(place: str) -> None:
    """Undecorated, twice: a program that fails by itself would be loud for a wrong reason."""
    drawn = [sentence(seed) for seed in range(MANY)]
    for name in PLACES[place][1]:
        s = next(s for s in drawn if getattr(s, place) == name)
        torch.manual_seed(0)
        made = world(s)
        if s.form == "backward=True":
            made.step = partial(_backward, made.step)
        for call in range(2):
            made.drive(made.step, made.batch(call))


def _backward(step: object, *batch: object) -> torch.Tensor:
    loss = step(*batch)  # type: ignore[operator]
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


PLAIN_ONE = Sentence(
    seed=1, rows=6, container="arguments", model="perceptron", features="as they are",
    row_loss="cross entropy", reduction="mean", penalty="none", hook="none",
    backward="of the sum", post="none", update="sgd", zero="first", beside="none",
    returned="loss", form="whole", trouble="2", share=0.0, declared="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("apart", {}),
        ("apart", {"reduction": "advantages"}),
        ("apart", {"reduction": "sum", "declared": "sum"}),
        ("apart", {"features": "normalised rows", "post": "clips the norm"}),
        ("coupled", {"features": "flipped"}),
        ("coupled", {"reduction": "class weights"}),
        ("coupled", {"reduction": "largest"}),
        ("coupled", {"backward": "cut at the features"}),
        ("coupled", {"hook": "normalises an activation's gradient"}),
        ("coupled", {"returned": "perplexity"}),
        ("refused", {"update": "rate of the loss"}),
        ("raised", {"beside": "rows in a dict"}),
    ],
)
def test_whether_rows_couple_is_decided_by_running(kind: str, changed: dict[str, str]) -> None:
    assert couples(dataclasses.replace(PLAIN_ONE, **changed)) == kind  # type: ignore[arg-type]


def test_a_silent_difference_is_found() -> None:
    """Without a proof."""
    s = dataclasses.replace(PLAIN_ONE, features="flipped")
    verdict = judge(partial(world, s), Trouble("two", steps=2), s.rows, verify=False)
    assert verdict.kind == "silent" and verdict.split
    found = Found()
    found.add(sentence(5), "coupled", verdict)
    assert found.seeds == [5] and len(found.failures()) == 1


def test_refusals_without_need_are_failures_from_a_share_on() -> None:
    found = Found()
    for seed in range(399):
        found.add(sentence(seed), "apart", Verdict("exact", split=True))
    found.add(sentence(1), "coupled", Verdict("refused", "rightly"))
    found.add(sentence(399), "apart", Verdict("refused", "why"))
    found.add(sentence(400), "apart", Verdict("refused", "why"))
    assert found.failures() == []
    found.add(sentence(401), "apart", Verdict("raised", "why"))
    assert len(found.failures()) == 3
    assert found.told() == ["apart: 402: 399 exact, 1 raised, 2 refused", "coupled: 1: 1 refused"]
