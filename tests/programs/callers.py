"""Losses that are returned: the caller runs backward, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .updates import Net, rows
from .world import World, program

_LOSS = "@oomkit.auto_batch, on the function of the loss"


def _classifier(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.keep(model, optimizer)
    return model, optimizer


def _loss_of(world: World, model: nn.Module) -> Callable[..., Any]:
    @world.auto_batch
    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return compute_loss


@program("equal", caller_backward=True, decorated=_LOSS)
def skip_on_nan_outside(world: World) -> None:
    """The caller looks at the loss and drops the batch when it is not finite."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for broken in (False, True, False):
        x, y = rows()
        if broken:
            x[1, 0] = torch.nan
        loss = compute_loss(x, y)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        world.note(loss.item())


@program("equal", caller_backward=True, decorated=_LOSS)
def losses_added(world: World) -> None:
    """Labelled and unlabelled rows: two losses of two calls, added, one backward."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)

    @world.auto_batch
    def consistency(x: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = model(x).softmax(-1)
        return F.mse_loss(model(moved).softmax(-1), wanted)

    for _ in range(3):
        optimizer.zero_grad()
        x, _ = rows()
        loss = compute_loss(*rows())
        other = consistency(x, x + 0.1 * torch.randn_like(x))
        (loss + 0.5 * other).backward()
        optimizer.step()
        world.note(loss.item())
        world.note(other.item())


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the forward")
def logits_outside(world: World) -> None:
    """Only the forward is decorated: logits come back, the caller computes the loss from them."""
    model, optimizer = _classifier(world)

    @world.auto_batch
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for _ in range(3):
        x, y = rows()
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        world.note(loss.item())


@program("equal", caller_backward=True, decorated=_LOSS)
def sharpness_aware_outside(world: World) -> None:
    """SAM-like, in the caller: two losses at two places, each with its backward."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for _ in range(3):
        x, y = rows()
        optimizer.zero_grad()
        loss = compute_loss(x, y)
        loss.backward()
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            climbed = [0.05 * p.grad / norm for p in model.parameters()]
            for p, c in zip(model.parameters(), climbed, strict=True):
                p.add_(c)
        optimizer.zero_grad()
        compute_loss(x, y).backward()
        with torch.no_grad():
            for p, c in zip(model.parameters(), climbed, strict=True):
                p.sub_(c)
        optimizer.step()
        world.note(loss.item())


@program("equal", caller_backward=True, decorated=_LOSS)
def lbfgs_loss(world: World) -> None:
    """L-BFGS: the closure calls the decorated function and runs the backward itself."""
    model = Net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    world.keep(model)
    compute_loss = _loss_of(world, model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute_loss(x, y)
        loss.backward()
        return loss

    for _ in range(2):
        x, y = rows()
        world.note(optimizer.step(closure).item())


@program("equal", caller_backward=True, decorated=_LOSS)
def clip_and_noise_outside(world: World) -> None:
    """Everything that reads gradients by hand belongs to the caller: norms, values, noise."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compute_loss(*rows())
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=1e-3)
        optimizer.step()
        world.note(loss.item())
        world.note(norm)


@program(
    "refused",
    caller_backward=True,
    says="return the whole loss",
    decorated=_LOSS,
    or_equal=True,
)
def penalty_outside(world: World) -> None:
    """A penalty on the weights is added by the caller: refused where that backward fails,
    equal where the call was split before."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compute_loss(*rows()) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        world.note(loss.item())


@program("refused", caller_backward=True, says="retain_graph", decorated=_LOSS, or_equal=True)
def retained_graph_outside(world: World) -> None:
    """The caller keeps the graph and runs backward twice: refused or equal, as before."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compute_loss(*rows())
        loss.backward(retain_graph=True)
        (0.1 * loss.pow(2)).backward()
        optimizer.step()
        world.note(loss.item())


@program(
    "refused",
    caller_backward=True,
    says="not part of the returned loss|return the whole loss",
    decorated=_LOSS,
)
def features_in_another_loss(world: World) -> None:
    """Features are returned with the loss, and the caller computes another loss from them."""
    model, optimizer = _classifier(world)

    @world.auto_batch
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = model.body(x)
        return F.cross_entropy(model.head(torch.tanh(features)), y), features

    for _ in range(3):
        optimizer.zero_grad()
        loss, features = forward(*rows())
        (loss + 0.01 * features.pow(2).mean()).backward()
        optimizer.step()
        world.note(loss.item())


@program("refused", caller_backward=True, says="autograd.grad|out of memory", decorated=_LOSS)
def grad_outside(world: World) -> None:
    """The caller calls torch.autograd.grad on the loss and sets gradients by hand."""
    model, optimizer = _classifier(world)
    compute_loss = _loss_of(world, model)
    for _ in range(3):
        loss = compute_loss(*rows())
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        for p, slope in zip(model.parameters(), slopes, strict=True):
            p.grad = slope
        optimizer.step()
        world.note(loss.item())
