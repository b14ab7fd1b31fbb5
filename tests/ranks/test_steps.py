"""Steps of other shapes, and what is refused with a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.messages import message_of
from helpers.sample import WHOLE, sampled, with_rest

import oomkit

from .launch import ranks_of, results_of, results_once
from .programs import shards

REFUSED = {
    "sparse": "EmbeddingBag(sparse=True) has sparse gradients",
    "static, built-in hook": "static_graph=True, with a communication hook that is not a function",
    "static, joined": "inside join() the model's graph is static: leave static_graph=True out",
    "joined second": "inside Join() something else stands before the model",
    "two joined": "inside join() its step uses more than one model",
    "sync batch norm": "SyncBatchNorm communicates inside the forward",
    "tensor parallel": "spread over ranks without fully_shard(), as in tensor parallelism",
    "deepspeed": "ranks's DeepSpeedEngine is not supported",
    "megatron": "ranks's MegatronModule is not supported",
    "fsdp1": "torch's FullyShardedDataParallel is not supported",
    "subgroup": "its process group is not that of all ranks",
    "delayed": "its reduction is delayed",
    "buffer hook": "it has a hook for its buffers",
    "fsdp, kept": "set_reshard_after_backward(False)",
    "fsdp, replicas": "set_requires_all_reduce(False)",
    "fsdp, open": "set_is_last_backward(False)",
    "another torch": f"of torch {torch.__version__} has no Reducer.a_name_of_another_torch",
    "static, another torch": "has no Reducer.a_name_of_static",
    "joined, another torch": f"join() of torch {torch.__version__} has no Join.a_name_of_joined",
    "fsdp, another torch": f"torch {torch.__version__} has no FSDPParam.a_name_of_fsdp",
    "fsdp, hook": "it has a hook for its reduction",
    "updates": "a parameter has a post-accumulate-grad hook, as with an optimizer in the backward",
    "fsdp, updates": "a parameter has a post-accumulate-grad hook",
    "fsdp, sync batch norm": "SyncBatchNorm communicates inside the forward",
}
OWN = [(fails, phase, nth) for fails in (0, 1) for phase, nth in (("forward", 1), ("backward", 2))]
LEAVING: list[Any] = [
    [[3, 5], {}],
    [[5, 2], {"0 2": ["backward", 2], "0 4": ["forward", 2]}],
    [[3, 5], {"1 3": ["backward", 1], "0 1": ["forward", 2]}],
    [[2, 4], {"0 1": ["backward", 2], "1 1": ["backward", 2], "1 3": ["backward", 3]}],
    *(
        [[1, 3], {f"1 {index}": [phase, nth]}]
        for index, phase, nth in sampled(
            list(itertools.product((0, 1, 2), ("forward", "backward"), range(1, 5))), 4, "leaving"
        )
    ),
]
"""Steps by rank, and what fails: places by rank and step."""
UNEVEN = [
    "plain",
    "unused",
    "norm",
    "accumulation",
    "proof",
    "fp16",
    "zero",
    "views",
    *(
        kind + also
        for kind in ("no_sync", "flag", "within", "idle", "mixed", "returned")
        for also in ("", ", norm")
    ),
]
"""What steps are like: within each `no_sync()`, its flag, two forwards, or none; some that are not
decorated, or only the loss that is returned."""
HEALTHY = {kind for kind in UNEVEN if any(a in kind for a in ("norm", "returned", "mixed"))}
"""Those that nothing fails in: they cannot be split, or are not decorated."""


def leaving(kind: str) -> list[Any]:
    if kind in HEALTHY:
        return [LEAVING[0], [[5, 2], {}], [[4, 3], {}]]
    return LEAVING if kind == "plain" else [LEAVING[0], *sampled(LEAVING[1:], 2, kind)]


NAMED = [("no_sync, norm", True), ("idle, norm", True)]
"""What mutants name."""
JOINED: dict[str, dict[str, Any]] = {
    f"{kind} {divide}": {
        "kind": kind,
        "divide": divide,
        "cases": leaving(kind),
    }
    for kind, divide in sampled(
        list(itertools.product(UNEVEN, (True, False))),
        4,
        "joined",
        always=lambda case: case[0] == "plain" or case in NAMED,
    )
}
SOME_JOINED = [*JOINED] if WHOLE else ["plain True", "idle, norm True"]
WAITS = ("at once", "later", "later, with a limit")
KINDS = ("ddp", "fsdp")
WAITING = list(itertools.product(WAITS, KINDS))
SOME_WAITING = sampled(WAITING, 1, "waiting")
ROWS = list(itertools.product((1, 3), KINDS))  # the last one's are known when others
SOME_ROWS = sampled(ROWS, 2, "rows", kind=lambda case: case[1])  # have reduced
SOME_USED = [*shards.USED] if WHOLE else ["last", "by_rank"]  # what is told in more than a step
GATHERED = list(itertools.product(shards.GATHERED, (None, False)))
SOME_GATHERED = [("evaluated", False), ("teacher", None)]
GATHERED_FAULTS = {
    kind: sampled(shards.GATHERED_FAULTS, 5, kind, kind=lambda case: case[0])
    for kind in shards.GATHERED
}
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "split": ("steps:split_from_the_start", {}),
    **{
        f"rows {at} {kind} {c}": (
            "steps:later_rows",
            {"at": at, "updates": at > 1, "sharded": kind == "fsdp", "coupled": c},
        )
        for (at, kind), c in itertools.product(ROWS, (False, True))
    },
    "hidden": ("steps:hidden_optimizer", {}),
    "without memory": ("steps:out_of_ways", {}),
    "after": ("steps:after_the_update", {}),
    "caught": ("steps:caught", {"sharded": False}),
    "caught, sharded": ("steps:caught", {"sharded": True}),
    "clipped": ("steps:clipped", {}),
    "cleared": ("steps:cleared", {}),
    "in part": ("steps:synchronised_in_part", {}),
    "at entry": ("steps:fails_at_entry", {}),
    "said": ("steps:said_of_a_split", {}),
    "after its flag": ("steps:fails_after_its_flag", {}),
    "first gather": ("steps:first_gather", {}),
    "accumulated": ("steps:accumulated", {}),
    **{f"many, {used}": ("shards:many", {"used": used}) for used in shards.USED},
    **{
        f"gathered, {kind} {verify}": (
            "shards:gathered",
            {"kind": kind, "verify": verify, "faults": GATHERED_FAULTS[kind]},
        )
        for kind, verify in GATHERED
    },
    "averaged": ("shards:averaged", {}),
    "overflown": ("scaled:overflown", {}),
    "compiled": ("scaled:compiled", {}),
    "reported": ("reports:reported", {}),
    "evaluated": ("evaluations:evaluated", {}),
    "mapped": ("evaluations:mapped", {}),
    "broadcast": ("evaluations:broadcast", {}),
    "without collectives": ("evaluations:forwards_without_collectives", {}),
    "refused": ("steps:refused", {"how": list(REFUSED)}),
    **{f"joined {name}": ("joins:joined", given) for name, given in JOINED.items()},
    "left": ("joins:left", {}),
    "not agreed on": ("joins:not_agreed_on", {}),
    "static": ("steps:static_graph", {}),
    "static that changes": ("steps:static_that_changes", {}),
    "pipelined": ("steps:pipelined", {}),
    **{
        f"waiting {how} {kind}": ("steps:waiting", {"waits": how, "sharded": kind == "fsdp"})
        for how, kind in WAITING
    },
    **{
        f"own {f} {p}": ("steps:own_collective", {"fails": f, "phase": p, "nth": n})
        for f, p, n in OWN
    },
}


REST = {
    *(f"joined {name}" for name in JOINED.keys() - set(SOME_JOINED)),
    *(f"waiting {how} {kind}" for how, kind in WAITING if (how, kind) not in SOME_WAITING),
    *(
        f"rows {at} {kind} {c}"
        for (at, kind), c in itertools.product(ROWS, (False, True))
        if (at, kind) not in SOME_ROWS
    ),
    *(f"many, {used}" for used in shards.USED if used not in SOME_USED),
    *(
        f"gathered, {kind} {verify}"
        for kind, verify in GATHERED
        if (kind, verify) not in SOME_GATHERED
    ),
}
"""What `make test` leaves out."""


def _of(name: str) -> list[Any]:
    """All of them run in one group, or all of the rest: each goes on where another one has ended
    with an error."""
    programs = {n: given for n, given in TOGETHER.items() if (n in REST) == (name in REST)}
    return [one[name] for one in results_once("common:together", 2, 300.0, programs=programs)]


def test_each_rank_may_split_as_it_needs() -> None:
    assert _of("split") == [[True, 2], [True, 4]]


@pytest.mark.parametrize(("at", "kind"), with_rest(SOME_ROWS, ROWS))
def test_what_only_later_rows_of_one_rank_have_is_proven(at: int, kind: str) -> None:
    assert _of(f"rows {at} {kind} False") == [["nothing", True]] * 2
    other, one = _of(f"rows {at} {kind} True")
    assert one[0].startswith("SplitError: auto_batch cannot split")
    assert other[0].startswith("RankError: ")


def test_a_loss_that_is_returned_is_torchs_affair() -> None:
    for one in ranks_of("steps:returned_loss", 2):
        right, said = one.result
        assert right == [True] * 3
        assert "call backward() inside the step" in said


def test_the_backward_of_a_step_that_synchronises_is_the_same_in_micro_batches() -> None:
    for found in _of("in part"):
        assert max(found) < 1e-12


def test_what_the_wrapper_notes_in_itself_is_no_effect_of_the_step() -> None:
    assert _of("said") == [[], []]


def test_an_error_after_a_step_has_set_its_mode_reaches_all() -> None:
    (first, after), (own, after_own) = _of("after its flag")
    error = "ValueError: a label that there is not"
    assert own == error
    assert message_of(first) == f"RankError: rank 1 cannot continue: {error}"
    assert after == after_own == "nothing"


def test_a_call_that_fails_before_it_has_begun_leaves_its_models_as_they_were() -> None:
    for first, broadcasts, second, also in _of("at entry"):
        assert all("No support for sparse tensors" in said for said in (first, second))
        assert broadcasts and also


@pytest.mark.parametrize(("fails", "phase"), [(f, p) for f, p, _ in OWN])
def test_a_collective_of_the_steps_own_is_made_once(fails: int, phase: str) -> None:
    for right, said in _of(f"own {fails} {phase}"):
        assert right
        assert "RankError" in said and f"rank {fails} cannot continue" in said
        assert "all_reduce() of the step's own" in said or "torch.distributed.all_reduce" in said


@pytest.mark.parametrize("by_method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize("at", ["begin", "before", "after"])
def test_nobody_waits_for_a_step_with_a_collective_that_cannot_begin_again(
    at: str, by_method: bool
) -> None:
    name = "ProcessGroup.allreduce()" if by_method else "all_reduce()"
    for said in results_of("told:stays", 2, at=at, by_method=by_method):
        assert said.startswith("RankError: rank 1 cannot continue: its step calls") or (
            at == "begin" and f"it has to begin again after {name}" in said
        )


def test_buckets_are_made_anew_in_the_order_of_a_backward() -> None:
    """Else their reduction hardly overlaps with it, for as long as the model lives."""
    for bare, decorated in results_of("steps:buckets", 2):
        assert decorated == bare
        assert bare.startswith("11 10 9") and "," in bare


def test_replicas_of_whole_shards_begin_again() -> None:
    for rank, (found, errors) in enumerate(results_of("replicas:of_whole_shards", 2)):
        assert found == ["nothing", True] * 4
        assert errors == (4 if rank == 1 else 0)


def test_an_error_after_an_update_is_nobodys_affair() -> None:
    for rank, (bare, decorated) in enumerate(results_of("told:goes_on", 2)):
        assert decorated == bare
        said = "ValueError: a loss that nobody likes" if rank == 1 else "nothing"
        assert bare[0] == ["nothing", said, "nothing", "nothing", "nothing"]


@pytest.mark.parametrize(("how", "kind"), with_rest(SOME_WAITING, WAITING))
def test_an_error_reaches_a_rank_in_a_collective_of_the_steps_own(how: str, kind: str) -> None:
    """The rank that has it goes on, and closes no connection."""
    (first, waited), (healthy, own) = _of(f"waiting {how} {kind}")
    assert first == healthy == "nothing"
    assert own.startswith("TypeError: ")
    assert message_of(waited).startswith("RankError: rank 1 cannot continue: TypeError: ")


def test_a_collective_after_the_update_is_nobodys_affair() -> None:
    assert _of("after") == [[2], [1]]


def test_an_optimizer_that_was_not_found_waits_too() -> None:
    """The rank that failed cannot split the step, which steps an unknown optimizer: nobody has
    updated."""
    for said, moved in _of("hidden"):
        assert "not found in the arguments" in said
        assert not moved


def test_a_rank_without_any_memory_is_an_error_on_all() -> None:
    first, second = _of("without memory")
    assert "RankError: rank 1 cannot continue: OutOfMemory" in first[0] and first[1]
    assert second[0].startswith("OutOfMemory") and second[1]


@pytest.mark.parametrize("name", ["caught", "caught, sharded"])
def test_an_error_that_is_caught_reaches_all_at_once_and_all_go_on(name: str) -> None:
    first, second = _of(name)
    error = "ValueError: a label that there is not"
    others = f"RankError: rank 1 cannot continue: {error}"
    assert [message_of(text) for text in first[0]] == ["nothing", "nothing", others, "nothing"]
    assert second[0] == ["nothing", "nothing", error, "nothing"]
    assert max(first[1], second[1]) < 5.0  # the time that an error waits for others


TOLD = list(itertools.product((2, 4), KINDS, ("shared", "gloo", "machines")))
SOME_TOLD = sampled(
    [case for case in TOLD if case[2] == "shared"], 2, "told", kind=lambda case: case[1]
)


@pytest.mark.parametrize(("world", "kind", "way"), with_rest(SOME_TOLD, TOLD))
def test_an_error_of_one_rank_reaches_all_within_a_second(world: int, kind: str, way: str) -> None:
    """A second is what is promised. On idle cores it takes milliseconds, in a collective of the
    step's own a quarter of a second; the rest is for ranks that wait for a core, four on two."""
    cases = list(itertools.product(("entry", "loss", "own"), (0, world - 1)))
    _reaches_all(cases, world, kind, way)


