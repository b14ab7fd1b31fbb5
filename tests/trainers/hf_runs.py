"""Runs of trainers of transformers and TRL, and sweeps of errors over one of their calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from runs import (
    MODES,
    SINGLE,
    Arm,
    Forks,
    Outcome,
    differences,
    listening,
    parameters,
    timeless,
)

import oomkit
import oomkit.transformers

Make = Callable[[], Any]

SCORES = "_get_per_token_logps_and_entropies"  # of TRL's online trainers, beside the loss


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
    trainer.args.include_num_input_tokens_seen = "all"
    trainer.args.optim_args = "momentum=0.9"  # of SGD, that there is a state
    trainer.remove_callback(transformers.PrinterCallback)
    begun = parameters(trainer.model)
    arm = Arm(getattr(trainer, method), number, fault, slices, lambda: _state(trainer))
    with_arm = _beside_losses(trainer, arm) if method == SCORES else arm
    setattr(trainer, method, with_arm)
    predict, predicted = trainer.prediction_step, []
    trainer.prediction_step = lambda *args, **kwargs: _noted(predicted, predict(*args, **kwargs))
    error: BaseException | None = None
    with listening() as said:
        try:
            train(trainer)
        except (oomkit.OomkitError, RuntimeError) as raised:
            error = raised.with_traceback(None)
    trainer.prediction_step = predict
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
            "predictions": predicted,
        },
        timeless(state.log_history),
        said,
        error,
    )
    return outcome, arm, trainer


def _beside_losses(trainer: Any, arm: Arm) -> Callable[..., Any]:
    """An arm for calls without gradients that no loss makes: each loss has scores of its own."""
    loss, losses = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        losses.append(None)
        try:
            return loss(*args, **kwargs)
        finally:
            losses.pop()

    def scores(*args: Any, **kwargs: Any) -> Any:
        return (arm.step if losses else arm)(*args, **kwargs)

    trainer.compute_loss = compute_loss
    return scores


def _noted(noted: list[Any], result: Any) -> Any:
    noted.append(result)
    return result


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
    limit: float = SINGLE,
    times: Sequence[int | None] = MODES,
    phase: str | None = None,
    protect: Callable[[Any], Any] = oomkit.transformers.protect,
) -> Counter[str]:
    """An error at each of some allocations of one call: the run must be what it is without.

    It is that of the plain run up to what the order of sums explains, and bit for bit that of
    a run without an error in the same slices, unless there was another error where oomkit made
    earlier calls again, and says so. Where memory does not come back, it ends in `OutOfMemory`,
    and the call has changed nothing, but for gradients that it says are cleared.

    Args:
        make: makes a trainer.
        method: that is called.
        number: of the call.
        exact: compared with the plain run, too, not with one in the same slices alone.
        limit: of differences from the plain run, by the largest update.
        times: how many allocations fail in a row; None: all from there on.
        phase: of the allocations.
        protect: of oomkit.
    """
    forks = Forks(times, {"phase": phase})

    def work() -> tuple[Any, ...]:
        outcome, arm, trainer = run(make, protect, method, number, forks)
        counts = counts_of(trainer, method)[: arm.calls]
        assert outcome.error or len(counts) == arm.calls, (counts, arm.calls)
        return outcome, arm.counts, counts

    reference, _, undisturbed = run(make, plain, method, number)
    adds_up = undisturbed.args.gradient_accumulation_steps > 1
    healthy, counted, _ = forks.run(work)
    learns = counted.learns and method not in ("prediction_step", SCORES)
    assert reference.error is None, reference.error
    counted = reference.rest["flos"] or hasattr(undisturbed, "num_generations")  # TRL: none there
    assert counted and all(map(reference.rest.get, ("optimizer", "schedule", "tokens")))
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
        found = differences(reference, outcome, limit) if exact else []
        assert not found, f"{where}: {found}; {outcome.said}"
        split = any(count > 1 for _, count in counts)
        if split and counts not in same:
            same[counts], _ = in_the_same_slices(make, method, counts, learns)
        seen["split" if split else "repeated"] += 1
        if any("in smaller micro-batches than before" in line for line in outcome.said):
            assert adds_up, f"{where}: {outcome.said}"
            seen["smaller"] += 1  # another error was in an earlier call that was made again
            continue
        assert not any("not bit for bit" in line for line in outcome.said), outcome.said
        # Metrics of a call that fails in its backward are those of its whole forward.
        logged = SINGLE if split and phase == "backward" else None
        found = differences(same[counts] if split else reference, outcome, 0.0, logged)
        assert not found, f"{where}, beside the same slices: {found}; {outcome.said}"
        seen["again"] += any("were made again" in line for line in outcome.said)
    return seen


def counts_of(trainer: Any, method: str) -> tuple[tuple[int, int], ...]:
    """Rows and micro-batches of each call, those of training before those of evaluation.

    Args:
        trainer: that was protected.
        method: that was called, or what it calls.
    """
    rows = trainer.args.per_device_train_batch_size  # where nobody had to count them
    named: dict[str, list[tuple[int, int]]] = {}
    for record in oomkit.transformers.records(trainer):
        counts = record.batch_size or rows, record.accumulation_steps
        named.setdefault((record.label or "").rpartition(".")[-1], []).append(counts)
    of_loss: list[tuple[int, int]] = named.get("compute_loss", [])
    return tuple(named.get(method, [] if method == SCORES else of_loss))


def in_the_same_slices(
    make: Make,
    method: str,
    counts: tuple[tuple[int, int], ...],
    learns: bool,
    protect: Callable[..., Any] = oomkit.transformers.protect,
) -> tuple[Outcome, Any]:
    """A run without an error whose calls are split as those of another one were; and its trainer.

    Args:
        make: makes a trainer.
        method: of which there was an error.
        counts: of the other run.
        learns: whether its first split call has gradients, by which a split is proven: then
            that one is split by an option.
        protect: of oomkit.
    """
    first = next(count for _, count in counts if count > 1) if learns else 1
    forced = {}
    for call, (rows, count) in enumerate(counts, 1):
        if count != first:
            ends = [rows * at // count for at in range(count + 1)]
            forced[call] = tuple(b - a for a, b in itertools.pairwise(ends))

    def protected(made: Any) -> Any:
        protect(made, accumulation_steps=first, evaluation=method != "training_step")
        if SCORES in vars(made):  # the others stay whole
            delattr(made, SCORES if method != SCORES else "compute_loss")
        return made

    outcome, _, made = run(make, protected, method, slices=forced)
    return outcome, made
