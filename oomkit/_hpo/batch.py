"""The effective batch is searched, the micro-batch finds itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _C
from . import study as _hpo_study
from . import values as _hpo_values

if TYPE_CHECKING:
    from .model import MemoryModel


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """An effective batch size, and the micro-batches that it is begun with."""

    effective: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Training:
    """What `objective` trains: a step, its batches, and what is made of it.

    `step` is called with each batch (with its parts, where that is a tuple or a list), and
    is made an `auto_batch` step with `options` unless it is one. `batches` is called for each
    epoch, or iterated. `evaluate()` returns the objective's value.
    """

    step: Callable[..., Any]
    batches: Callable[[], Iterable[Any]] | Iterable[Any]
    evaluate: Callable[[], Any]
    epochs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def suggest_batch(
    trial: Any,
    low: int = 8,
    high: int = 512,
    *,
    name: str = _hpo_values.EFFECTIVE,
    log: bool = True,
    choices: Sequence[int] | None = None,
    max_micro: int | None = None,
) -> BatchPlan:
    """suggest_batch(trial, low=8, high=512, *, name='effective_batch_size', log=True,
                  choices=None, max_micro=None) -> BatchPlan

    Suggest the effective batch size, from one space for all trials of the study.

    How much of it memory holds at a time is no parameter: `auto_batch` finds it. `max_micro` is
    a size known to fit, from which `accumulation` for the first step follows. Spaces that
    change from trial to trial (by model) are refused for choices by Optuna and keep samplers
    from modelling ranges, so that is warned of.
    """
    for key, value in (("low", low), ("high", high), ("max_micro", max_micro)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(
                f"suggest_batch() expected {key} to be an int, got {type(value).__name__!r}"
                f"{_C.see('options')}"
            )
    if not 1 <= low <= high or (max_micro is not None and max_micro < 1):
        raise ValueError(
            "suggest_batch() expected 1 <= low <= high and max_micro of at least 1, got "
            f"low={low}, high={high}, max_micro={max_micro}"
            f"{_C.see('options')}"
        )
    if choices is not None:
        effective = int(trial.suggest_categorical(name, list(choices)))
    else:
        effective = int(trial.suggest_int(name, low, high, log=log))
    _check_static(trial, name)
    most = effective if max_micro is None else min(max_micro, effective)
    accumulation = math.ceil(effective / most)
    return BatchPlan(effective, math.ceil(effective / accumulation), accumulation)


def _check_static(trial: Any, name: str) -> None:
    study = getattr(trial, "study", None)
    if study is None or not hasattr(study, "get_trials"):
        return
    mine = trial.distributions.get(name)
    for other in reversed(study.get_trials(deepcopy=False)[: trial.number]):
        if name in other.distributions:
            if other.distributions[name] != mine:
                _hpo_study.say(
                    f"suggest_batch(): {name!r} is {mine} in trial {trial.number} and "
                    f"{other.distributions[name]} in trial {other.number}: samplers model "
                    "only what is the same in all trials"
                    f"{_C.see('optuna')}"
                )
            return


def trained(
    build: Callable[[Any, int], Training],
    sizes: Sequence[int],
    max_micro: int | None,
    report: bool,
    memory: MemoryModel | None,
    budget: Any,
) -> Callable[[Any], Any]:
    """The objective of `oomkit.optuna.objective`, not protected yet."""

    def objective(trial: Any) -> Any:
        plan = (
            suggest_batch(trial, *sizes, max_micro=max_micro)
            if len(sizes) == 2
            else suggest_batch(trial, choices=sizes, max_micro=max_micro)
        )
        training = build(trial, plan.effective)
        if memory is not None:
            memory.check(trial, {"batch_size": 1}, budget=budget)
        return _train(trial, training, plan, report)

    objective.__name__ = getattr(build, "__name__", "objective")
    objective.__doc__ = build.__doc__
    return objective


def _train(trial: Any, training: Training, plan: BatchPlan, report: bool) -> Any:
    step: Any = training.step
    if not isinstance(step, _C.Step):
        start = {"accumulation_steps": plan.accumulation, **training.options}
        step = _C.auto_batch(step, **start)
    before = _last_step(step.records)  # a step that trials share has theirs
    value = None
    single = len(trial.study.directions) == 1 if hasattr(trial, "study") else True
    try:
        for epoch in range(training.epochs):
            batches = training.batches
            for batch in batches() if callable(batches) else batches:
                step(*batch) if isinstance(batch, (tuple, list)) else step(batch)
            value = training.evaluate()
            if report and single:
                trial.report(float(value), epoch)
                if trial.should_prune():
                    raise _hpo_study.real_optuna().TrialPruned(f"pruned after epoch {epoch}")
    finally:
        _record(trial, tuple(record for record in step.records if record.step > before))
    return value


def _last_step(records: tuple[Any, ...]) -> int:
    return max((record.step for record in records), default=0)


def _record(trial: Any, records: tuple[Any, ...]) -> None:
    if not records:
        return
    last = records[-1]
    trial.set_user_attr("oom_retries", sum(record.ooms for record in records))
    if last.micro_batch_size is not None:
        trial.set_user_attr("micro_batch_size", last.micro_batch_size)
        trial.set_user_attr("accumulation_steps", last.accumulation_steps)
