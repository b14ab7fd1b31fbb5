"""A callback for Lightning: the steps of a module survive out-of-memory.

>>> import lightning
>>> import oomkit.lightning
>>> trainer = lightning.Trainer(callbacks=[oomkit.lightning.AutoBatch()])

Lightning is imported when `AutoBatch` is first asked for, never with this module.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _C
from ._trainers.module_calls import ModuleCall
from ._trainers.module_log import ModuleLog

__all__ = ["AutoBatch"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_TESTED = "Lightning 2.6.6"


def _checked_steps(steps: Sequence[str]) -> tuple[str, ...]:
    steps = (steps,) if isinstance(steps, str) else tuple(steps)
    for name in steps:
        if name not in _STEPS:
            raise ValueError(
                f"AutoBatch() expected steps to be some of {_STEPS}, got {name!r}"
                f"{_C.see('options')}"
            )
    return steps


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(_C.auto_batch).parameters
    for name in options:
        if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(
                f"AutoBatch() got {name}=, expected steps= or an option of oomkit.auto_batch"
                f"{_C.see('options')}"
            )
    _C.auto_batch(lambda batch: None, **options)  # it knows what they may be
    return options


def _imported() -> Any:
    """Lightning's module, by the name that the program uses."""
    for name in _NAMES:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(_NAMES[0])
    except ImportError as error:
        raise ImportError(
            "oomkit.lightning needs Lightning: install it with `pip install oomkit[lightning]`"
            f"{_C.see('missing-package')}"
        ) from error


class _Parts:
    """What `AutoBatch` does, whichever package its base class is of."""

    def __init__(self, steps: Sequence[str], options: dict[str, Any], pytorch: Any) -> None:
        self.steps, self.options = _checked_steps(steps), _checked_options(options)
        try:
            self.refusal = pytorch.utilities.exceptions.MisconfigurationException
            self.single = pytorch.strategies.SingleDeviceStrategy
            self.finder = pytorch.callbacks.BatchSizeFinder
            self.is_overridden = pytorch.utilities.model_helpers.is_overridden
        except AttributeError as error:
            raise ImportError(
                f"oomkit.lightning uses a name that Lightning {pytorch.__version__} does not have "
                f"({error}): install {_TESTED}, which is tested{_C.see('missing-package')}"
            ) from error
        self.calls: dict[str, ModuleCall] = {}
        self.log: ModuleLog | None = None
        self.sizes: dict[str, Any] = {}

    def check(self, trainer: Any, module: Any, kind: type) -> None:
        """MisconfigurationException for what cannot be protected."""
        if sum(isinstance(each, kind) for each in trainer.callbacks) > 1:
            raise ValueError(
                "AutoBatch is in the callbacks of this trainer twice: give it one"
                f"{_C.see('trainers')}"
            )
        if any(isinstance(each, self.finder) for each in trainer.callbacks):
            raise self.refusal(
                "AutoBatch and BatchSizeFinder in one trainer: with AutoBatch no size ever runs "
                "out of memory, so that the finder would take its last trial; leave it out"
                f"{_C.see('trainers')}"
            )
        if not isinstance(trainer.strategy, self.single):
            raise self.refusal(
                f"AutoBatch works on one device, got {type(trainer.strategy).__name__}: pass "
                "devices=1 and no strategy to the Trainer"
                f"{_C.see('trainers')}"
            )
        for name in self.steps:
            if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
                raise self.refusal(
                    f"AutoBatch needs the batch as an argument, got {type(module).__name__}.{name}"
                    "(dataloader_iter): take batch, batch_idx"
                    f"{_C.see('trainers')}"
                )

    def put(self, trainer: Any, module: Any) -> None:
        self.remove()
        names = [name for name in self.steps if self.is_overridden(name, module)]
        if not names:
            return
        self.log = ModuleLog(module)
        self.log.put()
        for name in names:
            known = self.sizes.get(name)
            call = ModuleCall(module, trainer, name, self.log, self.options, known)
            self.calls[name] = call
            call.put()

    def remove(self) -> None:
        for name, call in self.calls.items():
            known = call.sizes()
            if known is not None:
                self.sizes[name] = known
            call.remove()
        self.calls.clear()
        if self.log is not None:
            self.log.remove()
            self.log = None

    def known(self) -> dict[str, Any]:
        now = {name: call.sizes() for name, call in self.calls.items()}
        return {**self.sizes, **{name: known for name, known in now.items() if known is not None}}


if TYPE_CHECKING:

    class AutoBatch:
        """A `lightning.pytorch.Callback` that protects the steps of the module.

        Args:
            steps: which of them.
            options: of `oomkit.auto_batch`.
        """

        def __init__(self, *, steps: Sequence[str] = _STEPS, **options: Any) -> None: ...
        @property
        def records(self) -> tuple[_C.StepRecord, ...]: ...


@functools.cache
def _class(pytorch: Any) -> Any:
    class AutoBatch(pytorch.Callback):  # type: ignore[misc]
        """AutoBatch(*, steps=("training_step", "validation_step", ...), **options)

        A callback that makes the steps of a module survive running out of memory.

        Parameters
        ----------
        steps : sequence of str
            Which of the module's steps; those that it does not have are left out.
        **options
            Of `oomkit.auto_batch`.

        Attributes
        ----------
        records : tuple of StepRecord
            What happened in the steps of the present run, step by step.
        """

        def __init__(self, *, steps: Sequence[str] = _STEPS, **options: Any) -> None:
            super().__init__()
            self._parts = _Parts(steps, options, pytorch)
            self._records: tuple[_C.StepRecord, ...] = ()

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._parts.check(trainer, pl_module, AutoBatch)
            self._parts.put(trainer, pl_module)
            self._records = ()

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._records = self.records
            self._parts.remove()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._records = self.records
            self._parts.remove()

        # Of a second one, check() has more to say than Lightning, which looks behind a wrapper
        # for what has a state of its own.
        @functools.wraps(pytorch.Callback.state_dict)
        def state_dict(self) -> dict[str, Any]:
            return {"sizes": self._parts.known()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._parts.sizes = dict(state_dict.get("sizes", {}))
            for name, call in self._parts.calls.items():
                call.load_sizes(self._parts.sizes.get(name))

        @property
        def records(self) -> tuple[_C.StepRecord, ...]:
            calls = self._parts.calls.values()
            return self._records or tuple(r for call in calls for r in call.records)

    AutoBatch.__module__, AutoBatch.__qualname__ = __name__, "AutoBatch"
    return AutoBatch


def __getattr__(name: str) -> Any:
    if name != "AutoBatch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class(_imported())