@pytest.mark.parametrize(("world", "kind", "way"), with_rest([(2, "ddp", "shared")], TOLD))
def test_it_reaches_ranks_in_a_collective_of_a_backward(world: int, kind: str, way: str) -> None:
    cases = list(itertools.product(("entry", "between"), (0, world - 1)))
    _reaches_all(cases, world, kind, way, gathers=True)


def _reaches_all(
    cases: list[tuple[str, int]], world: int, kind: str, way: str, **given: Any
) -> None:
    given |= {"gloo": {"gloo": True}, "machines": {"nodes": [world // 2] * 2}}.get(way, {})
    found = results_of("told:told", world, sharded=kind == "fsdp", cases=cases, **given)
    for index, (place, who) in enumerate(cases):
        own, failed = found[who][index]
        assert own.startswith("TypeError: " if place == "own" else "ValueError: "), own
        for rank in {*range(world)} - {who}:
            said, learned = found[rank][index]
            assert message_of(said) == f"RankError: rank {who} cannot continue: {own}"
            assert 0.0 <= learned - failed <= 1.0, (place, who, rank, learned - failed)


IN_HOOK = [(at, place, 0, []) for at, places in ((1, 3), (3, 5)) for place in range(places)]
IN_HOOK += [(3, place, 0, [4, 4]) for place in range(1, 5)]
IN_HOOK += [(at, -1, nth, []) for at, most in ((2, 7), (3, 3)) for nth in range(1, most + 1)]
IN_HOOK_BY: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"by_method": True}),
    (2, {"gloo": True}),
    (2, {"nodes": [1, 1]}),
    (4, {"nodes": [2, 2]}),
]


