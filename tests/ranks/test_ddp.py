"""Faults on some ranks of a step: gradients as if there were none.

All options at all places are units of `make prove` (ranks/sweeps.py): the first tests are samples
of them. What is swept here alone stands behind them.
"""

from __future__ import annotations

import pytest
from helpers.sample import WHOLE, sampled, with_rest

from .launch import results_of
from .programs import ddp, fsdp

ALWAYS = ("plain", "norm", "accumulation", "fp16")
SOME = sampled([*ddp.OPTIONS], 4, "options", always=lambda option: option in ALWAYS)
SHARDED = sampled([*fsdp.OPTIONS], 2, "sharded", always=lambda option: option in ("proof", "parts"))


def _sweep(program: str, world: int, options: object, **given: object) -> None:
    told = results_of(f"{program}:sweep", world, 6000.0, options=options, **given)
    for found in told:
        for option, one in found.items():
            assert one["cases"] == told[0][option]["cases"] > 0
            assert one["fired"] > 0
            assert one["failures"] == [], option


def test_faults_leave_no_trace() -> None:
    _sweep("ddp", 2, SOME, kinds=["last", "again"], at=[2], stride=58, offset=2)


def test_each_place_of_a_plain_step() -> None:
    _sweep("ddp", 2, ["plain"], kinds=["last"], at=[1])


@pytest.mark.whole
def test_a_hook_with_a_state_that_compresses() -> None:
    """In its third step; before, it sends gradients as they are."""
    _sweep("ddp", 2, ["powersgd"], kinds=["last", "again"], at=[1, 2], stride=9)


def test_faults_leave_no_trace_sharded() -> None:
    _sweep("fsdp", 2, SHARDED, kinds=["last", "again"], at=[1], stride=400, offset=2)


def test_four_ranks() -> None:
    _sweep("ddp", 4, ["plain"], kinds=["pair"], at=[1], stride=13)


def test_four_ranks_sharded() -> None:
    _sweep("fsdp", 4, ["hsdp"], kinds=["pair"], at=[1], stride=40)


APART: list[tuple[int, dict[str, object]]] = [
    (2, {"gloo": True}),
    (2, {"nodes": [1, 1]}),
    (4, {"nodes": [2, 2]}),
    (4, {"nodes": [1, 3]}),
]


@pytest.mark.parametrize(
    ("world", "given"), with_rest(APART[:1], APART), ids=["gloo", "1 + 1", "2 + 2", "1 + 3"]
)
def test_where_not_all_ranks_share_memory(world: int, given: dict[str, object]) -> None:
    stride = 1 if WHOLE else 9 if world == 2 else 30
    _sweep("ddp", world, ["plain", "norm"], kinds=["last"], at=[1], stride=stride, **given)


FEW = ((["plain"], [1, 1]), (["parts"], [2, 2]), (["hsdp"], [1, 3]))


@pytest.mark.parametrize(
    ("options", "world"),
    [([o], 2) for o in fsdp.OPTIONS] + [([o], 4) for o in fsdp.OF_FOUR]
    if WHOLE
    else [(["parts"], 3)],
    ids=str,
)
def test_where_no_ranks_share_memory_sharded(options: list[str], world: int) -> None:
    stride = 4 * world if WHOLE else 30 * world
    given = {"kinds": ["last", "pair"], "at": [1], "stride": stride, "gloo": True}
    _sweep("fsdp", world, options, **given)


@pytest.mark.parametrize(
    ("options", "nodes"),
    [([o], nodes) for o in fsdp.OPTIONS for nodes in ([1, 1], [2, 2])]
    if WHOLE
    else with_rest([(["plain"], [1, 1])], [*FEW]),
    ids=str,
)
def test_ranks_of_several_machines_sharded(options: list[str], nodes: list[int]) -> None:
    stride = 4 * sum(nodes) if WHOLE else 30 * sum(nodes)
    given = {"kinds": ["last", "pair"], "at": [1], "stride": stride, "nodes": nodes}
    _sweep("fsdp", sum(nodes), options, **given)
