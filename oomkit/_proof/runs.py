"""What the runs of a proof have shown."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from . import values
from .graphs.bounds import Bound
from .graphs.terms import Part

__all__ = ["Copies", "Run", "Update"]


@dataclasses.dataclass(slots=True)
class Update:
    """What one intercepted call was given."""

    target: int
    name: str
    arguments: list[tuple[str, Any]]
    gradients: dict[int, torch.Tensor]


_Seen = tuple["weakref.ref[torch.Tensor]", Any, torch.Tensor | None]


class Copies:
    """Gradients that were seen, with what tells whether they have changed since: of a large model a
    copy to the host takes seconds, so what stays is copied once."""

    __slots__ = ("_known",)

    def __init__(self, gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """By any number: the gradient and its copy on the host, if there is one."""
        self._known: dict[int, _Seen] = {
            key: (weakref.ref(gradient), values.mark(gradient), copy)
            for key, (gradient, copy) in gradients.items()
        }

    def find(self, key: int, gradient: torch.Tensor) -> _Seen | None:
        """What was seen, where that is this gradient, unchanged."""
        seen = self._known.get(key)
        if seen is None or seen[0]() is not gradient:
            return None
        return seen if values.is_same(values.mark(gradient), seen[1]) else None

    def of(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        """A copy of a gradient, that which there is if it fits."""
        seen = self.find(key, gradient)
        return values.host(gradient) if seen is None or seen[2] is None else seen[2]


class Run:
    """What one run of the step has shown."""

    __slots__ = (
        "bounds",
        "each",
        "first",
        "gradients",
        "is_sum",
        "last",
        "losses",
        "parts",
        "raw",
        "results",
        "rows",
        "seen",
        "sweeps",
        "swept",
        "terms",
        "updates",
        "weights",
    )

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.raw: dict[int, torch.Tensor] = {}  # gradients as backwards leave them
        self.sweeps = 0  # backwards of the last micro-batch
        self.swept = Copies({})  # of the last backward, by the parameter's identity
        self.seen = Copies({})  # that the last update was given
        self.last: set[int] = set()  # parameters whose gradients are those at the end
        self.parts: dict[int, float] = {}  # norms of what the first part alone gave
        self.first: dict[int, torch.Tensor] = {}  # and what it was
        self.losses: list[list[float]] = []  # of each backward, by micro-batch
        self.bounds: list[list[Bound]] = []  # by micro-batch
        self.terms: list[Part] = []  # of its losses, by micro-batch
        self.results: dict[str, Any] = {}
        self.each: list[dict[str, Any]] = []  # results of micro-batches
        self.rows: list[int] = []
        self.weights: list[float] = []
        self.is_sum = False  # weights are 1

    def begin_slice(self) -> None:
        """The present micro-batch has a place in what is kept by micro-batch."""
        while len(self.losses) <= len(self.rows):
            self.losses.append([])
            self.bounds.append([])
            self.terms.append({})
