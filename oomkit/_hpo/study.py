"""What Optuna's versions, samplers and the history of a study allow."""

from __future__ import annotations

import importlib
import logging
import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from .. import _C
from .._C import OomkitWarning

log = logging.getLogger("oomkit")

CONSTRAINT = "oomkit.memory"
ATTRIBUTE = "memory_constraint"

# Samplers that read trials that completed, and no others: a pruned one teaches them nothing.
_READS_COMPLETE = ("GPSampler", "NSGAIISampler", "NSGAIIISampler", "CmaEsSampler")
_TAKES_CONSTRAINTS = ("TPESampler", "GPSampler", "NSGAIISampler", "NSGAIIISampler")


def real_optuna() -> Any:
    """The installed Optuna, imported when it is first needed."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ImportError(
            "oomkit.optuna needs Optuna 4 or 5: install it with `pip install optuna`"
            f"{_C.see('missing-package')}"
        ) from error


def major() -> int:
    return int(real_optuna().__version__.split(".")[0])


def say(message: str) -> None:
    """A warning about how the wrapper is used, at no line of ours."""
    warnings.warn(f"oomkit: {message}", OomkitWarning, stacklevel=2)


def sampler_name(study: Any) -> str:
    """The name of the Optuna sampler that a study's is, or derives from; "" for others."""
    samplers = real_optuna().samplers
    sampler = study.sampler
    inner = getattr(sampler, "_base_sampler", None)
    if isinstance(sampler, samplers.PartialFixedSampler) and inner is not None:
        sampler = inner
    for name in (*_TAKES_CONSTRAINTS, "CmaEsSampler"):
        kind = getattr(samplers, name, None)
        if kind is not None and isinstance(sampler, kind):
            return name
    return ""


class Policy:
    """What is done for the trials of one study; decided at its first trial here.

    constraints: whether each trial gets the constraint itself (Optuna 5).
    penalize: whether a trial that ran out of memory completes with a penalty.
    """

    def __init__(self, study: Any, on_oom: str) -> None:
        self.seen = study.sampler  # a study may be given another one later
        self.sampler = sampler_name(study)
        self.single = len(study.directions) == 1
        self.constraints = False
        self.penalize = on_oom == "penalize" or (on_oom == "auto" and self._should_penalize())
        if on_oom == "prune" and self.sampler in _READS_COMPLETE:
            say(
                f"{self.sampler} reads completed trials only, so trials that are pruned for "
                'memory teach it nothing: use prune_on_oom(on_oom="auto")'
                f"{_C.see('optuna')}"
            )
        if major() >= 5:
            self.constraints = self._constraints_of_5(study)
        else:
            self._check_4(study)

    def _should_penalize(self) -> bool:
        if self.sampler == "TPESampler":
            # Optuna 4 fails there once pruned trials, which have no values, are the most.
            return not self.single and major() < 5
        return self.sampler in _READS_COMPLETE

    def _constraints_of_5(self, study: Any) -> bool:
        if self.sampler == "CmaEsSampler":
            return False  # it warns at each trial that it does not use them
        without = [
            trial.number for trial in _finished(study) if CONSTRAINT not in trial.constraints
        ]
        if without:
            say(
                f"trial {without[0]} of the study {study.study_name!r} has no constraint "
                f"{CONSTRAINT!r}, and samplers need it on every trial or on none: this study "
                'goes on without it. With on_oom="penalize" samplers learn from the value; a new '
                "study would have the constraint"
                f"{_C.see('optuna')}"
            )
        return not without

    def _check_4(self, study: Any) -> None:
        if getattr(study.sampler, "_constraints_func", None) is None:
            if self.sampler in _TAKES_CONSTRAINTS:
                log.info(
                    "%s(constraints_func=oomkit.optuna.constraints) would learn "
                    "how far each trial was from the memory budget",
                    self.sampler,
                )
            return
        without = [
            trial.number
            for trial in _finished(study)
            if trial.system_attrs.get("constraints") is None
        ]
        if not without:
            return
        told = (
            f"trial {without[0]} of the study {study.study_name!r} has no constraints, and "
            f"{self.sampler or 'the sampler'} is given constraints_func="
        )
        if self.sampler == "GPSampler":
            raise ValueError(
                f"prune_on_oom(): {told}, which fails with trials that have none. Leave out "
                'constraints_func= and use on_oom="penalize", or begin a new study'
                f"{_C.see('optuna')}"
            )
        say(
            f"{told}: it treats that trial as infeasible. A new study would have all constraints"
            f"{_C.see('optuna')}"
        )

    def penalty(self, study: Any, given: Any, violation: float | None) -> Any:
        """The value, or values, of a trial that ran out of memory and completes."""
        if given is not None:
            value = given(study) if callable(given) else given
            return value if self.single else list(value)
        values = [
            trial.values
            for trial in _finished(study)
            if trial.values is not None
            and not trial.user_attrs.get("oom")
            and not trial.user_attrs.get("oom_predicted")
            and trial.state.name == "COMPLETE"
        ]
        maximize = real_optuna().study.StudyDirection.MAXIMIZE
        worst = [
            self._worst([row[i] for row in values], direction == maximize, violation or 0.0)
            for i, direction in enumerate(study.directions)
        ]
        return worst[0] if self.single else worst

    def _worst(self, values: list[float], maximize: bool, violation: float) -> float:
        sign = -1.0 if maximize else 1.0
        known = [sign * value for value in values if math.isfinite(value)]
        if not known:
            return sign * math.inf
        worst = max(known)
        if self.sampler == "CmaEsSampler":
            # It ranks by value alone: how far it was from fitting is put there.
            worst += (1 + violation) * max(worst - min(known), 1e-3 * abs(worst), 1e-9)
        return sign * worst


