"""Runs of trainers of transformers and TRL, and sweeps of errors over one of their calls."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from runs import MODES, SINGLE, Arm, Forks, Outcome, differences, listening, parameters, timeless

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
    fault: dict[str, Any] | Forks | None = None,
    slices: dict[int, tuple[int, ...]] | None = None,
    train: Callable[[Any], Any] = lambda trainer: trainer.train(),
) -> tuple[Outcome, Arm, Any]:
    """One run, its arm and its trainer."""
    trainer = protect(make())
    trainer.remove_callback(transformers.PrinterCallback)
    begun = parameters(trainer.model)
    arm = Arm(getattr(trainer, method), number, fault, slices, lambda: _state(trainer))
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


def _state(trainer: Any) -> dict[str, Any]:
    """What a call that ends in an error leaves as it was."""
    named = dict(trainer.model.named_parameters())
    metrics = getattr(trainer, "_metrics", None) or {}
    numbers = {name: v for name, v in vars(trainer).items() if type(v) in (int, float)}
    return {
        "parameters": {name: p.detach().clone() for name, p in named.items()},
        "gradients": {n: p.grad.clone() for n, p in named.items() if p.grad is not None},
        "buffers": {name: b.clone() for name, b in trainer.model.named_buffers()},
        "stream": torch.get_rng_state(),
        "metrics": {m: {k: v[:] for k, v in each.items() if v} for m, each in metrics.items()},
        "training": [name for name, m in trainer.model.named_modules() if m.training],
        **numbers,
    }


def sweep(
    make: Make,
    method: str,
    number: int,
    *,
    exact: bool = True,
    limit: float | None = None,
    times: Sequence[int | None] = MODES,
    phase: str | None = None,
    protect: Callable[[Any], Any] = oomkit.transformers.protect,
) -> Counter[str]:
    """An error at each of some allocations of one call: the run must be what it is without.

    Where memory does not come back, it ends in `OutOfMemory`, and the call has changed nothing.

    Args:
        make: makes a trainer.
        method: that is called.
        number: of the call.
        exact: compared with the plain run; else, bit for bit, with one in the same slices.
        limit: of differences, by the largest update; by default what single precision explains,
            and 0 in the same slices.
        times: how many allocations fail in a row; None: all from there on.
        phase: of the allocations.
        protect: of oomkit.
    """
    if limit is None:
        limit = SINGLE if exact else 0.0
    forks = Forks(times, {"phase": phase})

    def work() -> tuple[Any, ...]:
        outcome, arm, trainer = run(make, protect, method, number, forks)
        return outcome, arm.counts, _counts(trainer, method)

    reference, _, _ = run(make, plain, method, number)
    healthy, _, _ = forks.run(work)
    assert reference.error is None, reference.error
    assert not differences(reference, healthy, 0.0)
    seen: Counter[str] = Counter()
    same: dict[Any, Outcome] = {}
    for fault, answer in forks.answers:
        where = f"an error at allocation {fault['nth']} of {forks.seen}, times={fault['times']}"
        assert isinstance(answer, tuple), f"{where}: {answer}"
        outcome, arm, counts = answer
        assert arm.fired, f"{where}: it did not come"
        if fault["times"] is None:
            seen[forks.ended(where, outcome, arm)] += 1
            continue
        if not exact:
            key = tuple(counts.items())
            if key not in same:
                same[key] = _in_the_same_slices(make, method, counts)
            reference = same[key]
        found = differences(reference, outcome, limit)
        assert not found, f"{where}: {found}; {outcome.said}"
        split = any(re.search(r"accumulation=1->(?!1 )", line) for line in outcome.said)
        seen["split" if split else "repeated"] += 1
    return seen


def _counts(trainer: Any, method: str) -> dict[int, tuple[int, int]]:
    """Rows and micro-batches of each call."""
    return {
        record.step: (record.batch_size or 0, record.accumulation_steps)
        for record in oomkit.transformers.records(trainer)
        if record.label is not None and record.label.endswith(method)
    }


def _in_the_same_slices(make: Make, method: str, counts: dict[int, tuple[int, int]]) -> Outcome:
    """A run without an error whose calls are split as those of another one were.

    Args:
        make: makes a trainer.
        method: of which there was an error.
        counts: of the other run.
    """
    first = next(count for _, count in counts.values() if count > 1)
    forced = {}
    for step, (rows, count) in counts.items():
        if count != first:
            ends = [rows * at // count for at in range(count + 1)]
            forced[step] = tuple(b - a for a, b in itertools.pairwise(ends))

    def protect(made: Any) -> Any:
        return oomkit.transformers.protect(made, accumulation_steps=first)

    outcome, _, _ = run(make, protect, method, slices=forced)
    return outcome
