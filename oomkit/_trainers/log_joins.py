"""What logged values of micro-batches make: as the code says, unless a proof shows another way."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _C

__all__ = ["Entry", "Joins", "by_call", "joined", "limit_of", "said"]

_EXTREMES = {"min": min, "max": max}
# What rounding explains, relative: as in results of steps.
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAME_IN_HALF = 5e-2  # with autocast, too
# The value of the batch, out of those of its micro-batches.
_BY_WEIGHTS, _BY_ROWS, _SUM = "mean", "mean over rows", "sum"


class Entry(NamedTuple):
    """One value of one micro-batch."""

    part: int  # number of the micro-batch
    of: int  # how many there are
    rows: int
    weight: float
    value: Any
    positional: tuple[Any, ...]
    options: dict[str, Any]
    limit: float | None  # in a proof: see limit_of()


def by_call(noted: Sequence[Entry]) -> list[list[Entry]]:
    """What each call of a step's code has logged: one value of every micro-batch."""
    calls: list[list[Entry]] = []
    made: Counter[int] = Counter()
    for entry in noted:
        if made[entry.part] == len(calls):
            calls.append([])
        calls[made[entry.part]].append(entry)
        made[entry.part] += 1
    return calls


def said(options: dict[str, Any]) -> str:
    """How a call of log() says that values become one."""
    reduce = options.get("reduce_fx", _BY_WEIGHTS)
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", _BY_WEIGHTS)
    return name.lower() if name.lower() in (*_EXTREMES, _SUM) else _BY_WEIGHTS


def joined(kind: str, noted: Sequence[Entry]) -> Any:
    """One value for the batch."""
    values = [each.value for each in noted]
    if kind in _EXTREMES:
        return _EXTREMES[kind](values)
    if kind == _SUM:
        return sum(values)
    weights = [each.rows if kind == _BY_ROWS else each.weight for each in noted]
    total = sum(weights)
    if total <= 0.0:
        return values[-1]
    return sum(v * (w / total) for v, w in zip(values, weights, strict=True))


def limit_of(value: Any) -> float:
    """How far values may be apart, relative, that are the same."""
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return _SAME_IN_HALF
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return _SAME.get(value.dtype if is_real else torch.float32, _SAME_IN_HALF)


class Joins:
    """What proofs have shown of a module's logs, call by call of `log`."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[str, int], Entry] = {}
        self._parts: dict[tuple[str, int], list[Entry]] = {}  # of the same rows as the whole
        self._fits: dict[tuple[str, int], list[str]] = {}
        self._warned: set[str] = set()

    def forget(self) -> None:
        """Runs of a proof that no longer count."""
        self._wholes.clear()
        self._parts.clear()

    def note(self, name: str, entries: list[Entry]) -> None:
        """One run of a proof is over.

        Args:
            entries: what it has logged with that name.
        """
        for at, noted in enumerate(by_call(entries)):
            whole = self._wholes.get((name, at))
            if noted[0].of == 1:
                self._wholes[name, at] = noted[0]
            elif len(noted) == noted[0].of and whole is not None:
                if sum(each.rows for each in noted) == whole.rows:
                    self._parts[name, at] = noted

    def settle(self, label: str) -> None:
        """A split is proven: what it shows. Warns once of a name that cannot be joined."""
        for key, parts in self._parts.items():
            whole = self._wholes[key]
            fits = _fitting(whole, parts)
            if fits is None:
                continue
            fits = [kind for kind in self._fits.get(key, fits) if kind in fits]
            self._fits[key] = fits
            if not fits:
                self._warn(key[0], label)
        self.forget()

    def kind(self, name: str, at: int, by_code: str) -> str:
        """How values become one: as the code says, where that fits or nothing does."""
        fits = self._fits.get((name, at), ())
        return by_code if not fits or by_code in fits else fits[0]

    def _warn(self, name: str, label: str) -> None:
        """Once of each name."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"oomkit: {label} logs {name!r}, of which values of micro-batches do not make the "
                "value of the batch: what is logged of split batches is another number. Log the "
                "metric object with on_epoch=True, or what is computed at the end of the epoch"
                f"{_C.see('trainers')}",
                _C.OomkitWarning,
                stacklevel=4,
            )


def _fitting(whole: Entry, parts: list[Entry]) -> list[str] | None:
    """Ways in which values of parts make that of the whole. None where that is not to be told."""
    numbers = [n for n in (_number(each.value) for each in (whole, *parts)) if n is not None]
    scale = max(map(abs, numbers), default=math.inf)
    if whole.limit is None or len(numbers) <= len(parts) or not math.isfinite(scale):
        return None
    kinds = dict.fromkeys((said(whole.options), _BY_WEIGHTS, _BY_ROWS, _SUM))
    return [
        kind
        for kind in kinds
        if abs(float(joined(kind, parts)) - numbers[0]) <= whole.limit * scale
    ]


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    return float(value)
