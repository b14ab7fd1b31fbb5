"""Trainers of transformers and TRL whose steps survive out-of-memory.

>>> import oomkit.transformers
>>> trainer = oomkit.transformers.protect(Trainer(...))
>>> trainer.train()

transformers is imported when `protect` is first called, never with this module.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal, TypeVar

from . import _C
from ._trainers import names, refusals
from ._trainers.around import Around, can_stand
from ._trainers.books import Books
from ._trainers.calls import Call, calls_of
from ._trainers.items import OfProcesses
from ._trainers.kept_state import begin, sizes_class
from ._trainers.logs import Log
from ._trainers.placed import placed_in
from ._trainers.scores import Scores, are_made_by

__all__ = ["protect", "records", "unprotect"]

_T = TypeVar("_T")

_OURS = ("batch", "static", "split", "join", "weight", "global_weight", "reduction", "backward")
_PLACES = ("training_step", "compute_loss")


def _is_trainer(trainer: Any) -> bool:
    module = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(trainer, module.Trainer)


def _checked(function: str, trainer: Any) -> None:
    names.installed()
    if not _is_trainer(trainer):
        what = f"the class {trainer.__name__}" if isinstance(trainer, type) else None
        raise TypeError(
            f"{function}() expected a Trainer of transformers, got "
            f"{what or repr(type(trainer).__name__)}"
            f"{_C.see('trainers')}"
        )


def _options(options: dict[str, Any], inexact: str) -> dict[str, Any]:
    known = [
        name
        for name, parameter in inspect.signature(_C.auto_batch).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _OURS
    ]
    for name in options:
        if name not in known:
            raise TypeError(
                f"protect() got {name}=, expected at, evaluation, inexact, log or an option of "
                f"auto_batch: {', '.join(known)}"
                f"{_C.see('options')}"
            )
    return {"verify": "warn", **options} if inexact == "warn" else dict(options)


def _overrides(trainer: Any, name: str) -> bool:
    """Whether a class that is not transformers' has a method of its own."""
    for each in type(trainer).__mro__:
        if name in vars(each):
            return not each.__module__.startswith("transformers.")
    return False


def _steps_itself(trainer: Any) -> bool:
    """Whether `training_step` is of a class that is neither transformers' nor TRL's."""
    for each in type(trainer).__mro__:
        if "training_step" in vars(each):
            return not each.__module__.startswith(("transformers.", "trl."))
    return False


def _place(trainer: Any) -> str:
    if _overrides(trainer, "_prepare_inputs") or _steps_itself(trainer):
        return "compute_loss"
    return "training_step"


def protect(
    trainer: _T,
    /,
    *,
    at: Literal["training_step", "compute_loss"] | None = None,
    evaluation: bool = True,
    inexact: Literal["error", "warn"] = "error",
    log: bool = False,
    **options: Any,
) -> _T:
    """protect(trainer, /, *, at=None, evaluation=True, inexact="error", log=False, **options)

    Make the training of a Trainer of transformers or TRL survive running out of memory.

    Parameters
    ----------
    trainer : transformers.Trainer
        Of any class, TRL's too. Attributes of this object are set; nothing else changes.
    at : {"training_step", "compute_loss"}, optional
        The method that is protected. By itself: `training_step`, or `compute_loss` where a
        class has its own `_prepare_inputs` (GRPO, RLOO) or its own `training_step`.
    evaluation : bool
        Whether evaluation and prediction are protected, too.
    inexact : {"error", "warn"}
        What is done where a split would not give what the whole batch gives: the whole batch
        runs, with what it needs in host memory, or `SplitError` before the update where that
        has no room; or, with "warn", the split with a warning.
    log : bool
        Whether `oomkit/micro_batch`, `oomkit/ooms` and `oomkit/peak_gib` are logged.
    **options
        Of `oomkit.auto_batch`, but those that say what the batch and the loss are.

    Returns
    -------
    The same trainer.
    """
    _checked("protect", trainer)
    if at is not None and at not in _PLACES:
        raise ValueError(
            f"protect() expected at to be {_PLACES} or None, got {at!r}{_C.see('options')}"
        )
    if inexact not in ("error", "warn"):
        raise ValueError(
            f"protect() expected inexact to be 'error' or 'warn', got {inexact!r}"
            f"{_C.see('options')}"
        )
    it: Any = trainer
    if getattr(it, "is_in_train", False):
        raise RuntimeError(
            "protect() was called while the trainer trains: call it before train()"
            f"{_C.see('trainers')}"
        )
    options = _options(options, inexact)
    names.check(it)
    place = at or _place(it)
    refusals.check(it, place)
    sizes = sizes_class()
    through_loss = place == "compute_loss" and _overrides(it, "_prepare_inputs")
    books = Books(it)
    before = calls_of(it)
    unprotect(it)
    calls = [Call(it, place, books, options, evaluation and through_loss, begin)]
    if evaluation and not through_loss:
        evaluates = OfProcesses if it.args.world_size > 1 else Call
        calls.append(evaluates(it, "prediction_step", books, options, False, begin))
    if are_made_by(it):
        calls.append(Scores(it, books, options, evaluation, begin))
    for call in calls:
        call.check(it)
    window = calls[0].window
    if place == "compute_loss" and window is not None and can_stand(it):
        Around(it, window).put()
    for call in calls:
        call.put()
        for known in before:
            if known.name == call.name:
                call.load_sizes(known.sizes())
    it.add_callback(sizes().of(it))
    if log:
        Log(it).put()
    return trainer


def unprotect(trainer: _T, /) -> _T:
    """unprotect(trainer, /)

    Take back what `protect` has set; a trainer that is not protected stays as it is.
    """
    _checked("unprotect", trainer)
    it: Any = trainer
    for each in placed_in(it):
        each.remove()
    it.remove_callback(sizes_class())
    return trainer


def records(trainer: Any, /) -> tuple[_C.StepRecord, ...]:
    """records(trainer, /) -> tuple of StepRecord

    What happened in the protected calls of a trainer: those of training, then of evaluation.
    """
    _checked("records", trainer)
    return tuple(record for call in calls_of(trainer) for record in call.records)
