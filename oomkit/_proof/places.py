"""Rows of two micro-batches in each other's places, with the same random numbers.

Where every row of a step is alone, the gradients of two micro-batches together are the same
whichever of them a row is in, for it has the numbers of its place in both: whatever draws them,
and in training mode, too.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

from .draws import is_stream, set_state, state_of

__all__ = ["Places"]


class Places:
    """Which rows change places, and what both micro-batches begin with.

    Args:
        start: the first row of the one; the other follows.
        length: rows of each.
        unit: rows that stay together.
        turn: which of several choices of rows.
    """

    def __init__(self, start: int, length: int, unit: int, turn: int) -> None:
        self._start, self._length = start, length
        chosen = random.Random(turn)  # a stream of its own
        groups = range(0, length, unit)
        moving = set(chosen.sample(groups, len(groups) // 2))
        self._rows = [i for i in range(length) if i // unit * unit in moving]
        self.shown = True  # all could be exchanged, and all have drawn as much
        self._streams: list[Any] = []
        self._before: list[Any] = []
        self._after: list[Any] | None = None

    def __call__(self, one: Any, other: Any, dim: int) -> Any:
        """Rows of one micro-batch, some of them those of the other one."""
        if type(one) is torch.Tensor and one.layout is torch.strided and not one.requires_grad:
            rows = torch.tensor(self._rows, device=one.device)
            return one.index_copy(dim, rows, other.index_select(dim, rows))
        if type(one) is list and len(one) == len(other) == self._length:
            return [(other if i in self._rows else one)[i] for i in range(self._length)]
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(one) is numpy.ndarray:
            mixed = one.copy()
            at = (slice(None),) * (dim % one.ndim)
            mixed[(*at, self._rows)] = other[(*at, self._rows)]
            return mixed
        self.shown = False
        return one

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole leaf of the batch, rows in front, with both micro-batches so."""
        mixed, second = tensor.clone(), self._start + self._length
        for start, other in ((self._start, second), (second, self._start)):
            rows = (tensor.narrow(0, at, self._length) for at in (start, other))
            mixed.narrow(0, start, self._length).copy_(self(next(rows), next(rows), 0))
        return mixed

    def begin(self, streams: list[Any]) -> None:
        """Two micro-batches begin, the second one where the first one began.

        Args:
            streams: what goes back with the step besides torch's CPU generator.
        """
        if not self._streams:
            numpy = sys.modules.get("numpy.random")
            self._streams = [torch.default_generator, random, *([numpy] if numpy else [])]
            own = (s for s in streams if isinstance(s, torch.Generator) or is_stream(s))
            self._streams += own
            self._before = [state_of(each) for each in self._streams]
        self.leave()

    def again(self) -> None:
        """One of them has ended."""
        after = [_end_of(each) for each in self._streams]
        self._after = self._after or after
        self.shown = self.shown and after == self._after
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
