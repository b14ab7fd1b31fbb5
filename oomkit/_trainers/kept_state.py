"""Sizes in a checkpoint of transformers' Trainer, which is imported here and nowhere else."""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any

from . import names
from .calls import calls_of

__all__ = ["begin", "sizes_class"]

_NAME = "OomkitSizes"


def begin(trainer: Any) -> None:
    """A training begins, perhaps from a checkpoint.

    Args:
        trainer: protected.
    """
    for each in trainer.callback_handler.callbacks:
        if type(each).__name__ == _NAME:
            each.of(trainer)  # transformers makes a new one to restore its state
    kept = (trainer.state.stateful_callbacks or {}).get(_NAME)
    sizes = kept.get("attributes", {}).get("sizes", {}) if isinstance(kept, dict) else {}
    for call in calls_of(trainer):
        call.begins(trainer)
        if call.name in sizes and not call.sizes()["signatures"]:  # else its own are newer
            call.load_sizes(sizes[call.name])


@functools.cache
def sizes_class() -> Any:
    """The callback, which is of transformers' classes. ImportError where these are not there."""
    try:
        module: Any = importlib.import_module("transformers.trainer_callback")
        callback, exportable = module.TrainerCallback, module.ExportableState
    except (ImportError, AttributeError):
        raise names.missing("transformers", "TrainerCallback and ExportableState") from None

    class OomkitSizes(callback, exportable):  # type: ignore[misc, valid-type]
        """Writes sizes to trainer_state.json, from which a resumed training takes them."""

        def __init__(self) -> None:
            self.sizes: dict[str, Any] = {}
            self._trainer: weakref.ref[Any] | None = None

        def of(self, trainer: Any) -> Any:
            """The same, bound to its trainer."""
            self._trainer = weakref.ref(trainer)
            return self

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Of an update whose calls have not all come, nothing is kept."""
            trainer = None if self._trainer is None else self._trainer()
            for call in [] if trainer is None else calls_of(trainer):
                if call.window is not None:
                    call.window.close()

        def state(self) -> dict[str, Any]:
            trainer = None if self._trainer is None else self._trainer()
            if trainer is not None:
                self.sizes = {call.name: call.sizes() for call in calls_of(trainer)}
            return {"args": {}, "attributes": {"sizes": self.sizes}}

    return OomkitSizes
