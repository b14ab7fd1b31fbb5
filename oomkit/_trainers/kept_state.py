"""Sizes in a checkpoint of transformers' Trainer: imported with the first `protect`."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from .calls import calls_of

__all__ = ["OomkitSizes"]


class OomkitSizes(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Writes sizes to trainer_state.json, and reads them there when a training is resumed."""

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}
        self._trainer: weakref.ref[Any] | None = None

    def of(self, trainer: Any) -> OomkitSizes:
        """The same, bound to its trainer."""
        self._trainer = weakref.ref(trainer)
        return self

    def state(self) -> dict[str, Any]:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            self.sizes = {call.name: call.sizes() for call in calls_of(trainer)}
        return {"args": {}, "attributes": {"sizes": self.sizes}}

    @staticmethod
    def begin(trainer: Any) -> None:
        """A training begins, perhaps from a checkpoint.

        Args:
            trainer: protected.
        """
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, OomkitSizes):
                each.of(trainer)  # transformers makes a new one to restore its state
        kept = (trainer.state.stateful_callbacks or {}).get("OomkitSizes")
        sizes = kept.get("attributes", {}).get("sizes", {}) if isinstance(kept, dict) else {}
        for call in calls_of(trainer):
            call.seen = trainer.state
            if call.name in sizes:
                call.load_sizes(sizes[call.name])
