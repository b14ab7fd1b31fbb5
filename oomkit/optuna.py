"""Hyper-parameter search that learns the memory boundary, with Optuna 4 or 5.

>>> import optuna
>>> from oomkit.optuna import prune_on_oom
>>> @prune_on_oom(on_oom="auto")
... def objective(trial):
...     return train(lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True))
>>> optuna.create_study().optimize(objective, n_trials=50)

Optuna is imported when it is first needed, never with `import oomkit`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from . import _C
from ._hpo import run as _hpo_run
from ._hpo import study as _hpo_study
from ._hpo import values as _hpo_values
from ._hpo.batch import BatchPlan, Training, suggest_batch, trained
from ._hpo.mlflow import Option as _MlflowOption
from ._hpo.mlflow import RunWatch
from ._hpo.model import MemoryModel, hopeless_trial, is_hopeless
from ._hpo.run import PASSING, Outcome, log
from .memory import _parse_budget

__all__ = [
    "BatchPlan",
    "MemoryModel",
    "Training",
    "constraints",
    "hyperparameter_search",
    "objective",
    "prune_on_oom",
    "suggest_batch",
    "tell",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_Config = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None

_Ladder = str | Sequence[str]

_RETRY = "oom_retry_of"
_PROTECTED = "_oomkit_protected"


def constraints(trial: Any) -> tuple[float]:
    """constraints(trial) -> (float,)

    For `constraints_func=` of Optuna 4's samplers: what `prune_on_oom` has found of a trial.

    Peak over budget, less one: up to 0 the trial fits. 0 for a trial of which nothing is
    known. Optuna 5 needs it not: there the wrapper sets the constraint itself.
    """
    value = trial.user_attrs.get(_hpo_study.ATTRIBUTE)
    return (float(value) if isinstance(value, (int, float)) else 0.0,)


class _Wrapper:
    """The options of one `prune_on_oom`, and what it does with a trial."""

    def __init__(
        self,
        on_oom: str,
        config: _Config,
        budget: int | None,
        penalty: Any,
        retries: int,
        memory: MemoryModel | None,
        mlflow: _MlflowOption,
        threads: str,
        ladder: int,
    ) -> None:
        self.ladder = ladder
        self.on_oom = on_oom
        self.config = config
        self.budget = budget
        self.penalty = penalty
        self.retries = retries
        self.memory = memory
        self.mlflow = mlflow
        self.threads = threads
        self.policies = _hpo_study.Policies(on_oom)
        self.left_behind = False  # by an error that passed: its frames live with it

    def run(
        self, objective: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        optuna = _hpo_study.real_optuna()
        trial = _trial_of(args, kwargs)
        study = getattr(trial, "study", None)
        with _hpo_study.turn(study, self.threads):
            policy = self.policies.of(study)
            if self.left_behind:
                _hpo_run.release()
            # From here to its own end a trial may leave by an error of any kind.
            self.left_behind = True
            outcome = self._attempts(optuna, objective, args, kwargs, trial, study)
            self.left_behind = False
            raised, result = self._finish(optuna, outcome, trial, study, policy)
            del outcome  # it may hold the error, whose traceback will hold this frame
            if not raised:
                return result
            try:
                # No error is being handled here, so none becomes its __context__.
                raise result
            finally:
                del result

    def _attempts(
        self,
        optuna: Any,
        objective: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trial: Any,
        study: Any,
    ) -> Outcome:
        """Runs the objective, again when what failed was not the trial's own size."""
        if self.memory is not None and callable(self.config):
            config = self._configuration(trial)
            if self.memory.check(trial, config, budget=self.budget, prune=False):
                return Outcome(hopeless_trial()(), True, None, None, None, None, None, None)
        attempt = 0
        while True:
            watch = RunWatch(trial, self.mlflow)
            keep = self.on_oom == "raise"
            outcome = _hpo_run.run(
                objective, args, kwargs, optuna.TrialPruned, self.budget, keep, self.ladder
            )
            if outcome.kind is None:
                watch.finished(outcome.peak)
                return outcome
            again = (
                outcome.kind in PASSING
                and attempt < self.retries
                and _RETRY not in trial.user_attrs
                and not _has_reported(trial, study)
            )
            watch.out_of_memory(outcome.kind, outcome.peak, again)
            if not again:
                return outcome
            attempt += 1
            log.warning(
                "trial=%d oom_kind=%s retry=%d/%d: there was room for %s, so the trial "
                "is run again",
                trial.number,
                outcome.kind,
                attempt,
                self.retries,
                outcome.message,
            )

    def _configuration(self, trial: Any) -> dict[str, Any]:
        config = self.config(trial) if callable(self.config) else self.config or {}
        return _hpo_values.configuration(trial.params, config)

    def _configuration_of_oom(self, trial: Any) -> dict[str, Any]:
        """A config= that fails must not hide the out-of-memory that it describes."""
        try:
            return self._configuration(trial)
        except Exception as error:  # the user's, of any kind
            log.warning("trial=%d config= failed: %r", trial.number, error)
            return _hpo_values.configuration(trial.params, {})

    def _finish(
        self, optuna: Any, outcome: Outcome, trial: Any, study: Any, policy: Any
    ) -> tuple[bool, Any]:
        """Marks the trial. (True, what to raise) or (False, what to return)."""
        hopeless = is_hopeless(outcome.value)
        if not hopeless:
            self._mark(outcome, trial, policy)
        if outcome.kind is None and not hopeless:
            return outcome.raised, outcome.value
        text = str(outcome.value) if hopeless else f"OOM: {outcome.message}"
        violation = outcome.violation
        if hopeless:
            violation = trial.user_attrs.get(_hpo_study.ATTRIBUTE)
            text = trial.user_attrs.get("memory_prediction", text)
            self._constrain(trial, policy, violation)
        log.warning(
            "trial=%d oom_kind=%s peak_memory_bytes=%s budget_bytes=%s on_oom=%s",
            trial.number,
            "predicted" if hopeless else outcome.kind,
            outcome.peak,
            outcome.budget,
            self.on_oom,
        )
        if self.on_oom == "raise" and not hopeless:
            return True, outcome.value
        if outcome.kind in PASSING:
            return False, self._not_its_own(outcome, trial, study)
        if policy is not None and policy.penalize:
            return False, policy.penalty(study, self.penalty, violation)
        return True, optuna.TrialPruned(text)

    def _mark(self, outcome: Outcome, trial: Any, policy: Any) -> None:
        """Attributes and constraint. A finished trial takes none, so it is done here."""
        found: dict[str, Any] = {}
        if outcome.kind is not None:
            found["oom"] = True
            found["oom_kind"] = outcome.kind
            found["oom_message"] = outcome.message
            found["oom_location"] = outcome.location
            found["oom_config"] = self._configuration_of_oom(trial)
            if outcome.needed is not None:
                found["memory_needed_bytes"] = outcome.needed
        if outcome.peak is not None:
            found["peak_memory_gb"] = outcome.peak / 1e9
            found["peak_memory_bytes"] = outcome.peak
        if outcome.budget is not None:
            found["memory_budget_bytes"] = outcome.budget
        violation = outcome.violation
        if outcome.kind is not None and outcome.kind not in PASSING:
            violation = self._predicted(outcome, trial, violation)
        if violation is not None:
            found[_hpo_study.ATTRIBUTE] = violation
        try:
            for name, value in found.items():
                trial.set_user_attr(name, _hpo_values.plain(value))
            self._constrain(trial, policy, violation)
        except _hpo_study.real_optuna().exceptions.UpdateFinishedTrialError:
            log.debug("trial=%d was told by its objective", trial.number)

    def _predicted(self, outcome: Outcome, trial: Any, violation: float | None) -> float | None:
        """What failed is known to need more than was asked for: a larger prediction is better."""
        predicted = trial.user_attrs.get("memory_predicted_bytes")
        if predicted is None or not outcome.budget or violation is None:
            return violation
        return max(violation, float(predicted) / outcome.budget - 1)

    def _constrain(self, trial: Any, policy: Any, violation: float | None) -> None:
        if policy is not None and policy.constraints:
            # On every trial or on none: at the border where nothing was measured.
            value = 0.0 if violation is None else violation
            trial.set_constraint(_hpo_study.CONSTRAINT, value)

    def _not_its_own(self, outcome: Outcome, trial: Any, study: Any) -> Any:
        """A trial that failed for lack of others' memory: no sampler may learn from it.

        Optuna takes a trial that returns no number for failed and goes on.
        """
        again = _RETRY not in trial.user_attrs and self.retries > 0 and study is not None
        again = again and _has_reported(trial, study)
        if again:
            study.enqueue_trial(trial.params, user_attrs={_RETRY: trial.number})
        log.warning(
            "trial=%d ran out of memory for a reason that is not its size "
            "(oom_kind=%s): it is told as failed, which teaches the sampler nothing%s",
            trial.number,
            outcome.kind,
            ", and its parameters are queued again" if again else "",
        )
        many = 1 if study is None else len(study.directions)
        return math.nan if many == 1 else [math.nan] * many


