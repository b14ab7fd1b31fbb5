"""What the programs of test_never_silent.py are made of, and their list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from helpers.seeds import seed_all
from torch import nn

from .judge import SEED, Batch, Step, Trouble, World

WIDE, HIDDEN, CLASSES = 5, 8, 3
IGNORED = -100

TROUBLES = {
    "forward": [Trouble("forward", "forward", share=share) for share in (0.0, 0.6, 1.0)],
    "backward": [Trouble("backward", "backward", share=share) for share in (0.0, 0.6, 1.0)],
    "first-call": [
        Trouble("forward", "forward", 0, 0.5),
        Trouble("backward", "backward", 0, 1.0),
    ],
    "two": [Trouble("two micro-batches", steps=2)],
    "rows": [Trouble("one row at a time", steps=0)],
}
"""An error in the second call, in the first one, and micro-batches from the start."""


@dataclass(frozen=True)
class Known:
    """A program, and the rows of its batches."""

    name: str
    shows: str
    make: Callable[[int], World]
    rows: int
    exact: bool
    """Its rows do not couple: exact, and not refused."""

    def world(self) -> World:
        seed_all(SEED)
        return self.make(self.rows)


KNOWN: dict[str, Known] = {}


def program(*, exact: bool = False, rows: int = 8) -> Callable[..., Callable[[int], World]]:
    """Register a program under the name of its function; the docstring says what it shows."""

    def register(make: Callable[[int], World]) -> Callable[[int], World]:
        name = make.__name__
        assert name not in KNOWN and make.__doc__
        KNOWN[name] = Known(name, " ".join(make.__doc__.split()), make, rows, exact)
        return make

    return register


def drawn(call: int, more: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * call + more + 1)


def floats(call: int, *size: int, more: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=drawn(call, more), dtype=torch.float64)


def labels(call: int, *size: int, below: int = CLASSES, more: int = 0) -> torch.Tensor:
    return torch.randint(0, below, size, generator=drawn(call, more + 500))


def padded(
    call: int, n: int, length: int, below: int = CLASSES, pad: int = IGNORED
) -> torch.Tensor:
    """Labels of rows of which each ends somewhere else."""
    ends = torch.randint(2, length + 1, (n, 1), generator=drawn(call, 300))
    return torch.where(torch.arange(length) < ends, labels(call, n, length, below=below), pad)


def net(out: int = CLASSES, wide: int = WIDE) -> nn.Sequential:
    return nn.Sequential(nn.Linear(wide, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, out)).double()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1, momentum=0.9)


def pair(n: int) -> Callable[[int], Batch]:
    """x and y."""
    return lambda call: (floats(call, n, WIDE), labels(call, n))


def one(n: int, wide: int = WIDE) -> Callable[[int], Batch]:
    """x alone."""
    return lambda call: (floats(call, n, wide),)


Loss = Callable[..., torch.Tensor]


def step_of(loss_of: Loss, optimizer: torch.optim.Optimizer, *more: Callable[[], object]) -> Step:
    """The usual step around a loss; `more` is done between the backward and the update."""

    def step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        for do in more:
            do()
        optimizer.step()
        return loss.detach()

    return step


def by_hand(
    loss_of: Loss, optimizer: torch.optim.Optimizer, batch: Batch, lengths: list[int]
) -> torch.Tensor:
    """The same step, its mean made of these slices."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    cut = zip(*(part.split(lengths) for part in batch), strict=True)
    for share, rows in zip(lengths, cut, strict=True):
        loss = loss_of(*rows) * (share / sum(lengths))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def whole(
    loss_of: Loss,
    model: nn.Module,
    batch: Callable[[int], Batch],
    *more: Callable[[], object],
    keep: tuple[Any, ...] = (),
    hand: bool = False,
    **rest: Any,
) -> World:
    """A world of the usual step with SGD."""
    optimizer = sgd(model)
    return World(
        step_of(loss_of, optimizer, *more),
        [model, optimizer, *keep],
        batch,
        hand=partial(by_hand, loss_of, optimizer) if hand else None,
        **rest,
    )


def classify(model: nn.Module, **more: Any) -> Loss:
    return lambda x, y: F.cross_entropy(model(x), y, **more)