@pytest.mark.parametrize(("world", "way"), with_rest(IN_HOOK_BY[:1], IN_HOOK_BY), ids=str)
def test_one_in_a_hook_with_a_state_reaches_all_and_nobody_updates(
    world: int, way: dict[str, Any]
) -> None:
    """Its collectives follow one another; those that a rank has not made others wait for."""
    why = "it has to begin again after a communication hook had run, whose state cannot be taken"
    *others, one = results_of("told:in_hook", world, cases=IN_HOOK, **way)
    for found in (*others, one):
        for case, (said, seconds, kept, total), own in zip(IN_HOOK, found, one, strict=True):
            assert said.startswith(f"RankError: rank {world - 1} cannot continue: {why}"), case
            assert seconds < 5.0, case  # else it is when the group gives up, after thirty
            assert kept and total == own[3], case


ELSEWHERE = sampled(
    list(itertools.product(([1, 1], [2, 2], [1, 3]), (False, True), (False, True))),
    4,
    "of other machines",
    always=lambda case: case == ([2, 2], False, True),
)


@pytest.mark.parametrize(
    ("nodes", "unused", "early"),
    with_rest(sampled(ELSEWHERE, 1, "of other machines, few"), ELSEWHERE),
    ids=str,
)
def test_it_reaches_ranks_of_other_machines_in_their_reduction(
    nodes: list[int], unused: bool, early: bool
) -> None:
    error = "ValueError: a label that there is not"
    given = {"nodes": nodes, "unused": unused, "early": early}
    found = results_of("steps:caught", sum(nodes), **given)
    for rank, (said, seconds) in enumerate(found):
        third = error if rank == 1 else f"RankError: rank 1 cannot continue: {error}"
        assert [message_of(text) for text in said] == ["nothing", "nothing", third, "nothing"]
        assert seconds < 5.0


