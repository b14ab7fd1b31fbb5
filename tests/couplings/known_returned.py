"""Programs whose loss goes to the caller, and gradients that wait for a later update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .judge import Batch, Step, World
from .known import classify, net, pair, program, sgd


def _returned(n: int, wrap: Callable[[torch.Tensor, torch.Tensor], Any], **options: Any) -> World:
    """`wrap` makes what is returned; the caller's backward is that of the loss in it."""
    model = net()
    optimizer = sgd(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        return wrap(F.cross_entropy(out, y), out)

    def drive(step: Step, batch: Batch) -> Any:
        optimizer.zero_grad()
        made = step(*batch)
        loss = made["loss"] if isinstance(made, dict) else made[0] if made is not None else None
        loss.backward()
        optimizer.step()
        return loss.detach()

    return World(loss_of, [model, optimizer], pair(n), drive, options)


@program(exact=True)
def returned_in_a_dict(n: int) -> World:
    """{"loss": loss, "logits": ...}, the caller's backward."""
    return _returned(n, lambda loss, out: {"loss": loss, "logits": out.detach()})


@program(exact=True)
def returned_in_a_tuple(n: int) -> World:
    """(loss, outputs), the caller's backward."""
    return _returned(n, lambda loss, out: (loss, out.detach()))


def _caller(n: int, times: float, reduction: str = "mean", **options: Any) -> World:
    model = net()
    optimizer = sgd(model)

    def drive(step: Step, batch: Batch) -> Any:
        optimizer.zero_grad()
        made = step(*batch)
        loss = made.mean() * times
        loss.backward()
        optimizer.step()
        return loss.detach()

    return World(classify(model, reduction=reduction), [model, optimizer], pair(n), drive, options)


@program(exact=True)
def returned(n: int) -> World:
    """The loss alone, the caller's backward."""
    return _caller(n, 1.0)


@program(exact=True)
def returned_scaled(n: int) -> World:
    """The caller runs backward on a multiple of it."""
    return _caller(n, 0.25)


@program(exact=True)
def returned_rows(n: int) -> World:
    """reduction="none": a loss per row, the caller takes the mean."""
    return _caller(n, 1.0, "none")


@program(exact=True)
def returned_twice(n: int) -> World:
    """Two calls, then one update: accumulation over calls."""
    model = net()
    optimizer = sgd(model)
    loss_of = classify(model)

    def drive(step: Step, batch: Batch) -> Any:
        x, y = batch
        losses = [step(part, wanted) / 2 for part, wanted in ((x, y), (x.flip(1), y))]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    return World(loss_of, [model, optimizer], pair(n), drive, clears=False)


@program(exact=True)
def accumulating(n: int) -> World:
    """The step adds to gradients; its caller updates after every second call."""
    model = net()
    optimizer = sgd(model)
    calls = [0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        (loss / 2).backward()
        return loss.detach()

    def drive(step: Step, batch: Batch) -> Any:
        loss = step(*batch)
        calls[0] += 1
        if calls[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return World(step, [model, optimizer], pair(n), drive, clears=False)


@program(exact=True)
def backward_by_oomkit(n: int) -> World:
    """backward=True."""
    model = net()
    optimizer = sgd(model)

    def drive(step: Step, batch: Batch) -> Any:
        optimizer.zero_grad()
        loss = step(*batch)
        optimizer.step()
        return loss.detach()

    return World(classify(model), [model, optimizer], pair(n), drive, {"backward": True})
