"""Runs of trainers of transformers and TRL, and sweeps of errors over one of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import transformers
from runs import SINGLE, Arm, Outcome, differences, listening, parameters, places, timeless

import oomkit
import oomkit.transformers

Make = Callable[[], Any]


def plain(trainer: Any) -> Any:
    return trainer


def run(
    make: Make,
    protect: Callable[[Any], Any] = oomkit.transformers.protect,
    method: str = "training_step",
    number: int = 0,
    fault: dict[str, Any] | None = None,
    slices: dict[int, tuple[int, ...]] | None = None,
    train: Callable[[Any], Any] = lambda trainer: trainer.train(),
) -> tuple[Outcome, Arm, Any]:
    """One run, its arm and its trainer."""
    trainer = protect(make())
    trainer.remove_callback(transformers.PrinterCallback)
    begun = parameters(trainer.model)
    arm = Arm(getattr(trainer, method), number, fault, slices)
    setattr(trainer, method, arm)
    error: BaseException | None = None
    with listening() as said:
        try:
            train(trainer)
        except (oomkit.OomkitError, RuntimeError) as raised:
            error = raised.with_traceback(None)
    setattr(trainer, method, arm.step)
    state = trainer.state
    outcome = Outcome(
        parameters(trainer.model),
        begun,
        {
            "optimizer": trainer.optimizer.state_dict()["state"] if trainer.optimizer else {},
            "schedule": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler else {},
            "global_step": state.global_step,
            "flos": float(state.total_flos),
            "tokens": state.num_input_tokens_seen,
        },
        timeless(state.log_history),
        said,
        error,
    )
    return outcome, arm, trainer


def sweep(
    make: Make,
    method: str,
    number: int,
    *,
    exact: bool = True,
    limit: float | None = None,
    times: int | None = 1,
    phase: str | None = None,
    protect: Callable[[Any], Any] = oomkit.transformers.protect,
) -> Counter[str]:
    """An error at each of some allocations of one call: the run must be what it is without.

    Args:
        make: makes a trainer.
        method: that is called.
        number: of the call.
        exact: compared with the plain run; else, bit for bit, with one in the same slices.
        limit: of differences, by the largest update; by default what single precision explains,
            and 0 in the same slices.
        times: how many allocations fail in a row.
        phase: of the allocations.
        protect: of oomkit.
    """
    if limit is None:
        limit = SINGLE if exact else 0.0
    reference, _, _ = run(make, plain, method, number)
    healthy, arm, _ = run(make, protect, method, number, {"nth": 2**40, "phase": phase})
    assert reference.error is None, reference.error
    assert not differences(reference, healthy, 0.0)
    assert arm.seen > 0, "the call allocates nothing"
    seen: Counter[str] = Counter()
    for nth in places(arm.seen):
        fault = {"nth": nth, "times": times, "phase": phase}
        outcome, failed, trainer = run(make, protect, method, number, fault)
        assert failed.fired, f"allocation {nth} of {arm.seen} did not come"
        if not exact:
            reference = _in_the_same_slices(make, trainer, method)
        found = differences(reference, outcome, limit)
        assert not found, f"an error at allocation {nth} of {arm.seen}: {found}; {outcome.said}"
        split = any("accumulation=1->" in line for line in outcome.said)
        seen["split" if split else "repeated"] += 1
    return seen


def _in_the_same_slices(make: Make, trainer: Any, method: str) -> Outcome:
    """A run without an error whose calls are split as those of another one were.

    Args:
        make: makes a trainer.
        trainer: of the other run.
        method: of which there was an error.
    """
    records = [
        record
        for record in oomkit.transformers.records(trainer)
        if record.label is not None and record.label.endswith(method)
    ]
    whole = {r.step: (r.batch_size or 0,) for r in records if r.accumulation_steps == 1}
    (count,) = {r.accumulation_steps for r in records} - {1}

    def protect(made: Any) -> Any:
        return oomkit.transformers.protect(made, accumulation_steps=count)

    outcome, _, _ = run(make, protect, method, slices=whole)
    return outcome