SPREAD = list(itertools.product(("machines", "gloo"), ("hook", "models")))


@pytest.mark.parametrize(("where", "what"), with_rest(sampled(SPREAD, 1, "spread"), SPREAD))
def test_it_reaches_ranks_that_share_no_memory_where_nothing_overlaps(
    where: str, what: str
) -> None:
    """A hook with a state, or two models, whose reductions no other rank can make up for."""
    way: dict[str, Any] = {"nodes": [1, 1]} if where == "machines" else {"gloo": True}
    error = "ValueError: a label that there is not"
    for early in (False, True):
        found = results_of("steps:caught", 2, early=early, **{what: True}, **way)
        for rank, (said, seconds) in enumerate(found):
            third = error if rank == 1 else f"RankError: rank 1 cannot continue: {error}"
            assert [message_of(text) for text in said] == ["nothing", "nothing", third, "nothing"]
            assert seconds < 5.0


FAR = [{"nodes": [1, 1]}, {"nodes": [2, 2]}, {"nodes": [1, 1], "gloo": True}]


@pytest.mark.parametrize("where", with_rest(FAR[:1], FAR), ids=["1 + 1", "2 + 2", "gloo"])
def test_it_reaches_ranks_that_share_no_memory_in_their_gathers(where: dict[str, Any]) -> None:
    found = results_of("steps:caught", sum(where["nodes"]), sharded=True, **where)
    for rank, (said, seconds) in enumerate(found):
        error = "ValueError: a label that there is not"
        third = error if rank == 1 else f"RankError: rank 1 cannot continue: {error}"
        assert [message_of(text) for text in said] == ["nothing", "nothing", third, "nothing"]
        assert seconds < 5.0


