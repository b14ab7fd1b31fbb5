"""What the random programs are made of: models, batches, optimizers, forms of a step.

Everything is fp64 and nothing draws random numbers, so that a split batch equals the whole one
up to rounding. `size` is what of a batch varies beside its rows: a length or a width.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from helpers import batches
from torch import nn

CLASSES = 4
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
IGNORED = -100

Batch = tuple[torch.Tensor, torch.Tensor]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean(-1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 5)
        self.cell = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embed(x))[0][:, -1])


class Tokens(nn.Module):
    """Attention with a mask in a buffer, tied weights, a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(8, 8).triu(1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        h = h + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.norm(h) @ self.embed.weight.t()


class Normed(nn.Module):
    """Statistics that are used and do not move; a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.norm(self.frozen(x))))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def _floats(*sizes: int) -> Callable[[int, int, torch.Generator], Batch]:
    def make(rows: int, size: int, draw: torch.Generator) -> Batch:
        shape = [rows, *(size if n == -1 else n for n in sizes)]
        x = torch.randn(shape, generator=draw, dtype=torch.float64)
        return x, torch.randint(0, CLASSES, (rows,), generator=draw)

    return make


def _tokens(rows: int, size: int, draw: torch.Generator) -> Batch:
    x = torch.randint(0, CLASSES, (rows, size), generator=draw)
    return x, torch.randint(0, CLASSES, (rows,), generator=draw)


def _labels(rows: int, size: int, draw: torch.Generator) -> Batch:
    """A label for each token; most rows end in some that do not count."""
    x = torch.randint(0, CLASSES, (rows, size), generator=draw)
    y = torch.randint(0, CLASSES, (rows, size), generator=draw)
    ends = torch.randint(1, size + 1, (rows, 1), generator=draw)
    return x, torch.where(torch.arange(size) < ends, y, IGNORED)


@dataclass(frozen=True)
class Kind:
    """A model, its batches, and what its loss is a mean over."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.Generator], Batch]
    class_weights: torch.Tensor | None = None
    weight: Callable[[Any], float] | None = None

    def loss(self, out: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.cross_entropy(
            out.flatten(0, -2), y.flatten(), weight=self.class_weights, reduction=reduction
        )


KINDS = {
    "perceptron": Kind(_perceptron, _floats(5)),
    "convolutions": Kind(Convolutions, _floats(3, -1)),
    "recurrent": Kind(Recurrent, _tokens),
    "tokens": Kind(Tokens, _labels, weight=lambda b: float((read(b)[1] != IGNORED).sum())),
    "normed": Kind(Normed, _floats(5)),
    "class weights": Kind(
        _perceptron, _floats(5), CLASS_WEIGHTS, lambda b: float(CLASS_WEIGHTS[read(b)[1]].sum())
    ),
}


def read(*batch: Any) -> Batch:
    """x and y of the arguments of a step, whatever they are in."""
    if len(batch) == 1:
        batch = batches.read(batch[0])
    x, y = batch
    return torch.as_tensor(x), torch.as_tensor(y)


_CONTAINERS = (
    "dict", "dict, nested", "OrderedDict", "dict with attributes", "tuple", "NamedTuple", "list",
    "data class", "data class, frozen", "data class with slots", "SimpleNamespace",
    "numpy arrays", "transposed tensor",
)  # fmt: skip
CONTAINERS: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "arguments": lambda x, y: (x, y),
    **{
        name: lambda x, y, make=batches.SPLIT[name]: (make(x, y),)  # type: ignore[misc]
        for name in _CONTAINERS
        if name != "transposed tensor"
    },
    "transposed tensor": lambda x, y: (x.transpose(0, -1).contiguous().transpose(0, -1), y),
    "with captions": lambda x, y: (
        {"x": x, "y": y, "captions": [f"row {i}" for i in range(len(y))], "epoch": "first"},
    ),
    "nested namespaces": lambda x, y: (
        types.SimpleNamespace(x=x, y=y, more=[{"lengths": y + 1}, None]),
    ),
}

# A large eps: a gradient that is 0 but for rounding would be scaled up to an update otherwise.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]] = {
    "none": lambda p: None,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.5, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
}


@dataclass
class World:
    """A model with its optimizer and scheduler; two of them are made alike."""

    kind: Kind
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    held: list[torch.Tensor] = field(default_factory=list)
    """Losses that wait for their backward."""


