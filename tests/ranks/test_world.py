"""Ranks meet, vote, and miss each other."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import message_of
from helpers.own_process import run_program
from helpers.sample import sampled, with_rest

from .ends import HOW, one_end
from .launch import ranks_of, results_of, results_once, started

WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shared memory": (2, "Shared", {}),
    "shared memory of three": (3, "Shared", {}),
    "gloo": (2, "Gloo", {"gloo": True}),
    "gloo of three": (3, "Gloo", {"gloo": True}),
    "1 + 1": (2, "Nodes", {"nodes": [1, 1]}),
    "2 + 2": (4, "Nodes", {"nodes": [2, 2]}),
    "1 + 3": (4, "Nodes", {"nodes": [1, 3]}),
    "2 + 2 by gloo": (4, "Gloo", {"nodes": [2, 2], "gloo": True}),
}
"""Ranks, the way that their votes go, and what asks for it."""


SOME_WAYS = sampled([*WAYS], 2, "ways", always=lambda way: way in ("gloo", "2 + 2"))
EACH_WAY = with_rest(SOME_WAYS, [*WAYS])


def _of(way: str, turn: int) -> list[Any]:
    """What ranks of a way have found in one of the programs that they run one after the other."""
    world, _, given = WAYS[way]
    return [found[turn] for found in results_once("world:of_a_way", world, **given)]


@pytest.mark.parametrize("way", EACH_WAY)
def test_all_ranks_get_the_largest_word(way: str) -> None:
    for found in _of(way, 0):
        assert found == {"right": True, "way": WAYS[way][1], "left": [], "gathered": True}


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("victim", [0, -1])
def test_a_rank_that_gives_up_is_named_and_quoted(way: str, victim: int) -> None:
    found = _of(way, 3 if victim else 2)
    victim %= len(found)

    assert found.pop(victim) == "gave up"
    told = f"{victim}: rank {victim} cannot continue: ValueError: no such label"
    assert [message_of(text) for text in found] == [told] * len(found)


@pytest.mark.parametrize("way", EACH_WAY)
def test_votes_on_different_matters_are_an_error(way: str) -> None:
    for found in _of(way, 1):
        assert "must be called alike on all ranks" in found


@pytest.mark.parametrize("when", ["found", "told"])
def test_a_rank_that_comes_late_makes_what_its_first_rank_has_found_elsewhere(when: str) -> None:
    """Else that rank would have left the round in which it is told of the step."""
    assert results_of("world:comes_late", 3, nodes=[2, 1], when=when) == [[7]] * 3


MISSED = [
    (way, how, victim)
    for way in ("2 + 2", "1 + 3", "1 + 1", "2 + 2 by gloo", "gloo of three")
    for how in ("kill", "exit", "stop")
    for victim in range(WAYS[way][0])
]

MEMBER = ("2 + 2", "kill", 3)


SOME_MISSED = sampled(
    MISSED, 5, "missed", kind=lambda case: case[1], always=lambda case: case == MEMBER
)


@pytest.mark.parametrize(
    ("way", "how", "victim"), with_rest(sampled(SOME_MISSED, 2, "some missed"), SOME_MISSED)
)
def test_a_rank_that_does_not_come_is_named_on_all_machines(
    way: str, how: str, victim: int
) -> None:
    world, _, given = WAYS[way]
    given = {**given, "how": how, "victim": victim, "patience": 3.0 if how == "stop" else 60.0}
    with started("world:one_is_missed", world, **given) as (processes, finish):
        if how == "stop":
            finish(but=victim)  # the limits of the ranks themselves bound it
            os.kill(processes[victim], signal.SIGKILL)
        ended = finish()
    for one in ended:
        assert not one.hung
        if one.rank != victim:
            assert one.result["rank"] == victim, one.result
            assert f"rank {victim} " in one.result["text"]
            assert one.result["seconds"] < (30.0 if how == "stop" else 20.0)


def test_a_new_process_group_has_a_world_of_its_own() -> None:
    assert results_of("world:again_in_one_process", 2) == [[True, True]] * 2


def test_what_an_earlier_start_has_left_in_the_store_is_not_read() -> None:
    assert results_of("world:started_again", 2) == [[True, True, True]] * 2


def test_a_stale_segment_is_not_read() -> None:
    assert results_of("world:leave_a_segment", 2) == ["True 1"] * 2


@pytest.mark.whole
def test_memory_that_a_rank_does_not_come_to_is_not_left_behind() -> None:
    first, _ = ranks_of("world:one_does_not_map", 2)
    assert first.result == [False]


VERSIONS = ["oomkit", "protocol", "torch"]


@pytest.mark.parametrize("of", with_rest(sampled(VERSIONS, 1, "versions"), VERSIONS))
def test_another_version_is_an_error_on_all(of: str) -> None:
    for ended in ranks_of("world:another_version", 2, of=of):
        assert ended.status == 1
        assert f"expected the same {of} on all ranks" in ended.error


def test_another_job_is_an_error_on_all() -> None:
    for ended in ranks_of("world:another_job", 2):
        assert ended.status == 1
        assert "expected the same job on all ranks" in ended.error


def test_another_world_with_the_same_store_is_an_error_on_all() -> None:
    first, second, other = ranks_of("world:another_world", 3)
    said = "oomkit expected the same world on all ranks: rank 1 has 2, rank 0 has 1"
    assert message_of(first.error) == f"RankError: rank 1 cannot continue: {said}"
    assert message_of(second.error) == f"RankError: {said}"
    assert other.error == ""


@pytest.mark.whole
def test_a_rank_without_oomkit_is_an_error() -> None:
    first, second = ranks_of("world:without_oomkit", 2, patience=3.0)
    assert first.status == second.status == 1
    assert "first decorated call of rank(s) [1] of 2" in first.error
    assert not second.hung


ENDS = list(
    itertools.product(
        ("kill", "exit", "raise", "oom"), ("forward", "update"), (False, True), (False, True)
    )
)


SOME_ENDS = sampled(ENDS, 6, "ends", kind=lambda case: case[0])
FEW_ENDS = sampled(SOME_ENDS, 3, "few ends", always=lambda case: case[0] == "kill")


@pytest.mark.parametrize(("how", "where", "cautious", "gloo"), with_rest(FEW_ENDS, SOME_ENDS))
def test_a_rank_that_ends_is_missed(how: str, where: str, cautious: bool, gloo: bool) -> None:
    ended = ranks_of("world:one_goes", 2, how=how, where=where, cautious=cautious, gloo=gloo)

    assert [one.hung for one in ended] == [False, False]
    assert ended[0].status == 1
    assert "rank 1" in ended[0].error or (gloo and how in ("kill", "exit"))
    if how == "raise":
        assert "a label that there is not" in ended[0].error


ANYWHERE = sampled([*itertools.product(HOW, (False, True))], 2)


@pytest.mark.parametrize(
    ("how", "sharded"), with_rest(sampled(ANYWHERE, 1, "some anywhere"), ANYWHERE)
)
def test_a_rank_that_ends_anywhere_is_named(how: str, sharded: bool) -> None:
    assert one_end(how, sharded, seed=7).wrong == []


IN_A_STEP = list(itertools.product(([1, 1], [2, 2], [1, 3]), ("kill", "raise")))


@pytest.mark.parametrize(
    ("nodes", "how"), with_rest(sampled(IN_A_STEP, 1, "in a step"), IN_A_STEP), ids=str
)
def test_a_rank_that_ends_in_a_step_is_named_on_all_machines(nodes: list[int], how: str) -> None:
    given = {"how": how, "where": "update", "cautious": True, "nodes": nodes}

    *others, last = ranks_of("world:one_goes", sum(nodes), **given)

    for one in others:
        assert one.status == 1 and not one.hung
        assert f"rank {last.rank} " in one.error, one.error
        if how == "raise":
            assert "a label that there is not" in one.error


BETWEEN = ["shared memory", "gloo", "1 + 1", "2 + 2"]


@pytest.mark.parametrize("way", with_rest(sampled(BETWEEN, 1, "between"), BETWEEN))
def test_an_error_between_two_steps_is_told(way: str) -> None:
    world, _, given = WAYS[way]
    *others, last = ranks_of("world:one_fails_between", world, **given)
    assert last.error.startswith("ValueError: ")
    for one in others:
        assert f"rank {last.rank} (process" in one.error and not one.hung
        assert "has ended after ValueError: a label that there is not" in one.error


AT_THE_END = list(itertools.product((True, False), ("shared memory", "gloo", "1 + 1")))


@pytest.mark.parametrize(
    ("fails", "way"),
    with_rest(sampled(AT_THE_END, 2, "at the end", kind=lambda case: case[0]), AT_THE_END),
)
def test_an_error_in_the_last_update_is_told_at_the_end(fails: bool, way: str) -> None:
    world, _, given = WAYS[way]
    first, last = ranks_of("world:one_fails_in_its_last_update", world, fails=fails, **given)
    assert last.error.startswith("PartialUpdate: ") == fails and first.status == 0
    told = "rank 1 has failed in the last step: PartialUpdate: half of it is done"
    assert (told in first.output) == fails and ("failed" in first.output) == fails
    assert "has failed" not in last.output


def test_a_rank_that_ends_is_no_reason_for_other_micro_batches() -> None:
    first, _ = ranks_of("world:one_dies_in_the_next_attempt", 2)
    assert first.error.startswith("RuntimeError: ") and not first.hung
    assert "rank 1 (process" in first.error and "is dead" in first.error


def test_a_rank_that_leaves_early_is_missed() -> None:
    first, second = ranks_of("world:one_leaves", 2)
    assert second.status == 0
    assert first.status == 1 and not first.hung


@pytest.mark.whole
def test_a_rank_that_is_stopped_is_told_of() -> None:
    given = {"how": "stop", "where": "update", "cautious": True, "patience": 4.0}
    with started("world:one_goes", 2, **given) as (processes, finish):
        finish(but=1)  # the limit of the rank itself bounds it
        os.kill(processes[1], signal.SIGKILL)
        ended = finish()
    assert not ended[0].hung
    assert "is stopped" in ended[0].error and "rank 1" in ended[0].error


def test_classes_of_groups_and_works_in_python_stay_as_they_are() -> None:
    """Methods of torch look for one in Python to call, which what oomkit puts there is not."""
    program = """
