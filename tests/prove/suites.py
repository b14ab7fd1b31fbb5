"""The suites of `make prove`, a line each."""

from __future__ import annotations

import logging
import os
import time

import torch

from .suite import TESTS, Result, Suite, pytest_suite, run_faults, run_pytest, sampling


def _zoo() -> list[str]:
    from zoo.catalogue import MODELS

    return sorted(MODELS, key=lambda name: not MODELS[name].compiled)


PLACES = 6
"""Allocations of a phase that fail, in each case: a proof makes hundreds that are alike."""


def _prove_model(name: str) -> Result:
    from zoo.case import cases_of
    from zoo.catalogue import MODELS
    from zoo.sweep import sweep

    model = MODELS[name]
    found = sweep(model, cases_of(model), min(PLACES, model.places or PLACES))
    told = ", ".join(f"{n} {kind}" for kind, n in sorted(found.kinds.items()))
    if found.worst:
        told += f"; without copies within {found.worst:.0e}"
    return Result(found.faults, found.failures, told, found.seconds)


def _programs() -> list[str]:
    from programs.catalogue import FAMILIES

    return [family.__name__.rpartition(".")[2] for family in FAMILIES]


def _prove_family(family: str) -> Result:
    """As `make programs`, which writes the table of what is expected."""
    from programs.catalogue import PENDING
    from programs.harness import sweep
    from programs.world import PROGRAMS

    result = Result()
    for name, program in PROGRAMS.items():
        if program.family == family and name not in PENDING:
            report = sweep(program, 20)
            result.cases += sum(report.places.values())
            result.failures += report.failures
    return result


def _faults() -> list[str]:
    from undo.recovery_points import SUITES

    return list(SUITES)


def _prove_faults(name: str) -> Result:
    from undo.recovery_points import STRIDES, prove

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    count, failures = prove(name, STRIDES[name])
    return Result(count, failures, seconds=time.perf_counter() - begin)


RANDOM_UNITS, RANDOM_PROGRAMS = 4, 400


def _seeds() -> list[str]:
    first = int(os.environ.get("OOMKIT_TEST_SEED", "20240607"))
    return [f"seed {first + n}" for n in range(RANDOM_UNITS)]


def _random_programs(unit: str) -> Result:
    from properties.run import explore

    counts = explore(int(unit.removeprefix("seed ")), RANDOM_PROGRAMS, shrink=True)
    told = ", ".join(f"{n} {what}" for what, n in counts.most_common(5))
    return Result(RANDOM_PROGRAMS, told=told)


COUPLING_UNITS, COUPLING_PROGRAMS = 8, 300


def _couplings() -> list[str]:
    """Each program has a seed of its own: `python -m couplings SEED` shows one."""
    first = int(os.environ.get("OOMKIT_TEST_SEED", "20240607"))
    return [f"programs from seed {first + n * COUPLING_PROGRAMS}" for n in range(COUPLING_UNITS)]


def _prove_couplings(unit: str) -> Result:
    from couplings.explore import explore

    first = int(unit.rpartition(" ")[2])
    found = explore(range(first, first + COUPLING_PROGRAMS))
    lines = [f"silent or late, seeds: {' '.join(map(str, found.seeds))}"] if found.seeds else []
    lines += [f"refused without need: {line}" for line in found.refused]
    return Result(COUPLING_PROGRAMS, found.failures(), "; ".join(found.told()), lines=lines)


def _sanitizers() -> list[str]:
    from sanitizers.suite import UNITS

    return list(UNITS)


def _sanitize(unit: str) -> Result:
    from sanitizers.suite import prove

    return prove(unit)


def _no_memory() -> list[str]:
    from nomemory.bodies import BODIES
    from nomemory.fault import MISSING

    return [] if MISSING else [body.name for body in BODIES]


def _prove_no_memory(name: str) -> Result:
    """In a process that has torch, and oomkit from the moment that a body imports it."""
    from nomemory.bodies import BODIES
    from nomemory.sweep import PROVE, load, sweep

    body = next(body for body in BODIES if body.name == name)
    if body.loaded:
        load()
    found = sweep(body, PROVE.get(name, PROVE[""]), least=100)
    told = f"of {found.total} allocations, once and from there on: " + ", ".join(
        f"{n} {kind}" for kind, n in found.kinds.most_common()
    )
    return Result(found.cases, found.failures, told, found.seconds)


def _leaks() -> list[str]:
    from leaks.leak_slope import FORMS

    return list(FORMS)


def _prove_leaks(form: str) -> Result:
    from leaks.leak_slope import FORMS, slope

    count = 10_000
    told, failures = slope(FORMS[form], count)
    return Result(count, failures, told)


def _evaluations() -> list[str]:
    from evaluation.evaluation_faults import units

    return [" / ".join(unit) for unit in units()]


def _prove_evaluation(unit: str) -> Result:
    from evaluation.evaluation_faults import sweep

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    found = sweep(*unit.split(" / "))
    told = f"{found.recovered} recovered, {found.refused} refused, {found.leaked} bytes leaked"
    return Result(found.faults, found.failures, told, time.perf_counter() - begin)


def _ranks() -> list[str]:
    from ranks.sweeps import units

    return units()


