"""Evaluated batches of several processes, whose losses are divided by the items of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _C
from .calls import Call, own
from .rows import shapes

__all__ = ["OfProcesses"]

_COUNT = "_get_num_items_in_batch"


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextlib.contextmanager
def _counted_once(trainer: Any, batch: Any) -> Iterator[None]:
    """The items of the batch are added up over all processes here, not in each micro-batch.

    Args:
        trainer: of several processes.
        batch: of this one.
    """
    gather, counts = trainer.accelerator.gather, own(trainer, _COUNT)
    found: list[torch.Tensor] = []

    def count(batches: list[Any], device: Any, gathers: Callable[[Any], Any]) -> Any:
        with _set(trainer.accelerator, "gather", gathers):
            return counts(trainer, batches, device)

    def noted(items: torch.Tensor) -> Any:
        found.append(items)
        return gather(items)

    # Others wait for it, whatever the budget says.
    total = _C.exempt(lambda: count([batch], trainer.args.device, noted))
    if not found:  # nothing was counted, or each process counts for itself
        yield
        return
    mine, whole = found[0], shapes(batch)

    def of_part(batches: list[Any], device: Any) -> Any:
        """So that the mean of the parts' losses by their items is the whole batch's."""
        if shapes(batches[0]) == whole:
            return total
        part = count(batches, device, lambda items: items)
        return torch.where(mine > 0, part * total / mine.clamp(min=1), total)

    with _set(trainer, _COUNT, of_part):
        yield


class OfProcesses(Call):
    """Stands in place of `prediction_step` where there are several processes."""

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with _counted_once(self._owner(), inputs):
            return super().__call__(model, inputs, *args, **kwargs)