@pytest.mark.whole
def test_ranks_of_several_machines_that_fail_alike_have_their_own_errors() -> None:
    found = results_of("steps:caught", 4, nodes=[2, 2], fail=[0, 1, 3], early=True)
    for rank, (said, _) in enumerate(found):
        third = "RankError: rank" if rank == 2 else "ValueError: a label that there is not"
        assert said[2].startswith(third)
        assert [said[0], said[1], said[3]] == ["nothing"] * 3


def test_gradients_that_are_sharded_are_clipped_where_one_rank_is_split() -> None:
    assert _of("clipped") == [[True, True, 1], [True, True, 2]]


def test_a_parameter_is_not_put_together_in_a_micro_batch() -> None:
    for said in results_of("shards:full_tensors", 2):
        assert said.startswith(
            "rank 1 cannot continue: its step calls torch.distributed.all_gather_"
        )


@pytest.mark.whole
def test_nothing_is_allocated_between_the_two_parts_of_a_reduction_over_replicas() -> None:
    """So no rank runs out of memory there. One that fails there otherwise ends all: its replica
    waits in a collective of gloo until that rank's process is gone."""
    *others, last = ranks_of("replicas:between", 4)
    for one in (*others, last):
        assert one.result["between"] == [0, 0] and one.result["counted"] > 20
        assert not one.hung
    between = "RankError: rank 3 cannot continue: it failed between two parts of a reduction"
    assert last.result["said"].startswith(between)
    for one in others:
        assert one.result["said"].startswith(("RankError: rank 3", "RuntimeError: "))


def test_gradients_of_an_attempt_that_failed_are_in_none_of_the_next() -> None:
    assert _of("cleared") == [[[], True]] * 2


def test_a_rank_that_fails_in_its_first_gather_takes_part_in_the_others_reduction() -> None:
    assert _of("first gather") == [[True, True, 1, 0], [True, True, 2, 1]]


@pytest.mark.parametrize("used", with_rest(SOME_USED, [*shards.USED]))
def test_a_group_may_have_any_number_of_parameters(used: str) -> None:
    first, second = _of(f"many, {used}")
    assert max(first[0], second[0]) < 1e-12
    assert first[1] == second[1] == len(shards.USED[used])
    assert first[2] == second[2] == 6


FARTHER = [{"nodes": [1, 2]}, {"nodes": [2, 2]}, {"nodes": [1, 1], "gloo": True}]


@pytest.mark.parametrize("where", with_rest(FARTHER[2:], FARTHER), ids=["1 + 2", "2 + 2", "gloo"])
def test_so_it_may_where_not_all_ranks_share_memory(where: dict[str, Any]) -> None:
    """On machines of several ranks the first ones fetch what is left out while others of theirs
    come to the vote."""
    nodes = where["nodes"]
    found = results_of("shards:many", sum(nodes), used="last", **where)
    assert max(far for far, *_ in found) < 1e-12
    assert [count for _, count, _ in found] == [len(shards.USED["last"])] * sum(nodes)
    assert [fired for *_, fired in found] == [6, 6, 0, 0][: sum(nodes)]


