"""Leaves that only a backward inside a backward leads to: reentrant checkpoints, Functions."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.messages import message_of
from helpers.sample import sampled, with_rest
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

DOUBLE = torch.float64
WAYS_OUT = ("pass model=", "participants=", "do not keep it", "gradient_safety=")


class _Inner(torch.autograd.Function):
    """Runs a backward of its own, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, registry: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.registry = registry
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(_hidden(ctx.registry)(x).tanh(), grad)
        return x.grad, None


def _hidden(registry: Any, number: int = 0) -> Any:
    return registry["a"]["b"]["c"][number]


class _World:
    """A model that is found, and what no search finds: modules, or a tensor."""

    def __init__(self, how: str, form: str, prior: bool) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Linear(6, 8, dtype=DOUBLE)
        modules = [nn.Linear(8, 8, dtype=DOUBLE) for _ in range(2)]
        leaf = torch.randn(8, dtype=DOUBLE, requires_grad=True)
        self.leaves = [*self.model.parameters(), leaf]
        self.leaves += [p for m in modules for p in m.parameters()]
        if prior:
            for p in self.leaves:
                p.grad = torch.full_like(p, 0.5)
        found: list[Any] = [leaf.mul] if how == "tensor" else list(modules)
        registry = {"a": {"b": {"c": deque(found)}}}
        model = self.model
        self.x = torch.randn(8, 6, dtype=DOUBLE)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            if how in ("function", "tensor"):
                y = _Inner.apply(y, registry)
            elif how == "known":
                y = checkpoint(lambda a: model(a[:, :6]).tanh(), y, use_reentrant=True)
            else:
                for n in range(2 if how == "two" else 1):
                    y = checkpoint(
                        lambda a, n=n: _hidden(registry, n)(a).tanh(), y, use_reentrant=True
                    )
            return y.pow(2).mean()

        def inside(x: torch.Tensor) -> None:
            loss_of(x).backward()

        self.step = loss_of if form == "returned" else inside
        self.protected = oomkit.auto_batch(self.step)

    def run(self, step: Any) -> None:
        loss = step(self.x)
        if loss is not None:
            loss.backward()

    def attempt(self) -> str:
        """What it is refused with."""
        try:
            self.run(self.protected)
        except (oomkit.OutOfMemory, oomkit.SplitError) as error:
            return message_of(error)
        return ""

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.leaves]


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(
        (p is None) == (q is None) and (p is None or torch.allclose(p, q, rtol=1e-9, atol=1e-12))
        for p, q in zip(a, b, strict=True)
    )


HOW = ["checkpoint", "two", "function", "tensor", "known"]
NESTED = list(itertools.product(HOW, ["inside", "returned"], [False, True]))


@pytest.mark.parametrize(
    ("how", "form", "prior"),
    with_rest(sampled(NESTED, 10, "nested", kind=lambda case: case[0]), NESTED),
)
def test_every_place_of_an_oom_is_exact_or_refused_by_name(
    how: str, form: str, prior: bool
) -> None:
    """The backward inside had written to them before it failed, and the replay added again."""
    whole = _World(how, form, prior)
    whole.run(whole.step)
    expected, kinds = whole.gradients(), Counter[str]()
    for phase in ("forward", "backward"):
        for nth in range(1, 60):
            world = _World(how, form, prior)
            before = world.gradients()
            with inject_oom(nth=nth, phase=phase) as armed:
                refused = world.attempt()
            kinds["refused" if refused else "exact"] += 1
            if refused:
                assert any(word in refused for word in WAYS_OUT), refused
                assert _same(world.gradients()[:2], before[:2]), (phase, nth)
            else:
                assert _same(world.gradients(), expected), (phase, nth)
            if not armed.fired:
                break
        assert nth < 59
    # Twice without an OOM. A second module that is found when the first one's gradient from before
    # the call has been added to is one too many: what is found in the graph has no copy.
    assert kinds["exact"] >= (2 if how == "tensor" or (how == "two" and prior) else 5)
    assert (kinds["refused"] > 0) == (how != "known")


def test_a_reentrant_checkpoint_of_known_modules_is_begun_once() -> None:
    """The inputs that it makes anew are nobody's, and die in it."""
    world = _World("known", "inside", False)
    with inject_oom(nth=1, phase="backward"):
        world.run(world.protected)
    (record,) = world.protected.records
    assert (record.attempts, record.ooms) == (2, 1)


class _Fails(torch.autograd.Function):
    """Out of memory in the backward of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if len(grad) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return grad


def test_what_only_the_failed_backward_inside_led_to_is_refused() -> None:
    """No replay leads to it, and a part of the failed attempt would have stayed in it."""
    torch.manual_seed(SEED)
    model, hidden = nn.Linear(6, 8), nn.Linear(8, 8)
    registry = {"a": {"b": {"c": deque([hidden])}}}

    def block(a: torch.Tensor) -> torch.Tensor:
        a = _Fails.apply(a)
        return _hidden(registry)(a) if len(a) == 8 else a

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor) -> None:
        checkpoint(block, model(x), use_reentrant=True).pow(2).mean().backward()

    with pytest.raises(oomkit.OutOfMemory, match="did not find has a gradient"):
        step(torch.randn(8, 6))
    assert hidden.weight.grad is not None
    assert all(p.grad is None for p in model.parameters())


class _NoBias(torch.autograd.Function):
    """Gives what it adds no gradient, though it requires one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _routed(how: str) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """A step that leads to a hidden module from its last rows alone, or to a part of it."""
    torch.manual_seed(SEED)
    model, hidden = nn.Linear(6, 8, dtype=DOUBLE), nn.Linear(8, 8, dtype=DOUBLE)
    registry = {"a": {"b": {"c": deque([hidden])}}}
    x = torch.randn(8, 6, dtype=DOUBLE)
    x[:, 0] = torch.tensor([-1.0] * 4 + [1.0] * 4)

    def part(a: torch.Tensor) -> torch.Tensor:
        return _hidden(registry)(a).tanh()

    def step(x: torch.Tensor) -> None:
        y, last = model(x).tanh(), x[:, 0] > 0
        if how == "sibling":
            h = _hidden(registry)
            y = _NoBias.apply(F.linear(y, h.weight), h.bias)
        elif last.any():
            rows = y[last]
            rows = checkpoint(part, rows, use_reentrant=True) if how == "nested" else part(rows)
            y = y.index_put((last.nonzero()[:, 0],), rows)
        (y.pow(2).sum() / 64).backward()
        torch.empty(1000)

    return step, x, [*model.parameters(), *hidden.parameters()]


@pytest.mark.parametrize("how", ["plain", "nested", "sibling"])
def test_what_only_later_rows_lead_to_is_refused_once_the_whole_batch_has_run(how: str) -> None:
    """Leaves were met in the first micro-batch alone, and a module's by one of them."""
    step, x, leaves = _routed(how)
    step(x)
    expected = [None if p.grad is None else p.grad.clone() for p in leaves]
    refused = 0
    for phase in ("forward", "backward"):
        for nth in range(1, 60):
            step, x, leaves = _routed(how)
            protected = oomkit.auto_batch(step, reduction="sum", verify=False)
            with inject_oom(nth=nth, phase=phase) as armed:
                try:
                    protected(x)
                except (oomkit.OutOfMemory, oomkit.SplitError) as error:
                    assert any(word in str(error) for word in WAYS_OUT), error
                    refused += 1
                    continue
            assert _same([p.grad for p in leaves], expected), (phase, nth)
            if not armed.fired:
                break
        assert nth < 59
    assert refused > 0