def _trial_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        if hasattr(value, "set_user_attr") and hasattr(value, "suggest_float"):
            return value
    raise TypeError(
        "prune_on_oom() expected the objective to be called with a trial, as "
        "study.optimize(objective) does"
        f"{_C.see('options')}"
    )


def _has_reported(trial: Any, study: Any) -> bool:
    """Whether values were reported: a second run could not report them again."""
    if study is None or not hasattr(study, "get_trials"):
        return False
    return bool(study.get_trials(deepcopy=False)[trial.number].intermediate_values)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        expected = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ValueError(
            f"prune_on_oom() expected {name} to be {expected}, got {value!r}{_C.see('options')}"
        )


def _check_objective(fn: object) -> None:
    if not callable(fn):
        raise TypeError(
            f"prune_on_oom() expected a callable, got {type(fn).__name__!r}{_C.see('options')}"
        )
    code = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__
    if inspect.isclass(fn):
        raise TypeError(
            f"prune_on_oom() cannot wrap the class {fn.__qualname__}: wrap an object of it, or "
            "decorate its __call__"
            f"{_C.see('decoration')}"
        )
    if inspect.iscoroutinefunction(code) or inspect.isgeneratorfunction(code):
        raise TypeError(
            f"prune_on_oom() cannot wrap an async or a generator function{_C.see('decoration')}"
        )
    if _is_protected(fn):
        # The outer one would take the inner one's TrialPruned for the user's, in a trial that fits.
        raise TypeError(
            "prune_on_oom() got an objective that is protected already: give its options there"
            f"{_C.see('decoration')}"
        )


