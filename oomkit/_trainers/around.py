"""What stands around a trainer's step whose `compute_loss` is protected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .calls import copied, own
from .placed import Placed
from .window import Window

__all__ = ["Around", "can_stand"]

_STEP, _PREPARE = "training_step", "_prepare_inputs"


def can_stand(trainer: Any) -> bool:
    """Whether a trainer's step is one that can be run again: of transformers, or of TRL.

    Args:
        trainer: that is to be protected.
    """
    step = own(trainer, _STEP)
    known = _STEP not in vars(trainer) and step.__module__.startswith(("transformers.", "trl."))
    return known and not getattr(trainer.args, "activation_offloading", False)


def _kinds(trainer: Any) -> list[str]:
    """Devices on which autocast is on."""
    kinds = {"cpu", trainer.args.device.type}
    return [kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]


class Around(Placed):
    """Stands in place of `training_step`; the window learns of its calls here.

    Args:
        trainer: held weakly.
        window: of the protected `compute_loss`.
    """

    def __init__(self, trainer: Any, window: Window) -> None:
        super().__init__(trainer, _STEP)
        self.method: Callable[..., Any] = own(trainer, _STEP)
        self._window = window

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trainer, window = self._owner(), self._window
        if _kinds(trainer):  # a backward under autocast is another one
            window.close()
            return self.method(trainer, model, inputs, *args, **kwargs)

        def again(prepared: Any) -> Any:
            """The same step, of inputs that are prepared: what generates them does not run."""
            before = vars(trainer).get(_PREPARE)
            trainer._prepare_inputs = lambda _: copied(prepared)
            try:
                with contextlib.ExitStack() as stack:
                    for kind in _kinds(trainer):  # of the loss that failed
                        stack.enter_context(torch.autocast(kind, enabled=False))
                    return self.method(trainer, model, inputs, *args, **kwargs)
            finally:
                del trainer._prepare_inputs
                if before is not None:
                    trainer._prepare_inputs = before

        window.outer = again
        try:
            result = self.method(trainer, model, inputs, *args, **kwargs)
        except BaseException:
            window.close()
            raise
        finally:
            window.outer = None
        window.end(result)
        return result
