"""An update that fails on one rank: no other one keeps an update that this one has not made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.sample import sampled, with_rest

from .launch import results_of, results_once

PARTS = {"optimizer_safety": "parts"}
COPY = {"optimizer_safety": "copy"}
OWN = {"optimizer": "Own", "nth": 2, **PARTS}
WIDE = {"width": 8192, "rows": 2, "ladder": ["update"]}
TIGHT, NEAR = {**WIDE, "left": 500000, "decay": 0.1}, {**WIDE, "left": 900000}
GOOD = {"times": None}

MADE: dict[str, tuple[int, int, dict[str, Any]]] = {
    "roomy": (0, 1, {}),
    "near": (1, 2, NEAR),
    "tight": (2, 2, TIGHT),
    "not found": (1, 2, {"hidden": True}),
    "asked for": (2, 2, PARTS),
    "two in turn": (2, 0, {"models": 2, "in_turn": True, **PARTS}),
    "a part fails": (2, 2, {"times": 1, **PARTS}),
    "goes on in parts": (0, 1, {**WIDE, "decay": 0.1, "times": 2}),
    "all again, copied": (2, 0, {"times": 2, "nth": 4, **COPY}),
    "all again": (2, 0, {"times": 1, **OWN}),
    "all again, scheduler": (2, 0, {"times": 1, "after": ["scheduler"], **OWN}),
    "all again, two": (2, 0, {"times": 1, "models": 2, **OWN, "nth": 6}),
}
"""How tight it is, votes in the call (0: more than one attempt's), and the program: all ranks
update."""
UNDONE: dict[str, tuple[str, dict[str, Any]]] = {
    "asked for": ("OutOfMemory: ", {**GOOD, **PARTS}),
    "copied": ("OutOfMemory: ", {**GOOD, "nth": 4, **COPY}),
    "tight": ("OutOfMemory: ", {**GOOD, **TIGHT}),
    "scheduler": ("OutOfMemory: ", {**GOOD, "after": ["scheduler"], **PARTS}),
    "scaler": ("OutOfMemory: ", {**GOOD, "scaler": True, **PARTS}),
    "the second of two": ("OutOfMemory: ", {**GOOD, "nth": 34, "models": 2, **PARTS}),
    "the second of two in turn": (
        "SplitError: ",
        {**GOOD, "nth": 34, "models": 2, "in_turn": True, **PARTS},
    ),
    "error between two": ("ValueError: ", {"errs": "between", "models": 2, **PARTS}),
    "collective": ("its step calls torch", {**GOOD, "after": ["collective"], **PARTS}),
    "forward": ("SplitError: ", {**GOOD, "after": ["forward"], **PARTS}),
}
"""What the other rank is told, and the program: no rank updates."""
SHARDED = (
    "a part fails",
    "all again",
    "asked for",
    "scaler",
    "the second of two",
    "the second of two in turn",
    "error between two",
    "collective",
    "forward",
)
BY_EACH_WAY = {"roomy", "asked for", "all again", "error between two"}
LAST: dict[str, dict[str, Any]] = {
    "half made": {"times": 1, "nth": 3, **NEAR},
    "nothing made": {**GOOD, **NEAR, "ladder": []},
    "not found": {"times": 1, "nth": 3, "hidden": True},
    "it does not go back": {**GOOD, "stubborn": True, **PARTS},
}


EACH = {
    f"{nth}, {times}": {"times": times, "nth": nth, **PARTS}
    for nth, times in sampled(list(itertools.product(range(1, 15), (1, 2, 3, None))), 6, "each")
}
"""Places of an update, and how often it fails from there on."""


WAYS: dict[str, dict[str, Any]] = {"": {}, "gloo": {"gloo": True}, "nodes": {"nodes": [1, 1]}}


def _names(of: dict[str, Any]) -> list[str]:
    return [*of, *(f"{name} sharded" for name in of if name in SHARDED)]


def _is_sharded(name: str) -> bool:
    return name.endswith(" sharded")


SOME_MADE = sampled(_names(MADE), 4, "made", kind=_is_sharded)
SOME_UNDONE = sampled(_names(UNDONE), 4, "undone", kind=_is_sharded)
SOME_EACH = sampled([*EACH], 2, "each of some")
SAMPLE = {
    *(f"made {name}" for name in SOME_MADE),
    *(f"undone {name}" for name in SOME_UNDONE),
    *(f"each {name}" for name in SOME_EACH),
    *(f"last {name}" for name in LAST),
}
"""What `make test` runs, but for the ways."""


def _programs(way: str) -> dict[str, dict[str, Any]]:
    programs = {}
    for kind, of in (("made", MADE), ("undone", UNDONE)):
        for name, (*_, given) in of.items():
            if not way or name in BY_EACH_WAY:
                programs[f"{kind} {name}"] = given
            if name in SHARDED and (not way or name in BY_EACH_WAY):
                programs[f"{kind} {name} sharded"] = {**given, "sharded": True}
    if not way:
        programs |= {f"last {name}": given for name, given in LAST.items()}
        programs |= {f"each {name}": given for name, given in EACH.items()}
    return programs


def _of(name: str, way: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """All of a way run together, but for those and the others that `make test` leaves out."""
    programs = {
        n: given for n, given in _programs(way).items() if way or (n in SAMPLE) == (name in SAMPLE)
    }
    found = results_once("updates:cases", 2, 200.0, cases=programs, **WAYS[way])
    one, other = (of[name] for of in found)
    return one, other


@pytest.mark.parametrize("name", with_rest(SOME_MADE, _names(MADE)))
def test_all_make_it(name: str) -> None:
    tight, votes, given = MADE[name.removesuffix(" sharded")]
    for found in _of(f"made {name}"):
        assert (found["error"], found["after"], found["tight"]) == ("", True, tight)
        assert votes in (0, found["votes"] - ("sharded" in name))


@pytest.mark.parametrize("name", with_rest(SOME_UNDONE, _names(UNDONE)))
def test_all_take_it_back(name: str) -> None:
    said, _ = UNDONE[name.removesuffix(" sharded")]
    other, failed = _of(f"undone {name}")
    assert other["error"].startswith("RankError: rank 1 cannot continue: ")
    assert said in other["error"] and said in failed["error"]
    assert other["error"].count("cannot continue") == 1
    assert other["before"] and failed["before"]


@pytest.mark.parametrize("name", with_rest(SOME_EACH, [*EACH]))
def test_each_place_of_an_update_is_made_by_all_or_by_none(name: str) -> None:
    other, failed = _of(f"each {name}")
    assert bool(other["error"]) == bool(failed["error"])
    assert all(one["before" if one["error"] else "after"] for one in (other, failed))


@pytest.mark.parametrize("name", ["half made", "nothing made"])
def test_it_is_an_error_on_all_where_there_are_no_copies(name: str) -> None:
    other, failed = _of(f"last {name}")
    said = "PartialUpdate: Adam.step()" if name == "half made" else "OutOfMemory: a step ran out"
    assert failed["error"].startswith(said) and failed["tight"] == 1
    assert other["error"].startswith(f"RankError: rank 1 cannot continue: {said}")


def test_it_is_an_error_on_all_where_the_optimizer_is_not_found() -> None:
    other, failed = _of("last not found")
    said = "PartialUpdate: a step ran out of memory inside the step() of an optimizer that was not"
    assert failed["error"].startswith(said)
    assert other["error"].startswith(f"RankError: rank 1 cannot continue: {said}")


def test_what_does_not_go_back_is_an_error_on_all() -> None:
    other, failed = _of("last it does not go back")
    assert other["error"] == "ValueError: it does not go back"
    assert failed["error"].startswith(f"RankError: rank 0 cannot continue: {other['error']}")


def test_an_error_after_it_is_the_ranks_own() -> None:
    # Alone: other programs of the same function make two updates.
    given = {"cases": {"after it": {"errs": "after", **PARTS}}}
    other, failed = (found["after it"] for found in results_of("updates:cases", 2, **given))
    assert (other["error"], failed["error"][:11]) == ("", "ValueError:")
    assert other["after"] and failed["after"]


@pytest.mark.parametrize("where", ["within", "between"])
def test_an_error_before_its_end_is_told_before_the_next_one(where: str) -> None:
    other, failed = results_of("updates:ends_within", 2, where=where, models=2)
    error = "ValueError: a label that there is not"
    assert other[:2] == ["", ""] and failed[:2] == ["", error]
    assert other[2].startswith(f"RankError: rank 1 cannot continue: {error}")
    assert failed[2] != ""


CLOSURES = list(itertools.product((False, True), ("", "gloo", "nodes")))


@pytest.mark.parametrize(("sharded", "way"), with_rest([(False, "")], CLOSURES))
def test_nobody_updates_before_all_have_come_through_their_closure(sharded: bool, way: str) -> None:
    places = [["backward", nth] for nth in (1, 2, 4, 7, 9)] + [["optimizer", 1], ["optimizer", 2]]
    given = {"optimizer": "SGD", "sharded": sharded, "places": places, **WAYS[way]}
    for every in zip(*results_of("updates:closures", 2, **given), strict=True):
        (other, same, _), (error, undone, fired) = every
        assert fired and same and undone, every
        assert error.startswith("OutOfMemory: ") and "closure" in error
        assert other.startswith("RankError: rank 1 cannot continue: OutOfMemory: ")


@pytest.mark.parametrize("way", with_rest(sampled(["gloo", "nodes"], 1, "way"), ["gloo", "nodes"]))
def test_where_ranks_do_not_share_memory(way: str) -> None:
    for name in _names({name: MADE[name] for name in MADE if name in BY_EACH_WAY}):
        assert all(one["error"] == "" and one["after"] for one in _of(f"made {name}", way)), name
    for name in _names({name: UNDONE[name] for name in UNDONE if name in BY_EACH_WAY}):
        said, _ = UNDONE[name.removesuffix(" sharded")]
        other, failed = _of(f"undone {name}", way)
        assert said in other["error"] and other["before"] and failed["before"], name


JOINED: dict[str, dict[str, Any]] = {
    "made": PARTS,
    "a part fails": {"times": 1, **PARTS},
    "all again": {"times": 1, **OWN},
    "undone": {**GOOD, **PARTS},
    "copied, undone": {**GOOD, "nth": 4, **COPY},
    "all there": {"all_there": True, **GOOD, **PARTS},
    "zero": {"optimizer": "ZeRO", **PARTS},
}
"""Inside join(), where the first of three ranks has left."""


EACH_JOINED = {
    f"{nth}, {times}": {"times": times, "nth": nth, **PARTS}
    for nth, times in sampled(list(itertools.product(range(1, 15), (1, 2, 3, None))), 3, "joined")
}


SOME_JOINED = sampled([*JOINED], 2, "some joined")
SOME_EACH_JOINED = sampled([*EACH_JOINED], 1, "each of some joined")
JOINED_SAMPLE = {*SOME_JOINED, *SOME_EACH_JOINED}


JOINED_WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "gloo": {"gloo": True},
    "1 + 2": {"nodes": [1, 2]},
    "2 + 1": {"nodes": [2, 1]},
}


def _joined_cases(of: dict[str, Any], some: list[str]) -> Any:
    """By way; of those without shared memory `make test` leaves out all."""
    return with_rest(
        [("", name) for name in some], [(way, name) for way in JOINED_WAYS for name in of]
    )


def _joined(way: str, name: str) -> list[dict[str, Any]]:
    of = JOINED | EACH_JOINED
    cases = {n: of[n] for n in of if way or (n in JOINED_SAMPLE) == (name in JOINED_SAMPLE)}
    given = {"cases": cases, "kind": "joined", **JOINED_WAYS[way]}
    return [found[name] for found in results_once("updates:cases", 3, 200.0, **given)]


@pytest.mark.parametrize(("way", "name"), _joined_cases(JOINED, SOME_JOINED))
def test_who_has_left_takes_part_in_the_vote_after_an_update(way: str, name: str) -> None:
    first, other, last = _joined(way, name)
    if "times" in JOINED[name] and JOINED[name]["times"] is None:
        assert last["error"].startswith("OutOfMemory: ")
        for found in (first, other):
            assert found["error"].startswith("RankError: rank 2 cannot continue: OutOfMemory: ")
        assert all(found["before"] for found in (first, other, last))
    else:
        assert [found["error"] for found in (first, other, last)] == [""] * 3
        assert all(found["after"] for found in (first, other, last))
    assert other["tight"] == last["tight"] == (0 if name == "zero" else 2)


@pytest.mark.parametrize(("way", "name"), _joined_cases(EACH_JOINED, SOME_EACH_JOINED))
def test_each_place_of_an_update_is_made_by_all_that_have_not_left_or_by_none(
    way: str, name: str
) -> None:
    found = _joined(way, name)
    assert len({bool(one["error"]) for one in found}) == 1
    assert all(one["before" if one["error"] else "after"] for one in found)


ADAM: dict[str, Any] = {"inner": "Adam"}
MOMENTUM: dict[str, Any] = {"inner": "SGD", "options": {"momentum": 0.9}}
EACH_ZERO = {
    f"{kind} {options['optimizer_safety']} {hurt} {nth}, {times}{' first' * first}": {
        **of,
        **options,
        "hurt": hurt,
        "nth": nth,
        "times": times,
        "first": first,
    }
    for kind, of, options, hurt, nth, times, first in sampled(
        [
            (kind, of, *rest)
            for kind, of, most in (("Adam", ADAM, 22), ("momentum", MOMENTUM, 4))
            for rest in itertools.product(
                (PARTS, COPY), ([0], [1], [0, 1]), range(1, most), (1, 2, None), (False, True)
            )
        ],
        30,
        "zero",
        kind=lambda case: (case[0], str(case[2:4]), case[-1]),
    )
}
"""Every place of the updates of ZeroRedundancyOptimizer, of each rank or of both."""
ZERO: dict[str, dict[str, Any]] = {
    "well": {**ADAM, **PARTS},
    "scaler": {**ADAM, **PARTS, "hurt": [1], "nth": 2, "times": 1, "scaler": True},
    "the first of two": {**ADAM, **PARTS, "hurt": [1], "nth": 2, "times": 1, "models": 2},
    "the second of two": {**ADAM, **PARTS, "hurt": [1], "nth": 23, "times": 1, "models": 2},
    "no broadcast made": {**ADAM, **PARTS, "hurt": [0], "breaks": 1},
}


def _zero(way: str = "", **cases: Any) -> list[dict[str, Any]]:
    return results_once("updates:cases", 2, 250.0, cases=cases, kind="zero", **WAYS[way])


def test_each_place_of_an_update_that_makes_collectives_is_made_by_all_or_by_none() -> None:
    ended = _zero(**EACH_ZERO)
    for name in EACH_ZERO:
        pair = [found[name] for found in ended]
        assert bool(pair[0]["error"]) == bool(pair[1]["error"]), name
        assert all(one["before" if one["error"] else "after"] for one in pair), name
        assert all("OutOfMemory: " in one["error"] for one in pair if one["error"]), name
    assert all("None" in name for name in EACH_ZERO if ended[0][name]["error"])


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_makes_collectives_is_made_again_by_all(way: str) -> None:
    ended = _zero(way, **ZERO)
    for name in ZERO:
        for found in (found[name] for found in ended):
            assert (found["error"], found["after"], found["tight"]) == ("", True, 2), name
            assert (found["votes"] > 3) == (name != "well"), name


HURT = list(itertools.product([[0], [1], [0, 1]], [1, 5]))


@pytest.mark.parametrize(("hurt", "nth"), with_rest(sampled(HURT, 2, "hurt"), HURT))
def test_such_an_update_without_copies_is_an_error_on_all(hurt: list[int], nth: int) -> None:
    case = {**ADAM, "hurt": hurt, "nth": nth, "times": 1}
    said = "PartialUpdate: ZeroRedundancyOptimizer.step() ran out of memory after it had changed"
    for rank, found in enumerate(_zero(one=case)):
        one = found["one"]
        of = "" if rank in hurt else f"RankError: rank {hurt[0]} cannot continue: "
        assert one["error"].startswith(f"{of}{said}") and one["seconds"] < 5.0


BROKEN = list(itertools.product([2, 3], [{}, PARTS, COPY]))


@pytest.mark.parametrize(("at", "options"), with_rest(sampled(BROKEN, 2, "broken"), BROKEN))
def test_an_update_is_not_made_again_once_it_has_made_a_collective(
    at: int, options: dict[str, Any]
) -> None:
    first, second = _zero(one={**ADAM, **options, "hurt": [1], "breaks": at})
    said = "PartialUpdate: ZeroRedundancyOptimizer.step() ran out of memory after it had begun a"
    assert second["one"]["error"].startswith(said)
    assert first["one"]["error"].startswith(f"RankError: rank 1 cannot continue: {said}")
    assert first["one"]["seconds"] < 5.0
