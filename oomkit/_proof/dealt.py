"""The rows of a batch dealt to its micro-batches in another way.

Where every row of a step is alone, the gradients of all micro-batches together are the same
whichever of them a row is in. Where the step draws random numbers, a row keeps its place in a
micro-batch, and each micro-batch begins with the same numbers: whatever draws them, and in
training mode, too, a row has those of its place.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

from .draws import is_stream, set_state, state_of
from .weights import Cut

__all__ = ["Dealt"]


class Dealt:
    """Which row is where, and what all micro-batches begin with.

    Args:
        slices: start and length of the micro-batches.
        unit: rows that stay together.
        draws: whether the step draws numbers, so that rows keep their places in micro-batches.
        turn: which of several ways.
    """

    def __init__(self, slices: Cut, unit: int, draws: bool, turn: int) -> None:
        chosen = random.Random(turn)  # a stream of its own
        self._order = [at for start, length in slices for at in range(start, start + length)]
        longest = max(length for _, length in slices)
        for place in range(0, longest, unit) if draws else (None,):
            groups = [
                range(at, at + unit)
                for start, length in slices
                for at in range(start, start + length - unit + 1, unit)
                if place is None or at == start + place
            ]
            for to, rows in zip(groups, chosen.sample(groups, len(groups)), strict=True):
                self._order[to.start : to.stop] = rows
        self._draws = draws
        self.shown = True  # all micro-batches of a length drew as much
        self._streams: list[Any] = []
        self._before: list[Any] = []
        self._after: dict[int, list[Any]] = {}

    def rows(self, leaf: Any, dim: int, start: int, length: int) -> Any:
        """Those of the slice that begins with row `start`, NotImplemented for other leaves."""
        at = self._order[start : start + length]
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad:
            return leaf.index_select(dim, torch.tensor(at, device=leaf.device))
        if type(leaf) is list:
            return [leaf[i] for i in at]
        if isinstance(leaf, (list, tuple)):
            return tuple(leaf[i] for i in at)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(leaf) is numpy.ndarray:
            return numpy.take(leaf, at, axis=dim)
        self.shown = False  # of a batch of which some rows stay
        return NotImplemented

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole leaf of the batch, rows in front."""
        return tensor.index_select(0, torch.tensor(self._order, device=tensor.device))

    def begin(self, streams: list[Any]) -> None:
        """The first micro-batch begins; where they draw all begin as it does.

        Args:
            streams: what goes back with the step besides torch's CPU generator.
        """
        if self._draws and not self._streams:
            numpy = sys.modules.get("numpy.random")
            self._streams = [torch.default_generator, random, *([numpy] if numpy else [])]
            own = (s for s in streams if isinstance(s, torch.Generator) or is_stream(s))
            self._streams += own
            self._before = [state_of(each) for each in self._streams]
        self.leave()

    def again(self, length: int) -> None:
        """One of so many rows has ended."""
        after = [_end_of(each) for each in self._streams]
        self.shown = self.shown and after == self._after.setdefault(length, after)
        self.leave()

    def leave(self) -> None:
        """All begins again."""
        for stream, state in zip(self._streams, self._before, strict=True):
            set_state(stream, state)


def _end_of(stream: Any) -> Any:
    """What tells where a stream is. The bytes of a CPU generator do not: some are never set."""
    state = state_of(stream)
    if not isinstance(stream, torch.Generator):
        return pickle.dumps(state)
    if stream.device.type != "cpu":
        return state.tolist()
    copy = torch.Generator()
    copy.set_state(state)
    return torch.rand(8, generator=copy).tolist()
