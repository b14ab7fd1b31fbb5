"""Backwards, hooks and gradients that are no plain loss.backward()."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .judge import Batch, World
from .known import CLASSES, HIDDEN, WIDE, classify, floats, net, one, pair, program, sgd, whole


def _body_and_head() -> tuple[nn.Module, nn.Module]:
    body = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.Tanh()).double()
    return body, nn.Linear(HIDDEN, CLASSES).double()


@program()
def cut_graph(n: int) -> World:
    """The head's backward first, then the body's with the gradient that came out of it."""
    body, head = _body_and_head()
    optimizer = sgd(body, head)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        h = body(x)
        d = h.detach().requires_grad_()
        loss = F.cross_entropy(head(d), y)
        loss.backward()
        h.backward(d.grad)
        optimizer.step()
        return loss.detach()

    return World(step, [body, head, optimizer], pair(n))


@program()
def gradient_cache(n: int) -> World:
    """GradCache: representations without a graph, their gradient, and a surrogate loss."""
    model = net(4)
    optimizer = sgd(model)

    def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            cached = [model(part) for part in (x, other)]
        a, b = (part.detach().requires_grad_() for part in cached)
        loss = F.cross_entropy(a @ b.T, torch.arange(len(a)))
        loss.backward()
        for part, rows in ((x, a), (other, b)):
            (model(part) * rows.grad).sum().backward()
        optimizer.step()
        return loss.detach()

    def batch(call: int) -> Batch:
        return floats(call, n, WIDE), floats(call, n, WIDE, more=9)

    return World(step, [model, optimizer], batch)


@program()
def surrogate(n: int) -> World:
    """The same cut by a surrogate: the gradient of a mean, summed with the activations."""
    body, head = _body_and_head()
    optimizer = sgd(body, head)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        h = body(x)
        d = h.detach().requires_grad_()
        inner = F.cross_entropy(head(d), y)
        wanted = torch.autograd.grad(inner, d, retain_graph=True)[0]
        (inner + (h * wanted).sum()).backward()
        optimizer.step()

    return World(step, [body, head, optimizer], pair(n))


@program()
def gradients_given(n: int) -> World:
    """autograd.backward() of two outputs with gradients that are rows of the batch."""
    body, head = _body_and_head()
    optimizer = sgd(body, head)

    def step(x: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = body(x)
        torch.autograd.backward([out, head(out)], [g, h])
        optimizer.step()

    def batch(call: int) -> Batch:
        return (
            floats(call, n, WIDE),
            floats(call, n, HIDDEN, more=1),
            floats(call, n, CLASSES, more=2),
        )

    return World(step, [body, head, optimizer], batch)


@program()
def gradient_of_the_next_stage(n: int) -> World:
    """A stage of a pipeline by hand: out.backward(g), g from the stage that follows."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.backward(g)
        optimizer.step()
        return out.detach()

    return World(
        step,
        [model, optimizer],
        lambda call: (floats(call, n, WIDE), floats(call, n, CLASSES, more=2)),
    )


@program()
def hook_that_normalises(n: int) -> World:
    """A hook on an activation divides its gradient by the norm."""
    body, head = _body_and_head()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = body(x)
        h.register_hook(lambda g: g / g.norm())
        return F.cross_entropy(head(h), y)

    return whole(loss_of, nn.Sequential(body, head), pair(n))


def _clamped(n: int, **options: Any) -> World:
    model = net()
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: tuple(g.clamp(-0.01, 0.01) for g in grads))
    return whole(classify(model), model, pair(n), remembered=lambda: len(nodes), options=options)


@program()
def hook_on_the_accumulation(n: int) -> World:
    """A hook before the accumulation of a parameter's gradient clamps it."""
    return _clamped(n)


@program()
def hook_on_the_accumulation_error(n: int) -> World:
    """The same with hooks="error"."""
    return _clamped(n, hooks="error")


@program()
def hook_of_a_parameter(n: int) -> World:
    """p.register_hook() clamps each gradient."""
    model = net()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return whole(classify(model), model, pair(n))


@program()
def flat_parameter(n: int) -> World:
    """FSDP1: one flat parameter, the module's weights are views of it; clipped."""
    layer = nn.Linear(WIDE, CLASSES).double()
    flat = nn.Parameter(torch.cat([layer.weight.flatten(), layer.bias]).detach())
    shape = layer.weight.shape
    for name in ("weight", "bias"):
        delattr(layer, name)
    optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        layer.weight = flat[: shape.numel()].view(shape)
        layer.bias = flat[shape.numel() :]
        loss = F.cross_entropy(layer(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_([flat], 0.05)
        optimizer.step()
        return loss.detach()

    return World(step, [flat, optimizer], pair(n))


@program()
def flat_master(n: int) -> World:
    """apex: parameters are views of one, their gradients are copied into its; clipped."""
    model = net()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    for p, part in zip(parameters, flat.data.split(sizes), strict=True):
        p.data = part.view_as(p)
    optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if all(p.grad is not None for p in parameters):
            flat.grad = torch.cat([p.grad.flatten() for p in parameters])
        nn.utils.clip_grad_norm_([flat], 0.05)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return loss.detach()

    return World(step, [model, flat, optimizer], pair(n))


@program()
def flat_gradients(n: int) -> World:
    """One buffer of which each .grad is a view (Megatron, DDP's buckets); clipped as one."""
    model = net()
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        buffer.mul_((0.05 / (buffer.norm() + 1e-12)).clamp(max=1.0))
        optimizer.step()
        buffer.zero_()
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


@program()
def binary_weights(n: int) -> World:
    """BinaryConnect: signs for forward and backward, the real weights put back after."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        real = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.copy_(p.data.sign())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p, was in zip(model.parameters(), real, strict=True):
            p.data.copy_(was)
        optimizer.step()
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


@program()
def fgm_with_a_guard(n: int) -> World:
    """FGM: the attack is where a gradient is, and where there is none it is left out."""
    model = net()
    optimizer = sgd(model)
    attacked = model[0].weight

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        was = attacked.data.clone()
        if attacked.grad is not None and attacked.grad.norm() != 0:
            attacked.data.add_(0.5 * attacked.grad / attacked.grad.norm())
        F.cross_entropy(model(x), y).backward()
        attacked.data.copy_(was)
        optimizer.step()
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


@program()
def gradient_signs(n: int) -> World:
    """autograd.grad(), and what the step makes of it becomes the gradients."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g.sign()
        optimizer.step()
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


@program()
def manual_update(n: int) -> World:
    """Without an optimizer: p.data moves where there is a gradient."""
    model = net()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)
        return loss.detach()

    return World(step, [model], pair(n))


@program()
def loops_over_halves(n: int) -> World:
    """The step accumulates by itself, over two parts of what it is given."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.cross_entropy(model(part), wanted) / 2).backward()
        optimizer.step()

    return World(step, [model, optimizer], pair(n))


@program(rows=7)
def loops_over_pairs(n: int) -> World:
    """The same, two rows at a time of an odd batch: a mean of means."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        parts = list(zip(x.split(2), y.split(2), strict=True))
        for part, wanted in parts:
            (F.cross_entropy(model(part), wanted) / len(parts)).backward()
        optimizer.step()
        return torch.zeros(())

    return World(step, [model, optimizer], pair(n))


@program()
def penalty_of_the_gradient(n: int) -> World:
    """A mean loss, and the square of its gradient's norm."""
    model = net(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum(g.square().sum() for g in found)

    return whole(loss_of, model, one(n))
