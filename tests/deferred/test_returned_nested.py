"""Decorated calls inside another backward: in a hook of it, or in a reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sample import places
from torch.utils.checkpoint import checkpoint

import oomkit
from deferred.test_returned import Net, close, grads, loss_of, plain, same, world
from oomkit.testing import inject_oom


def _whole(model: Net) -> Callable[[torch.Tensor, torch.Tensor], None]:
    compute = loss_of(model)

    def whole(x: torch.Tensor, y: torch.Tensor) -> None:
        compute(x, y).backward()

    return whole


def _inside_a_hook(
    work: Callable[[], Any], root: torch.Tensor | None = None, where: torch.Tensor | None = None
) -> None:
    """Run it in a hook of a backward that has nothing to do with it."""
    if root is None:
        root = torch.ones((), dtype=torch.float64, requires_grad=True) * 2

    def hook(g: torch.Tensor) -> None:
        with torch.enable_grad():
            work()

    (root if where is None else where).register_hook(hook)
    root.backward()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("returned", [False, True])
def test_a_call_in_a_hook(k: int, returned: bool) -> None:
    for nth in places(7):
        model, x, y = world()
        compute: Any = loss_of(model) if returned else _whole(model)
        step = oomkit.auto_batch(compute, accumulation_steps=k)
        fault = inject_oom(nth=nth)

        def work(step: Any = step, x: Any = x, y: Any = y, fault: Any = fault) -> None:
            with fault:
                loss = step(x, y)
                if loss is not None:
                    loss.backward()

        _inside_a_hook(work)
        assert close(grads(model), plain()), nth
        if not fault.fired:
            break
    assert nth > 10


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("what", ["loss", "forward"])
def test_a_call_in_a_reentrant_checkpoint(k: int, what: str) -> None:
    def run(model: Net, decorate: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if what == "loss":
            loss: torch.Tensor = checkpoint(decorate(loss_of(model)), x, y, use_reentrant=True)
        else:
            out = checkpoint(decorate(model.forward), x, use_reentrant=True)
            loss = F.cross_entropy(out, y)
        return loss / 2

    want, x, y = world()
    x.requires_grad_()
    run(want, lambda f: f, x, y).backward()
    equal = 0
    for nth in places(2):
        model, z, y = world()
        z.requires_grad_()
        loss = run(model, lambda f: oomkit.auto_batch(f, accumulation_steps=k), z, y)
        with inject_oom(nth=nth, phase="backward") as fault:
            try:
                loss.backward()
                assert close(grads(model), grads(want)) and close([z.grad], [x.grad]), nth
                equal += 1
            except torch.OutOfMemoryError as error:  # outside every decorated call
                assert not isinstance(error, oomkit.OomkitError), nth
        if not fault.fired:
            break
    assert equal > 3


@pytest.mark.parametrize("k", [1, 2])
def test_a_call_in_a_hook_of_a_protected_backward(k: int) -> None:
    for nth in places(7):
        model, x, y = world()
        other, _, _ = world()
        inner = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
        z = x.clone().requires_grad_()
        root = oomkit.auto_batch(loss_of(other))(z, y)
        fault = inject_oom(nth=nth)

        def work(inner: Any = inner, x: Any = x, y: Any = y, fault: Any = fault) -> None:
            with fault:
                inner(x, y).backward()

        _inside_a_hook(work, root, z)
        assert close(grads(model), plain()) and close(grads(other), plain()), nth
        if not fault.fired:
            break
    assert nth > 10


@pytest.mark.parametrize("returned", [False, True])
def test_the_outer_backward_fails_after_such_a_hook(returned: bool) -> None:
    """What the hook has added would be lost with the rest: refused, and all of it taken back."""
    model, x, y = world()
    compute: Any = loss_of(model) if returned else _whole(model)
    inner = oomkit.auto_batch(compute)
    seen: list[int] = []

    def run(nth: int) -> None:
        root = oomkit.auto_batch(loss_of(model))(x, y)
        with inject_oom(nth=nth, phase="backward") as fault:

            def work() -> None:
                loss = inner(x, y)
                if loss is not None:
                    loss.backward()
                seen.append(fault.seen)

            _inside_a_hook(work, root)

    run(10**9)
    model.zero_grad()
    with pytest.raises(oomkit.OutOfMemory, match="a hook ran another backward"):
        run(seen[0] + 4)
    assert len(seen) == 2
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("when", ["theirs", "mine"])
def test_a_waiting_loss_inside_another_decorated_step(k: int, when: str) -> None:
    """Its graph can be run through once: whole it is, in micro-batches that is said."""
    model, x, y = world()
    other, _, _ = world()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = grads(model)
    loss = oomkit.auto_batch(loss_of(model))(x, y)

    @oomkit.auto_batch(accumulation_steps=k, model=(model, other), gradient_safety="copy")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss.backward()
        loss_of(other)(x, y).backward()

    fault = inject_oom(nth=4 if when == "theirs" else 12, phase="backward")
    with fault, pytest.raises(oomkit.SplitError, match=r"another decorated call \(.*compute\)"):
        step(x, y)
    assert fault.fired or k == 2
    assert same(grads(model), before)
    assert all(p.grad is None for p in other.parameters())


def test_a_waiting_loss_inside_another_decorated_step_that_fits() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model))(x, y)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        (loss * x.sum()).backward()

    step(x)
    assert close(grads(model), plain(lambda v: v * x.sum()))
