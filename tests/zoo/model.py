"""What a model of the zoo is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .case import Case

# Divides by every number of micro-batches that a case comes to: 1, 2, 3, 4, 6, 12.
ROWS = 12

FORMS = {
    "step": "zero_grad, forward, backward, clip and update in the step",
    "backward": "the step returns a loss, backward=True",
    "returned": "the step returns a loss, its caller runs backward",
    "scaled": "the first, with a GradScaler",
    "scaled-returned": "the third, with a GradScaler",
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Expected:
    """An outcome other than recovery: the error, and why there is no better one."""

    error: str
    """The class, or "committed"."""
    says: str
    """A regular expression."""
    reason: str
    kind: str = "refused"
    """Its column in the table."""
    always: bool = True
    """False: at some places nothing had happened yet that cannot be taken back."""


@dataclass(frozen=True)
class Model:
    """Made anew for each run: `make(dtype)` after seeding, then a batch for each call."""

    name: str
    make: Callable[[torch.dtype], nn.Module]
    batch: Callable[[torch.dtype], Any]
    """ROWS rows."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)
    """Of auto_batch."""
    moves: bool = False
    """Draws random numbers or moves buffers in training."""
    coupled: bool = False
    """Its rows meet one another, or a power iteration goes on with each forward: the proof refuses
    it, and what is swept without one is the roll-back."""
    without: dict[str, str] = field(default_factory=dict)
    """Forms, or values of other dimensions ("k=3"), that there are not, with the reason."""
    expected: Callable[[Case, str], Expected | None] = lambda case, phase: None
    """What becomes of a fault in this phase; None: recovered."""
    clip: bool = True
    compiled: str = ""
    """The backend of torch.compile; only `make prove` runs those."""
    places: int | None = None
    """So many places of each phase, where every one would take too long."""

    @property
    def forms(self) -> list[str]:
        return [form for form in FORMS if form not in self.without]


MODELS: dict[str, Model] = {}


def add(
    name: str,
    make: Callable[[torch.dtype], nn.Module],
    batch: Callable[[torch.dtype], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    **more: Any,
) -> Model:
    assert name not in MODELS
    MODELS[name] = Model(name, make, batch, loss, **more)
    return MODELS[name]