def _is_protected(fn: Any) -> bool:
    """Also one inside decorators that use functools.wraps, and objects by their __call__."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return any(getattr(one, _PROTECTED, False) for one in (fn, type(fn).__call__))


@overload
def prune_on_oom(
    fn: _F,
    /,
    *,
    on_oom: str = ...,
    config: _Config = ...,
    budget: int | str | None = ...,
    penalty: Any = ...,
    retries: int = ...,
    memory: MemoryModel | None = ...,
    mlflow: _MlflowOption = ...,
    threads: str = ...,
    ladder: _Ladder = ...,
) -> _F: ...
@overload
def prune_on_oom(
    *,
    on_oom: str = ...,
    config: _Config = ...,
    budget: int | str | None = ...,
    penalty: Any = ...,
    retries: int = ...,
    memory: MemoryModel | None = ...,
    mlflow: _MlflowOption = ...,
    threads: str = ...,
    ladder: _Ladder = ...,
) -> Callable[[_F], _F]: ...
def prune_on_oom(
    fn: Any = None,
    /,
    *,
    on_oom: str = "prune",
    config: _Config = None,
    budget: int | str | None = None,
    penalty: Any = None,
    retries: int = 1,
    memory: MemoryModel | None = None,
    mlflow: _MlflowOption = "auto",
    threads: str = "wait",
    ladder: _Ladder = (),
) -> Any:
    """prune_on_oom(fn=None, /, *, on_oom='prune', config=None, budget=None, penalty=None,
                 retries=1, memory=None, mlflow='auto', threads='wait', ladder=())

    An objective whose trials may run out of memory without ending the study.

    On out-of-memory everything that the trial held is freed, the trial gets the attributes
    `oom`, `oom_kind`, `oom_config`, `peak_memory_gb` (decimal) and `peak_memory_bytes`, and is
    pruned. Trials that finish get the same peaks. Every trial gets `memory_constraint`, its
    peak over the budget less one, and with Optuna 5 a constraint of that value; with Optuna 4
    pass `constraints_func=oomkit.optuna.constraints` to the sampler. All other errors pass.

    `oom_kind` is "capacity"; "host" (memory of the process); "fragmentation" (the bytes were
    there, in pieces) or "contention" (others hold them). The last two are no property of the
    configuration: the trial is run again, then reported as failed, which no sampler learns from.

    Parameters
    ----------
    fn : callable
        The objective, `(trial) -> float`, or a method or an object that is called so.
    on_oom : {'prune', 'penalize', 'auto', 'raise'}
        'penalize': the trial completes with the worst value so far (or `penalty`). 'auto': that
        for the samplers that read completed trials only (GP, NSGA-II and III, CMA-ES), else
        'prune'. 'raise': the error passes, once the trial is marked.
    config : mapping or callable, optional
        More for `oom_config` than `trial.params`; a callable gets the trial.
    budget : int or str, optional
        Bytes that constraints are relative to. By default `limit_memory`'s limit, else what
        the device has for this process, else the memory of the host.
    penalty : float, sequence of float or callable, optional
        The value of 'penalize'; a callable gets the study.
    retries : int
        How often a trial is run again after "fragmentation" or "contention".
    memory : MemoryModel, optional
        Predicts before the trial, where `config` is a callable that suggests everything.
    mlflow : {'auto', True, False} or callable
        'auto': the trial's own run, where MLflow is imported, gets `oom_error` and the peaks, and
        is ended. A callable gets the trial and returns the id of its run.
    threads : {'wait', 'refuse'}
        With n_jobs > 1 trials take turns, or are refused.
    ladder : 'auto' or tuple of str
        What steps of a trial that give no `ladder=` themselves may do beyond smaller
        micro-batches, as in `oomkit.auto_batch`. By default nothing: a trial on a slow rung
        costs the study more than a pruned one.
    """
    _check_choice("on_oom", on_oom, ("prune", "penalize", "auto", "raise"))
    _check_choice("threads", threads, ("wait", "refuse"))
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(
            f"prune_on_oom() expected retries to be an int >= 0, got {retries!r}{_C.see('options')}"
        )
    if memory is not None and not callable(config):
        raise ValueError(
            "prune_on_oom(memory=...) expected config to be a callable that suggests what memory "
            f"depends on, got {config!r}; or call memory.check(trial) inside the objective"
            f"{_C.see('options')}"
        )
    wrapper = _Wrapper(
        on_oom,
        config,
        None if budget is None else _parse_budget(budget),
        penalty,
        retries,
        memory,
        mlflow,
        threads,
        _C._ladder_mask(ladder),
    )

    def decorate(objective: Any) -> Any:
        _check_objective(objective)

        @functools.wraps(objective, updated=())
        def protected(*args: Any, **kwargs: Any) -> Any:
            return wrapper.run(objective, args, kwargs)

        setattr(protected, _PROTECTED, True)
        return protected

    return decorate if fn is None else decorate(fn)


def objective(
    build: Callable[[Any, int], Training] | None = None,
    /,
    *,
    batch: Sequence[int] = (8, 512),
    max_micro: int | None = None,
    report: bool = True,
    memory: MemoryModel | None = None,
    on_oom: str = "auto",
    **options: Any,
) -> Any:
    """objective(build=None, /, *, batch=(8, 512), max_micro=None, report=True, memory=None,
              on_oom='auto', **options)

    An objective that searches the effective batch size and leaves the micro-batch to oomkit.

    `build(trial, batch_size)` suggests the rest and returns a `Training` whose batches have
    that size. Each trial's step is split as memory asks for; what does not fit even in micro-
    batches of one row is handled as by `prune_on_oom(on_oom=on_oom, **options)`. Trials get
    the attributes `micro_batch_size`, `accumulation_steps` and `oom_retries`.

    Parameters
    ----------
    batch : (low, high) or a longer sequence of choices
        The one space of effective batch sizes.
    report : bool
        Report the value after each epoch and prune when the study's pruner says so.
    memory : MemoryModel, optional
        Checks, before the training, whether a micro-batch of one row is hopeless.
    """
    sizes = tuple(batch)

    def decorate(build: Callable[[Any, int], Training]) -> Any:
        plain = trained(build, sizes, max_micro, report, memory, options.get("budget"))
        return prune_on_oom(plain, on_oom=on_oom, **options)

    return decorate if build is None else decorate(build)


def tell(study: Any, trial: Any, objective: Callable[[Any], Any], **options: Any) -> Any:
    """tell(study, trial, objective, **options) -> FrozenTrial

    For ask and tell: runs the objective with an asked trial and tells the study how it ended.

    Out-of-memory is reported as `prune_on_oom(objective, **options)` would raise or return it; an
    objective that is protected already is taken as it is, and takes no options.
    A trial that the objective itself has reported is left as it is. Other errors are reported as
    failed, and pass.
    """
    optuna = _hpo_study.real_optuna()
    states = optuna.trial.TrialState
    if options or not _is_protected(objective):
        objective = prune_on_oom(objective, **options)
    state, values = states.FAIL, None
    try:
        values = objective(trial)
        state = None if _are_numbers(values) else states.FAIL
    except optuna.TrialPruned:
        state = states.PRUNED
    finally:
        told = values if state is None else None
        frozen = study.tell(trial, told, state=state, skip_if_finished=True)
    return frozen


def _are_numbers(values: Any) -> bool:
    rows = values if isinstance(values, (list, tuple)) else [values]
    return all(row is not None and not math.isnan(row) for row in rows)


def hyperparameter_search(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """hyperparameter_search(trainer, hp_space=None, compute_objective=None, n_trials=20,
                          direction='minimize', *, hp_name=None, study=None, oom=None, **optuna)

    `trainer.hyperparameter_search(backend="optuna")` of transformers, with trials protected.

    transformers makes its objective itself, so one trial out of memory ends the search. `oom`
    are options of `prune_on_oom`, `study` an existing study; other arguments as there.
    """
    from ._hpo.transformers import search

    return search(prune_on_oom, trainer, *args, **kwargs)
