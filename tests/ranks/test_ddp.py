"""Faults on some ranks of a step over DistributedDataParallel: gradients as if there were none."""

from __future__ import annotations

import pytest
from helpers.sample import WHOLE, sampled

from .launch import results_of
from .programs_ddp import OPTIONS

KINDS = ("first", "last", "all", "again", "pair")
ALWAYS = ("plain", "norm", "accumulation", "fp16")
SOME = sampled([*OPTIONS], 4, "options", always=lambda option: option in ALWAYS)


def _steps(option: str) -> list[int]:
    """Which step fails: the first, before buckets are rebuilt, and those after it. PowerSGD has
    state from the third step on, which cannot be taken back."""
    return [0, 1] if option == "powersgd" else [0, 1, 2]


def _sweep(option: str, world: int, **given: object) -> None:
    found = results_of("programs_ddp:sweep", world, 3000.0, option=option, **given)
    for one in found:
        assert one["cases"] == found[0]["cases"] > 0
        assert one["fired"] > 0
        assert one["failures"] == []


@pytest.mark.parametrize("option", OPTIONS if WHOLE else SOME)
def test_faults_leave_no_trace(option: str) -> None:
    if WHOLE:
        _sweep(option, 2, kinds=KINDS, at=_steps(option))
    else:
        _sweep(option, 2, kinds=["last", "again"], at=_steps(option)[-1:], stride=5, offset=2)


@pytest.mark.parametrize("option", OPTIONS if WHOLE else ["plain"])
def test_four_ranks(option: str) -> None:
    if WHOLE:
        _sweep(option, 4, kinds=KINDS, at=[1], stride=2)
    else:
        _sweep(option, 4, kinds=["pair"], at=[1], stride=7)


@pytest.mark.parametrize("option", ["plain", "norm"])
def test_where_no_memory_is_shared(option: str) -> None:
    _sweep(option, 2, kinds=["last"], at=[1], stride=1 if WHOLE else 7, gloo=True)
