"""What a trial that ran out of memory leaves in MLflow."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from .. import _C

log = logging.getLogger("oomkit")

Option = str | bool | Callable[[Any], str | None]

_DEEPEST = 64


def _loaded(option: Option) -> Any:
    if option is False:
        return None
    if option == "auto":
        return sys.modules.get("mlflow")
    try:
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise ImportError(
            "prune_on_oom(mlflow=...) needs MLflow: install it with `pip install mlflow`"
            f"{_C.see('missing-package')}"
        ) from error


def _id(run: Any) -> str | None:
    return None if run is None else str(run.info.run_id)


def _last(mlflow: Any) -> str | None:
    """The run of this thread that ended last. Asking the server for it may fail.

    Inside a parent `last_active_run` tells the parent, so MLflow's own note is read first.
    """
    note: Any = getattr(mlflow.tracking.fluent, "_last_active_run_id", None)
    if hasattr(note, "get"):
        run: str | None = note.get()
        return run
    try:
        return _id(mlflow.last_active_run())
    except Exception as error:  # the tracking server's, of any kind
        log.debug("MLflow does not tell the last run: %s", error)
        return None


class RunWatch:
    """Finds the run that a trial logs to: made before the trial, asked when it has ended.

    Runs that were open before the trial belong to others, unless Optuna's `track_in_mlflow`
    opened one for this trial; they are neither ended nor written to. Nothing here raises.
    """

    def __init__(self, trial: Any, option: Option) -> None:
        self._trial = trial
        self._option = option
        mlflow = _loaded(option)
        self._open = None if mlflow is None else _id(mlflow.active_run())
        self._last = None if mlflow is None else _last(mlflow)

    def finished(self, peak: int | None) -> None:
        self._write(None, peak, end=False)

    def out_of_memory(self, kind: str, peak: int | None, again: bool) -> None:
        """`again`: the trial is run once more, in the same run unless it opens its own."""
        self._write(kind, peak, end=True, again=again)

    def _write(self, kind: str | None, peak: int | None, *, end: bool, again: bool = False) -> None:
        try:
            mlflow = _loaded(self._option)
            if mlflow is None:
                return
            run, still_open = self._find(mlflow)
            try:
                same = callable(self._option) or run == self._open
                if run is not None and not (again and same):
                    self._log(mlflow, run, kind, peak)
            finally:
                if end:
                    self._end(mlflow, still_open)
        except Exception as error:  # whatever it is: the trial's own outcome matters
            log.warning("MLflow did not take what a trial logs: %s", error)

    def _find(self, mlflow: Any) -> tuple[str | None, bool]:
        """The trial's run, and whether runs that the trial opened are still open."""
        active = _id(mlflow.active_run())
        opened = active is not None and active != self._open
        if callable(self._option):
            return self._option(self._trial), opened
        if self._open is not None and self._tracked() == self._open:
            return self._open, opened
        if opened:
            return active, True
        last = _last(mlflow)
        return (last if last != self._last else None), False

    def _tracked(self) -> Any:
        """The run that Optuna's `track_in_mlflow` opened for this trial."""
        study = getattr(self._trial, "study", None)
        if study is None:
            return None
        trial = study.get_trials(deepcopy=False)[self._trial.number]
        return trial.system_attrs.get("mlflow_run_id")

    @staticmethod
    def _log(mlflow: Any, run: str, kind: str | None, peak: int | None) -> None:
        # By the run's id: the fluent calls would open a run where there is none.
        client = mlflow.MlflowClient()
        if kind is not None:
            client.log_param(run, "oom_error", True)
            client.set_tag(run, "oom_kind", kind)
        if peak is not None:
            client.log_metric(run, "peak_memory_gb", peak / 1e9)
            client.log_metric(run, "peak_memory_bytes", peak)

    def _end(self, mlflow: Any, still_open: bool) -> None:
        """Ends what the trial left open. A `with` block has ended its run already."""
        for _ in range(_DEEPEST if still_open else 0):
            active = _id(mlflow.active_run())
            if active is None or active == self._open:
                return
            mlflow.end_run("FAILED")
