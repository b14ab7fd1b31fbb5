"""Losses returned to a caller: what a gradient passes on its way to the loss, and beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oomkit
from deferred.test_returned import B, Net, close, grads, loss_of, world
from oomkit.testing import inject_oom


def _refused(make: Callable[[], tuple[Net, torch.Tensor]], match: str) -> None:
    """Every fault of the backward is refused, and nothing has changed; some fault fires."""
    refusals, nth = 0, 0
    while True:
        nth += 1
        model, root = make()
        with inject_oom(nth=nth, phase="backward") as fault:
            try:
                root.backward()
            except oomkit.OutOfMemory as error:
                refusals += 1
                assert match in str(error)
                assert all(p.grad is None for p in model.parameters())
        if not fault.fired:
            break
    assert refusals >= 3


class _Two(torch.autograd.Function):
    """A loss and an output of one node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.rows = len(x)
        return x.mean(), x.sum(1)

    @staticmethod
    def backward(ctx: Any, mean: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (mean / (3 * ctx.rows)).expand(ctx.rows, 3) + rows[:, None]


@pytest.mark.parametrize("root", ["both", "other"])
def test_another_output_of_the_node_of_the_loss(root: str) -> None:
    """What reaches the loss is not all that reaches its node."""

    def make() -> tuple[Net, torch.Tensor]:
        model, x, _ = world()
        loss, rows = oomkit.auto_batch(lambda x: _Two.apply(model(x)))(x)
        return model, loss + rows.pow(2).sum() if root == "both" else rows[0] * 2

    _refused(make, "return the whole loss from the step")


def test_another_output_is_the_root() -> None:
    def make() -> tuple[Net, torch.Tensor]:
        model, x, _ = world()
        return model, oomkit.auto_batch(lambda x: torch.unbind(model(x)[:, :2].mean(0)))(x)[1]

    _refused(make, "return the whole loss from the step")


def test_a_loss_of_a_node_with_several_outputs() -> None:
    want, x, _ = world()
    want(x)[:, :2].mean(0)[1].backward()
    model, _, _ = world()
    loss = oomkit.auto_batch(lambda x: torch.unbind(model(x)[:, :2].mean(0))[1])(x)
    with inject_oom(nth=3, phase="backward"):
        loss.backward()
    assert close(grads(model), grads(want))


class _Negated(torch.autograd.Function):
    """Changes the gradient that it gets, as one must not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.neg_()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_backward_that_changes_the_gradient_of_the_loss(reduction: str, factor: float) -> None:
    want, x, y = world()
    factors = torch.arange(1.0, B + 1, dtype=torch.float64) if reduction == "none" else factor

    def run(step: Any) -> torch.Tensor:
        loss = step(x, y)
        return (loss * factors).sum() if reduction == "none" or factor != 1 else loss

    def compute(model: Any) -> Any:
        return lambda x, y: _Negated.apply(F.cross_entropy(model(x), y, reduction=reduction))

    run(compute(want)).backward()
    options: dict[str, Any] = {"reduction": "sum"} if reduction == "sum" else {}

    def make() -> tuple[Net, torch.Tensor]:
        model, _, _ = world()
        return model, run(oomkit.auto_batch(compute(model), **options))

    _refused(make, "changed the gradient of the returned loss")
    model, _, _ = world()
    root = run(oomkit.auto_batch(compute(model), accumulation_steps=2, **options))
    root.backward()
    assert close(grads(model), grads(want))


def test_a_hook_that_the_step_hangs_onto_its_loss() -> None:
    model, x, y = world()

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.register_hook(lambda g: g * 3)
        return loss

    loss = oomkit.auto_batch(compute)(x, y)
    with inject_oom(nth=4, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="where backward.. is called"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(oomkit.OomkitWarning, match="hook of the returned loss"):
        oomkit.auto_batch(compute, accumulation_steps=2)(x, y).backward()
    want, _, _ = world()
    (loss_of(want)(x, y) * 3).backward()
    assert close(grads(model), grads(want))
    with pytest.raises(oomkit.SplitError, match="hooks="):
        oomkit.auto_batch(compute, accumulation_steps=2, hooks="error")(x, y)


@pytest.mark.parametrize("present", [False, True])
def test_a_batch_that_requires_grad(present: bool) -> None:
    """Its gradient is the caller's, too, and comes with the others."""
    model, x, y = world()
    x.requires_grad_()
    if present:
        x.grad = torch.ones_like(x)
    mine = x.grad
    loss = oomkit.auto_batch(loss_of(model), accumulation_steps=2)(x, y)
    assert x.grad is mine and (mine is None or torch.equal(mine, torch.ones_like(mine)))
    (loss / 4).backward()
    want, z, _ = world()
    z.requires_grad_()
    (loss_of(want)(z, y) / 4).backward()
    assert x.grad is not None and z.grad is not None
    assert (x.grad - z.grad - float(present)).abs().max() <= 1e-12
    assert close(grads(model), grads(want))


def test_a_loss_whose_backward_is_done_is_nobodys() -> None:
    """Its graph has saved nothing, so a second backward is allowed; it may fail as well."""
    model, x, y = world()
    weight = torch.zeros(B, 6, dtype=torch.float64, requires_grad=True)
    step = oomkit.auto_batch(lambda x: (weight + x).sum())
    raised = 0
    for nth in range(1, 6):
        loss = step(x)
        loss.backward()
        waiting = oomkit.auto_batch(loss_of(model))(x, y)
        with inject_oom(nth=nth, phase="backward"):
            try:
                (loss * torch.ones(B, dtype=torch.float64)).sum().backward()
            except torch.OutOfMemoryError as error:
                raised += not isinstance(error, oomkit.OomkitError)
        assert waiting.requires_grad
    assert raised > 0


def test_a_running_sum_of_many_losses() -> None:
    def total(model: Net, step: Any) -> torch.Tensor:
        losses = [step(x[: 3 + i % 5], y[: 3 + i % 5]) / 40 for i in range(40)]
        value = losses[0]
        for loss in losses[1:]:
            value = value + loss
        return value

    want, x, y = world()
    total(want, loss_of(want)).backward()
    for nth in (1, 30, 60):
        model, _, _ = world()
        root = total(model, oomkit.auto_batch(loss_of(model)))
        with inject_oom(nth=nth, phase="backward") as fault:
            root.backward()
        assert fault.fired and close(grads(model), grads(want))


@pytest.mark.parametrize("waiting", [False, True])
def test_a_hook_that_runs_another_backward(waiting: bool) -> None:
    def make() -> tuple[Net, torch.Tensor]:
        model, x, y = world()
        step = oomkit.auto_batch(loss_of(model))
        loss = step(x, y)
        other = step(x, y) if waiting else model(x).pow(2).mean()
        loss.register_hook(lambda g: other.backward())
        return model, loss

    _refused(make, "a hook ran another backward")


def test_a_hook_that_updates_parameters_in_the_backward() -> None:
    for nth in range(4, 9):
        model, x, y = world()

        def update(p: torch.Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad)  # type: ignore[arg-type]
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        loss = oomkit.auto_batch(loss_of(model))(x, y)
        with inject_oom(nth=nth, phase="backward"):
            with pytest.raises(oomkit.OutOfMemory, match="post-accumulate-grad hook"):
                loss.backward()
