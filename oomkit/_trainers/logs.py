"""`Trainer.log` with figures of oomkit."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from .calls import calls_of

__all__ = ["Log"]

_GIB = 2**30


class Log:
    """Stands in a trainer's dictionary in place of `log`.

    Args:
        trainer: held weakly.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._replaced = vars(trainer).get("log")
        self._last = 0.0  # when the last step that was logged began

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer()
        call = next((c for c in calls_of(trainer) if c.is_training), None)
        recent = call.records if call is not None and "loss" in logs else ()
        new = [record for record in recent if record.started > self._last]
        if new:
            self._last = max(record.started for record in new)
            logs["oomkit/micro_batch"] = min(r.micro_batch_size or 0 for r in new)
            logs["oomkit/ooms"] = sum(r.ooms for r in new)
            logs["oomkit/peak_gib"] = max(r.peak_allocated or 0 for r in new) / _GIB
        if self._replaced is not None:
            return self._replaced(logs, *args, **kwargs)
        return type(trainer).log(trainer, logs, *args, **kwargs)

    def __reduce__(self) -> Any:
        """In a copy of the trainer: the `log` of that trainer, without oomkit."""
        if self._replaced is None:
            return getattr, (self._trainer(), "log")
        return operator.getitem, ((self._replaced,), 0)

    def put(self) -> None:
        """In place of the trainer's own."""
        self._trainer().log = self

    @staticmethod
    def remove(trainer: Any) -> None:
        """The trainer's own again, if it was replaced."""
        log = vars(trainer).get("log")
        if isinstance(log, Log):
            del trainer.log
            if log._replaced is not None:
                trainer.log = log._replaced