import datetime
import types
import torch
import torch.distributed as dist
from oomkit._ranks import world

class Group(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)

class Work(dist.Work):
    def wait(self, timeout=None):
        return super().wait(datetime.timedelta(milliseconds=1))

def said(call):
    try:
        return str(call())
    except Exception as error:
        return str(error).splitlines()[0]

watched = False
if watched:
    world.watch()
    wait = lambda work, plain, limit: plain(work, limit)
    world._present = types.SimpleNamespace(present=True, wait=wait)
tensor = torch.ones(1)
print(said(Group().barrier), said(lambda: Group().broadcast([tensor])), said(Work().wait))
"""
    done = [
        run_program(text)
        for text in (program, program.replace("watched = False", "watched = True"))
    ]
    assert [each.returncode for each in done] == [0, 0], done[-1].stderr
    plain, watched = (each.stdout for each in done)
    assert watched == plain
    assert "No backend" in plain


def test_a_program_that_ends_at_once_after_a_collective_does_not_abort(
    tmp_path: Path,
) -> None:
    # A thread of gloo frees what it was given with Python's lock, which the main thread keeps here.
    program = f"""
import os, sys
import torch, torch.distributed as dist
import oomkit
from oomkit._ranks import world

torch.set_num_threads(1)
rank = 0 if os.fork() else 1
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
world.meet()
sys.setswitchinterval(1000)
if rank == 1:
    for _ in range(2 * 10**6):
        pass
for _ in range(8):
    dist.all_reduce(torch.ones(3), async_op=rank == 0)
if rank == 1:
    os._exit(0)
for _ in range(10**7):
    pass
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr
