"""Every program comes out as it states, plain, decorated, and where memory runs out.

`make test` lets it run out at one place of some programs, `make prove` at twenty of each.
"""

from __future__ import annotations

import dataclasses

import pytest
from helpers.sample import WHOLE, sampled

from .catalogue import FAMILIES, PENDING, TABLE, expected, listed, table
from .harness import Report, compare, places, run, sweep
from .world import PROGRAMS, Program, World

PLACES = 5
NUMBER, KEEP = (20, 20) if WHOLE else (PLACES, 1)
SOME = set(sampled([*PROGRAMS], 45, "programs", kind=lambda name: PROGRAMS[name].outcome))


def _parameters() -> list[object]:
    # Strict (pyproject.toml): one that comes out fails until its line in PENDING is gone.
    marks = {name: [pytest.mark.xfail(reason=PENDING[name])] for name in PENDING}
    marks |= {name: [pytest.mark.whole] for name in PROGRAMS if name not in SOME | PENDING.keys()}
    return [pytest.param(p, id=name, marks=marks.get(name, ())) for name, p in PROGRAMS.items()]


@pytest.mark.parametrize("program", _parameters())
def test_program(program: Program) -> None:
    # One that is pending may fail at few places only.
    number, keep = (20, 20) if program.name in PENDING else (NUMBER, KEEP)
    report = sweep(program, number, keep)
    print(f"seed {World().seed}: {dict(report.places)}, largest difference {report.worst:.1e}")
    assert not report.failures, "\n".join(report.failures)
    assert sum(report.places.values()) == keep


def test_the_table_lists_the_programs_that_there_are() -> None:
    """`make programs` writes it; what it found is not compared, what is expected is."""
    now = {name: expected(program) for name, program in PROGRAMS.items()}
    assert listed(TABLE.read_text()) == now, "run `make programs`"
    assert listed(table({name: Report(p) for name, p in PROGRAMS.items()})) == now


def test_every_program_is_of_a_family_and_no_reason_is_left_over() -> None:
    families = {family.__name__.rpartition(".")[2] for family in FAMILIES}
    assert {program.family for program in PROGRAMS.values()} == families
    assert set(PENDING) <= set(PROGRAMS)
    assert len(PROGRAMS) >= 200


def _failures(name: str, **changed: object) -> str:
    return "\n".join(sweep(dataclasses.replace(PROGRAMS[name], **changed), PLACES).failures)


def test_a_silent_difference_is_found() -> None:
    """A permutation of the rows of each micro-batch, stated as that of the whole batch's."""
    assert "not the whole batch" in _failures("mixup_inside", compare="whole")


def test_weights_that_a_program_does_not_state_are_found() -> None:
    assert "found weights" in _failures("vae_forgotten", found={})


def test_a_warning_that_does_not_come_is_found() -> None:
    assert "did not say" in _failures("mlp_scheduler", outcome="said", says="no such words")


def test_a_warning_without_need_is_found() -> None:
    assert "said without need" in _failures("cnn_batchnorm", outcome="equal", says=None)


def test_a_refusal_without_need_is_found() -> None:
    assert "ran whole without need" in _failures("skip_on_nan", outcome="equal", says=None)


def test_a_refusal_that_does_not_come_is_found() -> None:
    assert "should have been refused" in _failures("mlp_scheduler", outcome="refused", says="x")


def test_a_refusal_in_other_words_is_found() -> None:
    assert "other words" in _failures("skip_on_nan", says="no such words")


def test_a_result_that_depends_on_the_fault_is_found() -> None:
    """A program that is told of the error outside oomkit's sight, and adds it to its loss."""

    def program(world: World) -> None:
        PROGRAMS["mlp_scheduler"].run(world)
        world.note(world.fired)

    assert "not the same slices" in _failures("mlp_scheduler", run=program)


def test_the_decorated_program_is_compared_bit_for_bit() -> None:
    def program(world: World) -> None:
        PROGRAMS["mlp_scheduler"].run(world)
        world.note(1e-16 if world.decorate else 0.0)

    assert "not bitwise the plain program" in _failures("mlp_scheduler", run=program)


def test_places_are_spread_over_phases_and_calls() -> None:
    chosen = places(PROGRAMS["mlp_scheduler"], 20)
    assert len(set(chosen)) == 20
    assert [p.phase for p in chosen] == ["forward"] * 8 + ["backward"] * 8 + ["optimizer"] * 4
    assert {p.call for p in chosen} == {0, 1, 2, 3}
    failed = run(PROGRAMS["mlp_scheduler"], World(decorate=True, place=chosen[9]))
    assert failed.world.fired == 1
    assert failed.split.keys() >= {chosen[9].call}


# What a worker runs is decorated there, without the option.
IN_PARTS = [p for p in PROGRAMS.values() if not p.name.startswith("spawned")]


@pytest.mark.parametrize("program", sampled(IN_PARTS, 18, "in parts"), ids=lambda p: p.name)
def test_with_updates_in_parts_no_error_leaves_one_half_done(program: Program) -> None:
    updates = [p for p in places(program, 20) if p.phase == "optimizer"]
    plain = run(program, World())
    for place in sampled(updates, 1):
        world = World(decorate=True, place=place, more={"optimizer_safety": "parts"})
        failed = run(program, world)
        unfound = "optimizer=" in (failed.error or "")  # one that the step does not lead to
        assert failed.kind != "PartialUpdate" or unfound, failed.error
        if failed.error is None and not failed.split:
            assert compare(failed, plain, random_state=True)[0] == 0.0, place
