"""`self.log` of a Lightning module: once for each batch, whatever number of micro-batches."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _C
from .placed import Placed

__all__ = ["ModuleLog"]

_EXTREMES = {"min": min, "max": max}


class _Entry(NamedTuple):
    part: int  # number of the micro-batch
    value: Any
    weight: float
    positional: tuple[Any, ...]
    options: dict[str, Any]


def _is_metric(value: Any) -> bool:
    return hasattr(value, "_forward_cache") and hasattr(value, "compute")


def _by_call(noted: Sequence[_Entry]) -> list[list[_Entry]]:
    """What each call of a step's code has logged: one value of every micro-batch."""
    calls: list[list[_Entry]] = []
    made: Counter[int] = Counter()
    for entry in noted:
        if made[entry.part] == len(calls):
            calls.append([])
        calls[made[entry.part]].append(entry)
        made[entry.part] += 1
    return calls


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    total = sum(weights)
    if total <= 0.0:
        return values[-1]
    return sum(v * (w / total) for v, w in zip(values, weights, strict=True))


class ModuleLog(Placed):
    """Stands in a module's dictionary in place of `log`; a participant of its steps.

    Args:
        module: of Lightning; held weakly.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, "log")
        self._entries: dict[str, list[_Entry]] = {}
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
        if _is_metric(value):
            kept: Any = (value, value._forward_cache)
        else:
            kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
        now = _C.current()
        weight = now.weight if size is None else float(size)
        self._entries.setdefault(name, []).append(_Entry(now.index, kept, weight, args, kwargs))

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
        for name, noted in ((n, call) for n, each in entries.items() for call in _by_call(each)):
            args, kwargs = noted[-1].positional, dict(noted[-1].options)
            if len(noted) > 1 and kwargs.get("batch_size") is not None:
                kwargs["batch_size"] = sum(int(each.weight) for each in noted)
            self._pass_on(name, self._value(noted, kwargs, result), *args, **kwargs)

    def forget(self) -> None:
        """The call has ended in an error."""
        self._entries, self._collects = {}, False

    def _value(self, noted: list[_Entry], kwargs: dict[str, Any], result: Any) -> Any:
        values, weights = [each.value for each in noted], [each.weight for each in noted]
        if isinstance(values[-1], tuple):
            metric = values[-1][0]
            caches = [cache for _, cache in values]
            if len(noted) > 1 and all(isinstance(cache, torch.Tensor) for cache in caches):
                metric._forward_cache = _mean(caches, weights)
            return metric
        if len(noted) == 1:
            return values[0]
        reduce = kwargs.get("reduce_fx", "mean")
        kind = reduce.lower() if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
        if kind in _EXTREMES:
            return _EXTREMES[kind](values)
        if kind == "sum" or (set(weights) == {1.0} and _is_loss(sum(values), result)):
            return sum(values)
        return _mean(values, weights)


def _is_loss(value: Any, result: Any) -> bool:
    """Whether a sum over micro-batches is the loss that the call returns."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return False
    return bool(abs(float(loss) - float(value)) <= 1e-5 * abs(float(loss)))