@pytest.mark.parametrize(("kind", "verify"), with_rest(SOME_GATHERED, GATHERED))
def test_parameters_that_are_gathered_when_a_call_begins_or_ends(kind: str, verify: Any) -> None:
    """By an evaluation, the user's own unshard(), or a model of the step without a backward."""
    for number, (far, fired) in enumerate(_of(f"gathered, {kind} {verify}")):
        assert far < 1e-12
        assert fired == sum(f in (str(number), "all") for f, *_ in GATHERED_FAULTS[kind])


@pytest.mark.parametrize("where", with_rest(FARTHER[2:], FARTHER), ids=["1 + 2", "2 + 2", "gloo"])
def test_so_they_may_be_where_not_all_ranks_share_memory(where: dict[str, Any]) -> None:
    found = results_of("shards:gathered", sum(where["nodes"]), kind="evaluated", **where)
    assert max(far for far, _ in found) < 1e-12
    assert all(fired >= 3 for _, fired in found)


def test_gradients_that_stay_on_each_rank_until_a_later_backward_are_proven_and_kept() -> None:
    first, second = _of("accumulated")
    assert max(far for far, _ in first + second) < 1e-12
    assert [sizes for _, sizes in first] == [[1, 1]] * 3
    assert [sizes for _, sizes in second] == [[2, 2], [1, 2], [1, 2]]


def test_an_overflow_of_one_rank_beside_an_error_of_another_leaves_the_update_out_on_all() -> None:
    first, second = _of("overflown")
    for found in first + second:
        far, scale, expected, _ = found
        assert far < 1e-12
        assert scale == expected == 512.0
    assert [one[3] + other[3] for one, other in zip(first, second, strict=True)] == [1] * 12


def test_the_first_rank_reports_on_all() -> None:
    (text, rank, ranks), (own, other, none) = _of("reported")
    assert (rank, ranks, other, none) == (0, 2, 1, 0)
    assert "2 ranks" in text and "1: 1" in text and "1 to 2" in text
    assert "2 ranks" not in own


def test_a_record_has_the_rank_of_its_process() -> None:
    for rank, (before, *found, every) in enumerate(results_of("reports:named", 2)):
        assert before is None
        assert found == [rank] * 4  # that of the step after the group has gone, too
        assert [row["rank"] for row in every["sites"][0]["records"]] == [rank]


def test_ranks_of_a_group_are_named_as_in_the_whole_world() -> None:
    none, (text, rank, ranks), _ = results_of("reports:reported", 3, group=[1, 2])
    overview, events = text.split("steps that met an error, on any rank")
    assert (none, rank, ranks) == ([], 1, 2)
    assert "2: 1" in overview and "2: 1" in events
    assert "1: 1" not in text


def test_evaluation_needs_no_agreement_but_for_its_collectives() -> None:
    first, second = _of("evaluated")
    assert first[:2] == [True, 1] and second[:2] == [True, 2]
    for _, _, warned, _ in (first, second):
        assert "torch.distributed.all_reduce() is called inside a part of chunks()" in warned
    assert "torch.distributed.all_reduce() in a function that is split on this rank" in second[3]


def test_ranks_with_different_numbers_of_batches_evaluate_each_for_itself() -> None:
    first, second = _of("mapped")
    assert first["map"] == [True, 8, 8] and first["chunks"] == [True, 2]
    assert second["map"] == [True, 8, 4] and second["chunks"][0] and second["chunks"][1] > 3
    for found in (first, second):
        assert found["mean"]
        assert (
            "torch.distributed.all_reduce() is called inside a part of chunks() or map()"
            in (found["said"])
        )


def test_buffers_are_broadcast_once_for_parts_that_are_repeated() -> None:
    for found, said in _of("broadcast"):
        assert found == [[True, True, True]] * 12
        assert said == []


def test_a_wrapped_model_without_collectives_is_repeated_in_parts() -> None:
    for found, said in _of("without collectives"):
        assert found == [True] * 3 and said == []


IN_PARTS = {
    "buffers": "DistributedDataParallel of Sequential broadcasts its buffers inside",
    "backward": "DistributedDataParallel of Sequential reduces gradients inside",
    "sharded": "a fully_shard() model gathers or reduces inside",
}
INSTEAD = {
    "buffers": "call model.module, which makes no collectives, inside chunks() or map()",
    "backward": "for training decorate the step with @oomkit.auto_batch",
    "sharded": "call it outside of chunks() and map()",
}
PLACES = [("buffers", 1), ("buffers", 6), ("backward", 1), ("backward", 3), ("backward", 9)]
PLACES += [("sharded", 1), ("sharded", 3), ("sharded", 6)]