def _finished(study: Any) -> list[Any]:
    states = real_optuna().trial.TrialState
    trials: list[Any] = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
    return trials


class Policies:
    """The policies of a wrapper's studies. Holds no study alive."""

    def __init__(self, on_oom: str) -> None:
        self._on_oom = on_oom
        self._known: WeakKeyDictionary[Any, Policy] = WeakKeyDictionary()

    def of(self, study: Any) -> Policy | None:
        if study is None or not hasattr(study, "get_trials"):
            return None  # a FixedTrial, or rank > 0 of a distributed one
        policy = self._known.get(study)
        if policy is None or policy.seen is not study.sampler:
            policy = self._known[study] = Policy(study, self._on_oom)
        return policy


# --- threads --------------------------------------------------------------------------

_turn = threading.Lock()  # guards the three names below
_free = threading.Condition(_turn)
_running: list[tuple[int, Any]] = []  # (thread, study) of the trials in progress
_told: WeakSet[Any] = WeakSet()  # the studies; a number would be the next study's too


@contextmanager
def turn(study: Any, threads: str) -> Iterator[None]:
    """Runs one trial at a time: the threads of a process share allocator and peak counters.

    A trial inside another of the same thread goes ahead. One of another study waits for
    nothing: the trial in progress may be waiting for it.
    """
    me = threading.get_ident()
    with _free:
        while any(thread != me for thread, _ in _running):
            other = next(study for thread, study in _running if thread != me)
            if threads == "refuse" or other is not study:
                raise RuntimeError(
                    "prune_on_oom(): another trial runs in another thread of this process, and "
                    "they share one allocator and its counters, so neither peaks nor "
                    "out-of-memory errors can be attributed to one of them. Use n_jobs=1, in "
                    "several processes with one storage"
                    f"{_C.see('optuna')}"
                )
            if study not in _told:
                _told.add(study)
                say(
                    "n_jobs > 1: the threads of a process share one allocator, so trials take "
                    "turns. For trials side by side use several processes with one storage"
                    f"{_C.see('optuna')}"
                )
            _free.wait()
        _running.append((me, study))
    try:
        yield
    finally:
        with _free:
            _running.remove((me, study))
            _free.notify_all()
