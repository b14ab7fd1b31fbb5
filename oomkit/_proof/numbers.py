"""How numbers among the results of micro-batches are joined, where the data of a proof tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from . import values

__all__ = ["BY_LOSS", "BY_ROWS", "Numbers"]

_LAST, _NO_NORM, _OF_ROWS = range(3)  # OOMKIT_FIGURE_*
BY_ROWS, BY_LOSS, _MET, _NO_LOSS = 4, 8, 16, 32
_BY_EITHER = BY_ROWS | BY_LOSS


class Numbers:
    """What one proof has shown of them, by place."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}
        self._decided: set[str] = set()  # those that this proof alone decides
        self._met: set[str] = set()  # all of them
        self._no_loss: set[str] = set()  # 0 in the place of losses that are added and were not

    def note(
        self,
        place: str,
        whole: Any,
        parts: Sequence[Any],
        weights: list[float] | None,
        rows: list[int],
        limit: float,
        has_gradient: Callable[[], bool],
    ) -> bool:
        """Notes one place. True where its number is what the parts' numbers make.

        Args:
            whole: what the whole has there.
            parts: what each part has there.
            weights: of the parts' losses; None where those are added.
            rows: of the parts.
            limit: what rounding explains, relative.
            has_gradient: whether the whole has one that is not 0.
        """
        value = values.number(whole)
        if value is not None:
            self._met.add(place)
        numbers = [n for n in map(values.number, parts) if n is not None]
        if value is None or len(numbers) < max(2, len(parts)):
            return False
        counts = isinstance(whole, int) or (
            isinstance(whole, torch.Tensor) and not whole.is_floating_point()
        )
        by_rows = sum(n * r for n, r in zip(numbers, rows, strict=True)) / sum(rows)
        by_loss = by_rows
        if weights is not None:
            by_loss = sum(n * w for n, w in zip(numbers, weights, strict=True) if w)
        joined = float(sum(numbers)) if counts else by_loss
        last = values.gap(value, numbers[-1]) <= limit
        as_loss = values.gap(value, joined) <= limit
        as_rows = not counts and values.gap(value, by_rows) <= limit
        of_rows, how = as_loss or as_rows, 0
        if not counts and as_loss != as_rows:
            how = BY_ROWS if as_rows else BY_LOSS
            if self._shown.get(place, how) & _BY_EITHER & ~how:
                return False  # two cuts of these rows do not agree
        how = how or self._shown.get(place, 0) & _BY_EITHER
        known = self._shown.get(place, _LAST) & 3
        if of_rows != last:
            self._shown[place] = how | (_OF_ROWS if of_rows else _LAST)
            self._decided.add(place)
        elif not any([value, *numbers]) and has_gradient():
            self._shown[place] = how | max(known, _NO_NORM)
        elif how:
            self._shown[place] = how | known
        if counts and last and not of_rows:
            return len({value, *numbers}) == 1  # one number, as that of a step: kept
        return of_rows and (not counts or not any(numbers[:-1]))

    def is_no_loss(self, place: str, whole: Any, parts: Sequence[Any]) -> None:
        """What stands in the place of a loss that is added, and is 0 where that loss is not."""
        real = isinstance(whole, float) or (
            isinstance(whole, torch.Tensor) and whole.is_floating_point()
        )
        if real and all(values.number(number) == 0.0 for number in (whole, *parts)):
            self._no_loss.add(place)

    def is_no_norm(self, place: str) -> None:
        """It is not 0 where gradients are."""
        self._shown.setdefault(place, _NO_NORM)

    def with_known(self, known: dict[str, int], label: str) -> dict[str, int]:
        """What a site knows of all places, with what this proof has shown.

        Raises:
            SplitError: they do not agree.
        """
        every = dict(known)
        for place, shown in self._shown.items():
            was = 0 if place in self._decided else known.get(place, 0)
            how = shown & _BY_EITHER or known.get(place, 0) & _BY_EITHER
            if known.get(place, 0) & _BY_EITHER & ~how:
                raise _C.SplitError(
                    f"auto_batch cannot split {label} exactly: {place} is a mean over rows in "
                    "some calls and is weighted like the loss in others. Pass join= to "
                    f"auto_batch{_C.see('split-not-exact')}"
                )
            every[place] = max(shown & 3, was & 3) | (how or known.get(place, 0) & _NO_LOSS)
        for place in self._met:
            every.setdefault(place, _MET)
        for place in self._no_loss:
            if not every[place] & _BY_EITHER:  # until a later proof shows how
                every[place] |= _NO_LOSS
        return every