@pytest.mark.parametrize(
    ("kind", "nth"), with_rest(sampled(PLACES, 1, "in parts"), PLACES), ids=str
)
def test_collectives_of_a_model_in_parts_are_said_and_not_repeated(kind: str, nth: int) -> None:
    """Where they would be, the rank that lacks memory ends with an error, and no rank goes on."""
    first, second = results_of("evaluations:collective_in_parts", 2, kind=kind, nth=nth)
    for said, _ in (first, second):
        assert len(said) == 1
        assert f"{IN_PARTS[kind]} a part of chunks() or map(): ranks may have" in said[0]
        assert INSTEAD[kind] in said[0]
    assert IN_PARTS[kind] in second[1] or "a backward() has run in this part" in second[1]
    assert INSTEAD[kind] in second[1] or "@oomkit.auto_batch" in second[1]
    all_came = (kind, nth) == ("buffers", 6)  # the collective was made before memory lacked
    assert first[1].startswith("nothing" if all_came else "RuntimeError"), first[1]


def test_a_static_graph_is_as_with_torch_alone() -> None:
    for found in _of("static"):
        assert found.keys() >= {"healthy", "between", "reduction 2", "returned", "caught"}
        assert all(far < 1e-12 for far in found.values()), found


def test_a_graph_that_was_to_be_static_is_an_error_where_it_changes() -> None:
    other, failed = _of("static that changes")
    assert "more often than in the first step" in failed[0]
    assert "a parameter not at all, unlike in the first step" in failed[1]
    for said in other:
        assert said.startswith("RankError: rank 1 cannot continue: SplitError")


@pytest.mark.parametrize(("index", "reason"), [*enumerate(REFUSED.values())], ids=list(REFUSED))
def test_what_is_not_agreed_on_is_said_at_the_first_call(index: int, reason: str) -> None:
    for found in _of("refused"):
        assert reason in found[index]
        assert found[index].endswith(oomkit._C.see("distributed"))


def test_a_pipeline_over_ranks_is_told_of_at_the_first_call() -> None:
    for same, said in _of("pipelined"):
        assert same == [True] * 3
        assert len(said) == 3
        assert all("the stages of a pipeline (torch.distributed.pipelining)" in one for one in said)


@pytest.mark.parametrize("name", with_rest(SOME_JOINED, [*JOINED]))
def test_ranks_leave_as_with_torch_alone(name: str) -> None:
    for rank, found in enumerate(_of(f"joined {name}")):
        _left_as_with_torch(JOINED[name], rank, found)


def _left_as_with_torch(given: dict[str, Any], rank: int, found: list[Any]) -> None:
    assert max(far for far, _ in found) < 1e-12, found
    for (_, fails), (_, ooms) in zip(given["cases"], found, strict=True):
        places = [place for place in fails if place.startswith(f"{rank} ")]
        if given["kind"] == "idle":  # every second step does nothing
            places = [place for place in places if int(place[2:]) % 2 == 1]
        assert (ooms > 0) == bool(places)


APART: dict[str, dict[str, Any]] = {"gloo": {"gloo": True}, "machines": {"nodes": [1, 1]}}


@pytest.mark.whole
@pytest.mark.parametrize("way", [{}, {"gloo": True}, {"nodes": [2, 2]}, {"nodes": [3, 1]}], ids=str)
def test_three_of_four_ranks_leave(way: dict[str, Any]) -> None:
    cases = [[[3, 1, 4, 2], {}], [[3, 1, 4, 2], {"2 3": ["backward", 2], "0 1": ["forward", 2]}]]
    for divide in (True, False):
        for found in results_of("joins:joined", 4, kind="plain", divide=divide, cases=cases, **way):
            assert max(far for far, _ in found) < 1e-12, found


@pytest.mark.parametrize("way", with_rest(["shared"], ["shared", *APART]))
def test_who_has_left_is_told_of_errors(way: str) -> None:
    shared = way == "shared"
    first, second = _of("left") if shared else results_of("joins:left", 2, **APART[way])
    error = "ValueError: a label that there is not"
    for kind in (0, 1):
        assert message_of(first[kind]) == f"RankError: rank 1 cannot continue: {error}"
        assert second[kind] == error
    assert "Rank 0 exhausted all inputs" in first[2]
    assert "Detected at least one rank that exhausted inputs" in second[2]
    for one in (first, second):
        assert "its step reduces gradients more than once inside join()" in one[3]
        assert "cannot run a forward after the update inside join()" in one[4]


