"""The protected methods of a Lightning module, each in place of the module's own."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import _C
from .module_log import ModuleLog
from .placed import Placed

__all__ = ["ModuleCall"]

_EARLIER = 2  # what _C._where() says in a micro-batch that others follow


class _Hooks:
    """What a LightningOptimizer calls around its step, in the last micro-batch only."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._own = before, after

    def before(self) -> None:
        if _C._where() != _EARLIER:
            self._own[0]()

    def after(self) -> None:
        if _C._where() != _EARLIER:
            self._own[1]()


class ModuleCall(Placed):
    """Stands in a module's dictionary in place of one of its steps.

    Args:
        module: of Lightning; held weakly.
        trainer: of Lightning; held weakly.
        name: of the step.
        log: of the module.
        options: of `auto_batch`.
        sizes: what fits, of an earlier run.
    """

    def __init__(
        self,
        module: Any,
        trainer: Any,
        name: str,
        log: ModuleLog,
        options: Mapping[str, Any],
        sizes: dict[str, Any] | None,
    ) -> None:
        super().__init__(module, name)
        self._trainer = weakref.ref(trainer)
        self._log, self._options = log, options
        self._sizes = sizes
        self._step: Any = None  # made when there are optimizers
        self._unbound = self._replaced is None
        self._function = getattr(type(module), name) if self._unbound else self._replaced
        log.steps.add(self.__code__)

    # Lightning looks at both to tell what a step takes.

    @property
    def __wrapped__(self) -> Any:
        return self._function.__get__(self._owner()) if self._unbound else self._function

    @property
    def __code__(self) -> Any:
        step = self.__wrapped__
        while isinstance(step, functools.partial):
            step = step.func
        return step.__code__

    @property
    def is_manual(self) -> bool:
        module: Any = self._owner()
        return self._name == "training_step" and not module.automatic_optimization

    def _made(self) -> Any:
        trainer: Any = self._trainer()
        module: Any = self._owner()
        given = self._options.get("participants", ())
        given = list(given) if isinstance(given, (list, tuple)) else [given]
        options = {
            "label": f"{type(module).__name__}.{self._name}",
            **self._options,
            "participants": (*given, self._log),
        }
        parameters = list(inspect.signature(self.__wrapped__).parameters.values())
        if parameters and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD:
            options.setdefault("batch", parameters[0].name)
        if self.is_manual:
            progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            options["participants"] += (progress, *schedulers)
            options.setdefault("optimizer", list(trainer.optimizers))
        step = _C.auto_batch(self._function, **options)
        if self._sizes is not None:
            step.load_state_dict(self._sizes)
        return step

    @contextmanager
    def _counted_once(self) -> Iterator[None]:
        """Lightning counts a step of an optimizer in the last micro-batch alone."""
        trainer: Any = self._trainer()
        optimizers = trainer.strategy._lightning_optimizers if self.is_manual else []
        kept = [(each, each._on_before_step, each._on_after_step) for each in optimizers]
        for optimizer, before, after in kept:
            hooks = _Hooks(before, after)
            optimizer._on_before_step, optimizer._on_after_step = hooks.before, hooks.after
        try:
            yield
        finally:
            for optimizer, before, after in kept:
                optimizer._on_before_step, optimizer._on_after_step = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._step is None:
            self._step = self._made()
        if self._unbound:
            args = (self._owner(), *args)
        if self._log.collects:  # another step has called this one
            return self._function(*args, **kwargs)
        self._log.begin()
        try:
            with self._counted_once():
                result = self._step(*args, **kwargs)
        except BaseException:
            self._log.forget()
            raise
        self._log.end(result)
        return result

    @property
    def records(self) -> tuple[_C.StepRecord, ...]:
        return () if self._step is None else tuple(self._step.records)

    def sizes(self) -> dict[str, Any] | None:
        """What fits, as plain values."""
        return self._sizes if self._step is None else self._step.state_dict()

    def load_sizes(self, sizes: dict[str, Any] | None) -> None:
        """What fits, of a checkpoint."""
        self._sizes = sizes
        if self._step is not None and sizes is not None:
            self._step.load_state_dict(sizes)
