"""The Optuna backend of transformers' `hyperparameter_search`, with trials protected."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .. import _C
from . import run as _hpo_run
from . import study as _hpo_study

# Where a Trainer and its callbacks keep what a trial made.
_TRAINER_HOLDS = ("model_wrapped", "model", "optimizer", "lr_scheduler")
_CALLBACKS_HOLD = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_OPTIMIZE = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")


def _modules() -> tuple[Any, Any]:
    try:
        utils = importlib.import_module("transformers.trainer_utils")
        searches = importlib.import_module("transformers.hyperparameter_search")
    except ImportError as error:
        raise ImportError(
            "oomkit.optuna.hyperparameter_search() needs transformers: install it with "
            "`pip install transformers`"
            f"{_C.see('missing-package')}"
        ) from error
    return utils, searches.OptunaBackend


def _let_go(trainer: Any) -> None:
    """Everything that a trial leaves in its trainer; the next one makes its own."""
    for name in _TRAINER_HOLDS:
        setattr(trainer, name, None)
    handler = getattr(trainer, "callback_handler", None)
    for name in _CALLBACKS_HOLD:
        if hasattr(handler, name):
            setattr(handler, name, None)
    trainer.accelerator.clear()


@contextlib.contextmanager
def _searching(trainer: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    backend = trainer.hp_search_backend
    for name, value in attributes.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        trainer.hp_search_backend = backend


def search(
    protect: Callable[..., Any],
    trainer: Any,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    *,
    hp_name: Callable[[Any], str] | None = None,
    study: Any = None,
    oom: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    utils, backend = _modules()
    optuna = _hpo_study.real_optuna()
    if trainer.model_init is None:
        raise RuntimeError(
            "hyperparameter_search() needs a Trainer with model_init=, which makes the model of "
            "each trial"
            f"{_C.see('options')}"
        )
    if trainer.args.world_size > 1 or _hpo_run.is_distributed():
        raise RuntimeError(
            "oomkit.optuna.hyperparameter_search() runs in one process: with several, use "
            "trainer.hyperparameter_search(backend='optuna', catch=...)"
            f"{_C.see('optuna')}"
        )
    if options.pop("backend", "optuna") != "optuna":
        raise ValueError(
            f"oomkit.optuna.hyperparameter_search() knows backend='optuna' only{_C.see('options')}"
        )
    optimize = {name: options.pop(name) for name in _OPTIMIZE if name in options}
    if study is None:
        several = isinstance(direction, list)
        where = {"directions": direction} if several else {"direction": direction}
        study = optuna.create_study(**where, **options)
    elif options:
        raise TypeError(
            f"hyperparameter_search() got study= and {', '.join(options)}, which are for a new one"
            f"{_C.see('options')}"
        )
    more = {} if oom is None else dict(oom)
    attributes = {
        "hp_search_backend": utils.HPSearchBackend.OPTUNA,
        "hp_space": backend().default_hp_space if hp_space is None else hp_space,
        "hp_name": hp_name,
        "compute_objective": compute_objective or utils.default_compute_objective,
    }
    with _searching(trainer, attributes):
        study.optimize(protect(_objective(trainer), **more), n_trials=n_trials, **optimize)
    if len(study.directions) == 1:
        best = study.best_trial
        return utils.BestRun(str(best.number), best.value, best.params)
    return [utils.BestRun(str(t.number), t.values, t.params) for t in study.best_trials]


def _objective(trainer: Any) -> Callable[[Any], Any]:
    def objective(trial: Any) -> Any:
        trainer.objective = None
        try:
            trainer.train(trial=trial)
            if getattr(trainer, "objective", None) is None:
                trainer.objective = trainer.compute_objective(trainer.evaluate())
            return trainer.objective
        finally:
            _let_go(trainer)

    return objective
