"""What the runs of a proof have shown."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from .bounds import Bound

__all__ = ["Run", "Update"]


@dataclasses.dataclass(slots=True)
class Update:
    """What one intercepted call was given."""

    target: int
    name: str
    arguments: list[tuple[str, Any]]
    gradients: dict[int, torch.Tensor]


class Run:
    """What one run of the step has shown."""

    __slots__ = (
        "bounds",
        "each",
        "first",
        "gradients",
        "last",
        "losses",
        "parts",
        "raw",
        "results",
        "rows",
        "seen",
        "sweeps",
        "updates",
        "weights",
    )

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.raw: dict[int, torch.Tensor] = {}  # gradients as backwards leave them
        self.sweeps = 0  # backwards of the last micro-batch
        # Gradients that the last update was given, by parameter: who, mark, copy.
        self.seen: dict[int, tuple[weakref.ref[torch.Tensor], Any, torch.Tensor | None]] = {}
        self.last: set[int] = set()  # parameters whose gradients are those at the end
        self.parts: dict[int, float] = {}  # norms of what the first part alone gave
        self.first: dict[int, torch.Tensor] = {}  # and what it was
        self.losses: list[list[float]] = []  # of each backward, by micro-batch
        self.bounds: list[list[Bound]] = []  # by micro-batch
        self.results: dict[str, Any] = {}
        self.each: list[dict[str, Any]] = []  # results of micro-batches
        self.rows: list[int] = []
        self.weights: list[float] = []
