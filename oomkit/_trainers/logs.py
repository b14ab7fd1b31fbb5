"""`Trainer.log` with figures of oomkit."""

from __future__ import annotations

from typing import Any

from .calls import calls_of
from .placed import Placed

__all__ = ["Log"]

_GIB = 2**30


class Log(Placed):
    """Stands in a trainer's dictionary in place of `log`.

    Args:
        trainer: held weakly.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer, "log")
        self._last = 0.0  # when the last step that was logged began

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        trainer = self._owner()
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
