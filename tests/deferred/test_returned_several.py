"""Several returned losses under one root: nothing of the caller's runs twice, whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import oomkit
from deferred.test_returned import close, grads, loss_of, plain, world
from oomkit.testing import inject_oom

# How the root is made of the losses of two calls; `log` counts hooks, each of which also
# changes what passes, another time by another factor.
Root = Callable[[Callable[[], torch.Tensor], Callable[[], torch.Tensor], Any], torch.Tensor]


def _watched(value: torch.Tensor, log: list[str], name: str) -> torch.Tensor:
    def hook(g: torch.Tensor) -> torch.Tensor:
        changed = g * (2 + len(log))  # if this very line fails the hook runs once more
        log.append(name)
        return changed

    value.register_hook(hook)
    return value


def _sum(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    return _watched(a() + b(), log, "sum")


def _product(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    return _watched(_watched(a(), log, "a") * _watched(b(), log, "b").exp(), log, "product")


def _late(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    """The node of `a * 3` is older than the graph of b, whose backward runs before it."""
    scaled = _watched(_watched(a(), log, "a") * 3, log, "scaled")
    return scaled + _watched(b(), log, "b") * 2


def _three(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    first = a()
    second = _watched(b(), log, "b")
    third = a()
    return sum([first, second * first, _watched(third / 4, log, "third"), first])  # type: ignore


def _in_place(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    total = a()
    total += _watched(b(), log, "b")
    total /= 3
    return _watched(total, log, "total")


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, n: int, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return 2 * a * b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        a, b = ctx.saved_tensors
        return 2 * g * b, None, 2 * g * a


def _function(a: Any, b: Any, log: list[str]) -> torch.Tensor:
    return _watched(_Double.apply(_watched(a(), log, "a"), 3, b()), log, "function")  # type: ignore


ROOTS: dict[str, Root] = {
    "sum": _sum,
    "product": _product,
    "late": _late,
    "three": _three,
    "in place": _in_place,
    "function": _function,
}


def _run(root: Root, decorate: Any, fault: inject_oom | None = None) -> tuple[Any, list[str]]:
    model, x, y = world()
    step = decorate(loss_of(model))
    log: list[str] = []
    total = root(lambda: step(x, y), lambda: step(x[:6], y[:6]), log)
    if fault is None:
        total.backward()
    else:
        with fault:
            total.backward()
    return grads(model), log


@pytest.mark.parametrize("name", ROOTS)
def test_hooks_between_run_once_in_a_healthy_backward(name: str) -> None:
    want, calls = _run(ROOTS[name], lambda f: f)
    got, log = _run(ROOTS[name], oomkit.auto_batch)
    assert log == calls
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("k", [1, 2])
def test_every_fault_of_such_a_backward(name: str, k: int) -> None:
    """Exact, and each hook once: what passed the nodes that had run is known."""
    want, calls = _run(ROOTS[name], lambda f: f)
    nth, fired = 1, True
    while fired:
        fault = inject_oom(nth=nth, phase="backward")
        got, log = _run(ROOTS[name], lambda f: oomkit.auto_batch(f, accumulation_steps=k), fault)
        fired = fault.fired > 0
        assert log == calls, nth
        assert close(got, want), nth
        nth += 1
    assert nth > (8 if k == 1 else 1)


def test_one_call_split_and_one_whole() -> None:
    for nth in range(1, 14):
        model, x, y = world()
        want, _, _ = world()
        whole = oomkit.auto_batch(loss_of(model))
        split = oomkit.auto_batch(loss_of(model), accumulation_steps=2)
        a, b = whole(x, y), split(x[:6], y[:6])
        with inject_oom(nth=nth, phase="backward"):
            (a.exp() * b).backward()
        compute = loss_of(want)
        (compute(x, y).exp() * compute(x[:6], y[:6])).backward()
        assert close(grads(model), grads(want)), nth


def test_several_roots() -> None:
    for nth in range(1, 20):
        model, x, y = world()
        want, _, _ = world()
        step, compute = oomkit.auto_batch(loss_of(model)), loss_of(want)
        a, b = step(x, y), step(x[:6], y[:6])
        torch.autograd.backward([compute(x, y), compute(x[:6], y[:6]) * 2])
        with inject_oom(nth=nth, phase="backward"):
            torch.autograd.backward([a, b * 2])
        assert close(grads(model), grads(want)), nth


def test_a_gradient_that_was_changed_in_place_before_the_failure() -> None:
    class Rude(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g.mul_(2)

    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    rude = oomkit.auto_batch(lambda x, y: Rude.apply(loss_of(model)(x, y)))
    a = step(x, y)
    b = rude(x, y)
    with inject_oom(nth=4, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="returned loss in place"):
            (a + b).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_raises_after_the_failure() -> None:
    """The hook of the loss that was not reached yet runs then: gradients go back first."""

    def angry(g: torch.Tensor) -> None:
        raise ValueError("mine")

    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    a = step(x, y)
    a.register_hook(angry)
    b = step(x, y)
    with inject_oom(nth=6, phase="backward") as fault, pytest.raises(ValueError, match="mine"):
        (a + b).backward()
    assert fault.fired
    assert all(p.grad is None for p in model.parameters())


def test_a_kept_graph_gets_no_second_set_of_observers() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    log: list[str] = []
    total = _sum(lambda: step(x, y), lambda: step(x, y), log)
    total.backward(retain_graph=True)
    total.backward()
    assert log == ["sum", "sum"]


@pytest.mark.parametrize("k", [1, 2])
def test_many_losses_wait_beside_the_one_that_runs(k: int) -> None:
    """Of several steps; only what a backward reaches is its own, the others wait on."""
    for nth in (3, 5, 8):
        worlds = [world() for _ in range(6)]
        steps = [oomkit.auto_batch(loss_of(m), accumulation_steps=k) for m, _, _ in worlds]
        waiting = [
            [step(x, y) for _ in range(5)] for step, (_, x, y) in zip(steps, worlds, strict=True)
        ]
        with inject_oom(nth=nth, phase="backward") as fault:
            waiting[3][2].backward()
        assert fault.fired or k == 2
        for i, (model, _, _) in enumerate(worlds):
            got = grads(model)
            assert close(got, plain()) if i == 3 else all(g is None for g in got)
        waiting[3][4].backward()
        torch.autograd.backward([waiting[0][0], waiting[5][1], waiting[0][4]])
        for i, times in ((3, 2), (0, 2), (5, 1)):
            want = plain(lambda v, times=times: v * times)  # type: ignore[misc]
            assert close(grads(worlds[i][0]), want)
