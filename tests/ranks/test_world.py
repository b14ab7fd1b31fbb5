"""Ranks meet, vote, and miss each other."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from helpers.messages import message_of
from helpers.sample import sampled

from .ends import HOW, one_end
from .launch import ranks_of, results_of, started

BOTH = pytest.mark.parametrize("gloo", [False, True], ids=["shared memory", "gloo"])


@BOTH
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_get_the_largest_word(world: int, gloo: bool) -> None:
    for found in results_of("programs_world:votes", world, gloo=gloo):
        assert found == {"right": True, "shared": not gloo, "left": []}


@BOTH
def test_a_rank_that_gives_up_is_named_and_quoted(gloo: bool) -> None:
    found = results_of("programs_world:fatal", 2, gloo=gloo)

    assert [message_of(text) for text in found] == [
        "1: rank 1 cannot continue: ValueError: no such label",
        "gave up",
    ]


@BOTH
def test_votes_on_different_matters_are_an_error(gloo: bool) -> None:
    for found in results_of("programs_world:different_places", 2, gloo=gloo):
        assert "must be called alike on all ranks" in found


def test_a_new_process_group_has_a_world_of_its_own() -> None:
    assert results_of("programs_world:again_in_one_process", 2) == [[True, True]] * 2


def test_what_an_earlier_start_has_left_in_the_store_is_not_read() -> None:
    assert results_of("programs_world:started_again", 2) == [[True, True, True]] * 2


def test_a_stale_segment_is_not_read() -> None:
    assert results_of("programs_world:leave_a_segment", 2) == ["True 1"] * 2


def test_another_version_is_an_error_on_all() -> None:
    for ended in ranks_of("programs_world:another_version", 2):
        assert ended.status == 1
        assert "expected the same oomkit on all ranks" in ended.error


def test_a_rank_without_oomkit_is_an_error() -> None:
    first, second = ranks_of("programs_world:without_oomkit", 2, patience=3.0)
    assert first.status == second.status == 1
    assert "first decorated call of rank(s) [1] of 2" in first.error
    assert not second.hung


ENDS = list(
    itertools.product(
        ("kill", "exit", "raise", "oom"), ("forward", "update"), (False, True), (False, True)
    )
)


@pytest.mark.parametrize(
    ("how", "where", "cautious", "gloo"),
    sampled(ENDS, 6, "ends", kind=lambda case: case[0]),
)
def test_a_rank_that_ends_is_missed(how: str, where: str, cautious: bool, gloo: bool) -> None:
    ended = ranks_of(
        "programs_world:one_goes", 2, how=how, where=where, cautious=cautious, gloo=gloo
    )

    assert [one.hung for one in ended] == [False, False]
    assert ended[0].status == 1
    assert "rank 1" in ended[0].error or (gloo and how in ("kill", "exit"))
    if how == "raise":
        assert "a label that there is not" in ended[0].error


@pytest.mark.parametrize(("how", "sharded"), sampled([*itertools.product(HOW, (False, True))], 2))
def test_a_rank_that_ends_anywhere_is_named(how: str, sharded: bool) -> None:
    assert one_end(how, sharded, seed=7).wrong == []


def test_a_rank_that_leaves_early_is_missed() -> None:
    first, second = ranks_of("programs_world:one_leaves", 2)
    assert second.status == 0
    assert first.status == 1 and not first.hung


def test_a_rank_that_is_stopped_is_told_of() -> None:
    given = {"how": "stop", "where": "update", "cautious": True, "patience": 4.0}
    with started("programs_world:one_goes", 2, **given) as (processes, folder, finish):
        result = folder / "result-0"
        while not result.exists():  # the limit of the rank itself bounds it
            os.sched_yield()
        os.kill(processes[1], signal.SIGKILL)
        ended = finish()
    assert not ended[0].hung
    assert "is stopped" in ended[0].error and "rank 1" in ended[0].error