def _prove_ranks(unit: str) -> Result:
    from ranks.sweeps import sweep

    begin = time.perf_counter()
    program, world, option = unit.split(" / ")
    found = sweep(program, int(world), [option])[option]
    told = f"{found.cases} steps, {len(found.hung)} hung"
    return Result(found.fired, found.wrong + found.hung, told, time.perf_counter() - begin)


def _ends() -> list[str]:
    from ranks.ends import HOW

    return [f"{program} / {how}" for program in ("ddp", "fsdp") for how in HOW]


def _prove_ends(unit: str) -> Result:
    from ranks.ends import ends

    begin = time.perf_counter()
    program, how = unit.split(" / ")
    found = ends(how, program == "fsdp", range(25), 1)
    told = f"{found.by_vote} of {len(found.seconds)} by a vote, at most {max(found.seconds):.1f} s"
    return Result(25, found.wrong, told, time.perf_counter() - begin)


# The tests of each rung of the ladder: files, and which of them.
RUNGS: dict[str, list[tuple[list[str], str]]] = {
    "update": [
        (["ladder/test_update_parts.py", "ladder/test_update_repeated.py",
          "ladder/test_known_optimizers.py"], ""),
        (["ladder/test_each_rung.py"], "update and (gpt or thousand)"),
    ],
    "state": [
        (["ladder/test_host_state.py", "optim/test_update_rows.py"], ""),
        (["ladder/test_each_rung.py"], "state"),
    ],
    "activations": [
        (["ladder/test_offload_faults.py", "ladder/test_offload_exact.py"], ""),
        (["ladder/test_climbing.py"], "not recompute"),
        (["ladder/test_each_rung.py"], "activations"),
    ],
    "recompute": [(["ladder/test_climbing.py", "ladder/test_each_rung.py"], "recompute")],
    "gradients, once": [(["ladder/test_host_gradients.py"], "not for_good and not anywhere")],
    **{
        f"gradients, once, {phase}": [
            (["ladder/test_host_gradients.py"], f"anywhere and {phase}")
        ]
        for phase in ("forward", "backward", "recovery")
    },
    "gradients, for good": [
        (["ladder/test_host_gradients.py"], "for_good"),
        (["ladder/test_each_rung.py"], "gradients"),
    ],
    "all of them, on a scripted device": [(["device/test_ladder.py"], "")],
}  # fmt: skip


def _prove_rung(rung: str) -> Result:
    found = Result()
    told = []
    for files, which in RUNGS[rung]:
        more = run_faults(*(["-k", which] if which else []), *(str(TESTS / f) for f in files))
        found.cases += more.cases
        found.failures += more.failures
        found.seconds += more.seconds
        told.append(more.told)
    found.told = "; ".join(told)
    return found


# Swept by a suite of its own, and further than its tests would.
ELSEWHERE = {"evaluation/test_evaluation_faults.py": "evaluation of 50 samples"}


def _whole() -> list[str]:
    """All files that take samples, but for those that another suite runs."""
    tests = [s for s in SUITES if s.prove is run_pytest and s.units is not _whole]
    others = {*ELSEWHERE, *(file for suite in tests for file in suite.units())}
    others |= {file for some in RUNGS.values() for files, _ in some for file in files}
    return [file for file in sampling() if file not in others]


SUITES = [
    Suite("model zoo", _zoo, _prove_model),
    Suite("programs", _programs, _prove_family),
    Suite("faults inside recovery", _faults, _prove_faults),
    Suite("evaluation of 50 samples", _evaluations, _prove_evaluation),
    pytest_suite("what recovery faults found", "undo/test_recovery_faults.py"),
    pytest_suite("classifier", "core/test_classifier.py", "core/test_classifier_fuzz.py"),
    pytest_suite("returned losses",
                 "deferred/test_returned.py", "deferred/test_returned_between.py",
                 "deferred/test_returned_modes.py", "deferred/test_returned_paths.py",
                 "deferred/test_returned_weights.py", "deferred/test_returned_threads.py",
                 "deferred/test_returned_buffers.py"),
    pytest_suite("three steps, every place", "engine/test_exact.py"),
    pytest_suite("in and after the update", "optim/test_optimizer_faults.py"),
    Suite("the ladder, by rung", lambda: list(RUNGS), _prove_rung),
    pytest_suite("what cannot be taken back", "undo/test_rollback_rest.py"),
    Suite("several ranks, faults", _ranks, _prove_ranks),
    Suite("several ranks, one of which ends", _ends, _prove_ends),
    pytest_suite("several ranks", "ranks/test_ddp.py", "ranks/test_world.py", "ranks/test_vote.py"),
    pytest_suite("leaks", "leaks/test_leaks.py", "leaks/test_leak_names.py",
                 "python_types/test_bare_objects.py"),
    Suite("what tests sample, whole", _whole, run_pytest),
    Suite("memory over 10,000 OOMs", _leaks, _prove_leaks),
    Suite("without the interpreter's memory", _no_memory, _prove_no_memory),
    Suite("random programs", _seeds, _random_programs),
    Suite("couplings", _couplings, _prove_couplings),
    Suite("sanitizers", _sanitizers, _sanitize),
]  # fmt: skip

__all__ = ["SUITES"]