ENDED = list(itertools.product(("between", "after"), ("shared", *APART)))


@pytest.mark.parametrize(("fails", "way"), with_rest([("between", "shared")], ENDED))
def test_who_has_left_is_told_who_has_ended_with_what(fails: str, way: str) -> None:
    first, _ = ranks_of("joins:left_outside", 2, fails=fails, **APART.get(way, {}))
    assert first.result.startswith("RuntimeError: ") and not first.hung
    assert "oomkit: rank 1 (process" in first.result
    assert "ValueError: a label that there is not" in first.result


BEFORE = list(
    itertools.product(("plain", "idle", "norm", "idle, norm"), ("first", "over another model"))
)


@pytest.mark.parametrize(("kind", "met"), with_rest(sampled(BEFORE, 1, "before"), BEFORE))
def test_a_rank_that_has_left_before_all_have_met_is_torchs_affair(kind: str, met: str) -> None:
    why = "a rank has left before the first decorated call of all ranks"
    given = {"kind": kind, "counts": [0, 4], "have_met": met != "first"}
    first, second = results_of("joins:left_at_once", 2, **given)
    assert first[0] and second[0] and why in second[1]


def test_calls_that_are_not_agreed_on_leave_nothing_behind_in_join() -> None:
    assert _of("not agreed on") == [True, True]


LEFT_APART = list(itertools.product(APART, JOINED))
SOME_LEFT_APART = sampled(LEFT_APART, 2, "left apart", always=lambda case: case[1] == "plain True")


@pytest.mark.parametrize(("way", "name"), with_rest(SOME_LEFT_APART, LEFT_APART))
def test_ranks_leave_without_shared_memory_and_on_several_machines(way: str, name: str) -> None:
    chosen = (way, name) in SOME_LEFT_APART
    programs = {
        n: ("joins:joined", of)
        for n, of in JOINED.items()
        if ((way, n) in SOME_LEFT_APART) == chosen
    }
    every = results_once("common:together", 2, 300.0, programs=programs, **APART[way])
    for rank, found in enumerate(every):
        _left_as_with_torch(JOINED[name], rank, found[name])


def test_sharded_parameters_that_the_step_changes_itself_are_seen_and_go_back() -> None:
    first, second = _of("averaged")
    for verify in (None, False):
        assert first[f"guarded {verify}"] < 1e-12 and second[f"guarded {verify}"] < 1e-12
        for kind in ("average", "foreach", "local"):
            assert "was changed in micro-batch 1 of 2" in second[f"{kind} {verify}"]
            assert "RankError: rank 1 cannot continue" in first[f"{kind} {verify}"]


def test_a_compiled_model_is_split_and_nothing_is_said_of_what_cannot_be_compiled() -> None:
    assert _of("compiled") == [[[True] * 3, []]] * 2


def test_a_step_by_accelerate_is_retried() -> None:
    places = [["forward", 3], ["backward", 5], ["backward", 9]]
    one, failed = results_of("scaled:accelerated", 2, places=places)
    assert max(far for far, _ in [*one, *failed]) < 1e-12
    assert all(ooms > 0 for _, ooms in failed), failed


def test_zeros_that_a_failed_rank_owes_are_tried_for_again() -> None:
    for found in results_of("owed:zeros", 2, times=1):
        assert found == [["nothing"] * 3, True]


@pytest.mark.whole
def test_a_rank_without_memory_for_the_zeros_that_it_owes_ends_all() -> None:
    other, failed = results_of("owed:zeros", 2, times=100)
    assert failed[0][2].startswith("RankError: rank 1 cannot continue: it has no memory for the")
    assert other[0][2] != "nothing"


@pytest.mark.whole
def test_memory_for_what_a_call_begins_with_is_tried_for_again() -> None:
    assert results_of("owed:entry", 2, after=False, call=2, times=1) == [["nothing"] * 3] * 2


def test_a_rank_without_memory_for_what_a_call_begins_with_ends_all() -> None:
    other, failed = results_of("owed:entry", 2, after=True, call=3, times=9)
    for found in (other, failed):
        assert found[2].startswith("RankError: rank 1 cannot continue: OutOfMemoryError: CUDA out")


def test_all_wait_for_what_was_sent_of_a_reduction_that_was_cut_off() -> None:
    """Its buffers are those of the next one, and gloo's threads end collectives in any order."""
    for (healthy, failed), right in results_of("owed:cut_off", 2):
        assert failed == 2 * healthy + 1  # with zeros, a barrier, and once more
        assert right
    assert results_of("owed:overtaken", 2) == [[True], [True]]
