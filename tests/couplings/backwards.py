"""The ways in which a random program runs backward: each gives outputs and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .pieces import PENALTIES, Columns

if TYPE_CHECKING:
    from .build import Program

Made = tuple[Tensor, Tensor]


def _total(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


def _of_the_sum(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss = _total(losses)
    loss.backward()
    return out, loss


def _one_after_the_other(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    for loss in losses:
        loss.backward(retain_graph=loss is not losses[-1])
    return out, losses[0]


def _of_a_list(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    torch.autograd.backward(losses)
    return out, losses[0]


def _scaled(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss = _total(losses)
    (loss * 256.0).backward()
    for each in p.parts.parameters():
        if each.grad is not None and p.s.form == "whole":
            each.grad.div_(256.0)
    return out, loss


def _doubled(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss = _total(losses)
    loss.backward(torch.tensor(2.0, dtype=loss.dtype))
    return out, loss


def _with_inputs(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss = _total(losses)
    loss.backward(inputs=p.parts.parameters())
    return out, loss


def _cut(p: Program, b: Columns) -> Made:
    """At the features: the gradient that comes out of the head goes into the body."""
    h = p.features(b)
    d = h.detach().requires_grad_()
    out = p.parts.head(d)
    loss = p.loss(out, d, b)
    penalty = PENALTIES[p.s.penalty]
    if penalty is not None:
        loss = loss + penalty(p.parts, d)
    loss.backward()
    h.backward(d.grad)
    return out, loss


def _given(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    wanted = b["gradient"]
    if out.dim() == 3:
        wanted = wanted[:, None].expand_as(out)
    torch.autograd.backward([out, losses[0]], [wanted, torch.ones_like(losses[0])])
    return out, losses[0]


def _by_hand(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss, found = _total(losses), p.parts.parameters()
    grads = torch.autograd.grad(loss, found, allow_unused=True)
    for each, g in zip(found, grads, strict=True):
        if g is not None:
            each.grad = g if each.grad is None else each.grad + g
    return out, loss


def _of_the_input(p: Program, b: Columns) -> Made:
    """WGAN-GP: the norm of each row's gradient to its features."""
    h = p.features(b)
    out = p.parts.head(h)
    each = out.square().flatten(1).sum()
    g = torch.autograd.grad(each, h, create_graph=True)[0]
    loss = p.loss(out, h, b) + 0.1 * (g.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()
    return out, loss


def _of_the_gradient(p: Program, b: Columns) -> Made:
    """The square of the mean's gradient."""
    out, losses = p.losses(b)
    loss = _total(losses)
    g = torch.autograd.grad(loss, list(p.parts.head.parameters()), create_graph=True)
    loss = loss + 0.1 * sum(each.square().sum() for each in g)
    loss.backward()
    return out, loss


def _attack(p: Program, b: Columns) -> Made:
    """FGM, where there is a gradient."""
    out, losses = p.losses(b)
    loss = _total(losses)
    loss.backward()
    weight = p.parts.head.weight
    assert isinstance(weight, Tensor)
    was = weight.data.clone()
    if weight.grad is not None and float(weight.grad.norm()) > 0:
        weight.data.add_(weight.grad / weight.grad.norm(), alpha=0.3)
    _total(p.losses(b)[1]).backward()
    weight.data.copy_(was)
    return out, loss


def _loops(p: Program, b: Columns) -> Made:
    """The step accumulates by itself, over halves of what it is given."""
    n = len(b["x"])
    half = (n + 1) // 2
    outs, total = [], torch.zeros((), dtype=torch.float64)
    for begin in range(0, n, half):
        part = {k: v[begin : begin + half] if v.dim() else v for k, v in b.items()}
        out, losses = p.losses(part)
        loss = _total(losses) / 2
        loss.backward()
        outs.append(out.detach())
        total = total + loss.detach()
    return torch.cat(outs), total


def _scaler(p: Program, b: Columns) -> Made:
    out, losses = p.losses(b)
    loss = _total(losses)
    assert p.scaler is not None
    p.scaler.scale(loss).backward()
    if p.s.form == "whole" and p.s.post != "none":
        p.scaler.unscale_(p.optimizer)
    return out, loss


BACKWARDS: dict[str, Callable[[Program, Columns], Made]] = {
    "of the sum": _of_the_sum,
    "one after the other": _one_after_the_other,
    "of a list": _of_a_list,
    "scaled, and divided by hand": _scaled,
    "with a gradient of 2": _doubled,
    "with inputs": _with_inputs,
    "cut at the features": _cut,
    "of outputs, with rows of the batch": _given,
    "gradients set by hand": _by_hand,
    "penalty of the input's gradient": _of_the_input,
    "penalty of the gradient": _of_the_gradient,
    "attack where there is a gradient": _attack,
    "loops over halves": _loops,
    "scaler": _scaler,
}