def make_world(kind: str, optimizer: str, scheduled: bool, seed: int) -> World:
    torch.manual_seed(seed)
    model = KINDS[kind].make().double()
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    scheduler = None
    if made is not None and scheduled:
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.7)
    return World(KINDS[kind], model, made, scheduler)


@dataclass(frozen=True)
class Form:
    """What a step does. `second`: its caller runs the backward of what it returns."""

    make: Callable[[World, Program], Callable[..., Any]]
    second: bool = False
    options: Callable[[], dict[str, Any]] = dict
    rows: bool = False
    """The loss has an element per row."""
    updates: bool = False
    """The optimizer is stepped in it."""
    clears: bool = False
    """It begins with zero_grad(), which stays done when the call ends in an error."""


@dataclass(frozen=True)
class Program:
    """What is drawn once for a program, beside its kinds."""

    reduction: str = "mean"
    set_to_none: bool = True
    clip: bool = False
    returns: str = "loss"


def _result(program: Program, loss: torch.Tensor, out: torch.Tensor) -> Any:
    """Of a step that has run its own backward."""
    if program.returns == "nothing":
        return None
    if program.returns == "number":
        return loss.item()
    if program.returns == "outputs":
        return {"loss": loss.detach(), "out": (out.detach(), out.argmax(-1)), "rows": len(out)}
    return loss


def _whole(at_end: bool) -> Callable[[World, Program], Callable[..., Any]]:
    def make(world: World, program: Program) -> Callable[..., Any]:
        model, optimizer, scheduler = world.model, world.optimizer, world.scheduler
        kind = world.kind
        zero = model if optimizer is None else optimizer

        def step(*batch: Any) -> Any:
            if not at_end:
                zero.zero_grad(set_to_none=program.set_to_none)
            x, y = read(*batch)
            out = model(x)
            loss = kind.loss(out, y, program.reduction)
            loss.backward()
            if program.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if optimizer is not None:
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if at_end:
                zero.zero_grad(set_to_none=program.set_to_none)
            return _result(program, loss, out)

        return step

    return make


def _accumulating(world: World, program: Program) -> Callable[..., Any]:
    model, kind = world.model, world.kind

    def step(*batch: Any) -> Any:
        x, y = read(*batch)
        out = model(x)
        loss = kind.loss(out, y, program.reduction)
        (loss / 2).backward()
        return _result(program, loss, out)

    return step


def _two_backwards(world: World, program: Program) -> Callable[..., Any]:
    model, kind = world.model, world.kind

    def step(*batch: Any) -> Any:
        x, y = read(*batch)
        out = model(x)
        loss = kind.loss(out, y, program.reduction)
        loss.backward(retain_graph=True)
        (loss * loss.detach().new_tensor(0.25)).backward()
        return _result(program, loss, out)

    return step


def _returned(world: World, program: Program) -> Callable[..., Any]:
    model, kind = world.model, world.kind

    def step(*batch: Any) -> Any:
        x, y = read(*batch)
        out = model(x)
        loss = kind.loss(out, y, program.reduction)
        if program.returns == "outputs":
            return {"loss": loss, "logits": out.detach()}
        return (loss, out.detach()) if program.returns == "number" else loss

    return step


def loss_of(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["loss"]
    return result[0] if isinstance(result, tuple) else result


def _rows(world: World, program: Program) -> Callable[..., Any]:
    model = world.model

    def step(*batch: Any) -> Any:
        x, y = read(*batch)
        out = model(x)
        if out.dim() == 3:
            return F.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)
        return F.cross_entropy(out, y, reduction="none")

    return step


def _forward(world: World, program: Program) -> Callable[..., Any]:
    model = world.model

    def step(*batch: Any) -> Any:
        return model(read(*batch)[0])

    return step


FORMS = {
    "whole": Form(_whole(False), updates=True, clears=True),
    "whole, zero at the end": Form(_whole(True), updates=True),
    "accumulating": Form(_accumulating),
    "two backwards": Form(_two_backwards),
    "backward=True": Form(_returned, options=lambda: {"backward": True}),
    "returned": Form(_returned, second=True),
    "returned, by rows": Form(_rows, second=True, rows=True),
    "forward": Form(_forward, second=True, rows=True),
}


def evaluation(world: World) -> Callable[..., Any]:
    model, kind = world.model, world.kind

    @torch.no_grad()
    def evaluate(*batch: Any) -> Any:
        x, y = read(*batch)
        out = model(x)
        return {
            "out": out,
            "guess": out.argmax(-1),
            "loss": kind.loss(out, y, "mean"),
            "rows": len(y),
            "names": ("a", "b"),
        }

    return evaluate
