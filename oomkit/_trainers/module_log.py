"""`self.log` of a Lightning module: once for each batch, whatever number of micro-batches."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from .. import _C
from .log_joins import Entry, Joins, by_call, joined, limit_of, said
from .placed import Placed

__all__ = ["ModuleLog"]


def _is_metric(value: Any) -> bool:
    return hasattr(value, "_forward_cache") and hasattr(value, "compute")


class ModuleLog(Placed):
    """Stands in a module's dictionary in place of `log`; a participant of its steps.

    Args:
        module: of Lightning; held weakly.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, "log")
        self._entries: dict[str, list[Entry]] = {}
        self._joins = Joins()
        self._collects = False
        self.steps: set[types.CodeType] = set()  # code of the protected steps

    @property
    def collects(self) -> bool:
        """Whether a protected step runs."""
        return self._collects

    def _in_a_step(self) -> bool:
        """Whether a step has called, though none was begun: then a backward replays it."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self.steps:
            frame = frame.f_back
        return frame is not None

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._collects:
            if not self._in_a_step():
                self._pass_on(name, value, *args, **kwargs)
            return  # else the call has logged it
        size = kwargs.get("batch_size")
        part, count, rows, weight, is_proof = _C._micro()
        limit = limit_of(value) if is_proof and not _is_metric(value) else None
        if _is_metric(value):
            kept: Any = (value, value._forward_cache)
        else:
            kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
        weight = weight if size is None else float(size)
        self._entries.setdefault(name, []).append(
            Entry(part, count, rows, weight, kept, args, kwargs, limit)
        )

    def _pass_on(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        module = self._owner()
        if self._replaced is not None:
            self._replaced(name, value, *args, **kwargs)
        elif module is not None:
            type(module).log(module, name, value, *args, **kwargs)

    # --- a participant ---

    def save(self) -> dict[str, int]:
        """What restore() puts back."""
        return {name: len(entries) for name, entries in self._entries.items()}

    def restore(self, lengths: dict[str, int]) -> None:
        """What was logged since `lengths` was saved goes."""
        for name, entries in list(self._entries.items()):
            gone = entries[lengths.get(name, 0) :]
            if gone and gone[0].limit is not None:
                self._joins.note(name, gone)
            del entries[lengths.get(name, 0) :]
            if not entries:
                del self._entries[name]

    # --- around a call ---

    def begin(self) -> None:
        """From now on what is logged is collected."""
        self._entries.clear()
        self._collects = True

    def end(self, result: Any) -> None:
        """One value of each name, for the whole batch.

        Args:
            result: of the call.
        """
        entries, self._entries, self._collects = self._entries, {}, False
        self._joins.settle(type(self._owner()).__name__)
        for name, each in entries.items():
            for at, noted in enumerate(by_call(each)):
                args, kwargs = noted[-1].positional, dict(noted[-1].options)
                if len(noted) > 1 and kwargs.get("batch_size") is not None:
                    kwargs["batch_size"] = sum(int(entry.weight) for entry in noted)
                self._pass_on(name, self._value(name, at, noted, result), *args, **kwargs)

    def forget(self) -> None:
        """The call has ended in an error."""
        self._entries, self._collects = {}, False
        self._joins.forget()

    def _value(self, name: str, at: int, noted: list[Entry], result: Any) -> Any:
        value = noted[-1].value
        if isinstance(value, tuple):
            metric = value[0]
            caches = [entry._replace(value=entry.value[1]) for entry in noted]
            if len(noted) > 1 and all(isinstance(each.value, torch.Tensor) for each in caches):
                metric._forward_cache = joined("mean", caches)
            return metric
        if len(noted) == 1:
            return value
        kind = said(noted[-1].options)
        weights = {each.weight for each in noted}
        if kind == "mean" and weights == {1.0} and _is_loss(joined("sum", noted), result):
            kind = "sum"
        return joined(self._joins.kind(name, at, kind), noted)


def _is_loss(value: Any, result: Any) -> bool:
    """Whether a sum over micro-batches is the loss that the call returns."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return False
    return bool(abs(float(loss) - float(value)) <= 1e-5 * abs(float(loss)))
