"""The judge itself: each verdict comes of a program that was made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oomkit

from .judge import Trouble, World, judge
from .known import net, pair, sgd

ROWS = 8
TWO = Trouble("two", steps=2)


def _world(act: Callable[[Any, Any], None] | None = None, *, after: bool = False) -> World:
    """A classifier; while it is split `act` is called with model and optimizer."""
    torch.manual_seed(1)
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        split = oomkit.current().count > 1 and oomkit.current().is_last
        if split and act is not None and not after:
            act(model, optimizer)
        optimizer.step()
        if split and act is not None and after:
            act(model, optimizer)
        return loss.detach()

    return World(step, [model, optimizer], pair(ROWS))


def _refuse(model: Any, optimizer: Any) -> None:
    raise oomkit.SplitError("by the program")


def _raise(model: Any, optimizer: Any) -> None:
    raise ValueError("of the program")


def _move(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].bias.add_(1e-7)


def _move_and_raise(model: Any, optimizer: Any) -> None:
    _move(model, optimizer)
    raise ValueError("of the program")


@pytest.mark.parametrize(
    ("act", "after", "kind"),
    [
        (None, False, "exact"),
        (_refuse, True, "late"),
        (_move, True, "silent"),
        (_move_and_raise, True, "changed"),
    ],
)
def test_verdicts(act: Any, after: bool, kind: str) -> None:
    verdict = judge(lambda: _world(act, after=after), TWO, ROWS, verify=False)
    assert verdict.kind == kind, verdict


@pytest.mark.parametrize(("act", "kind"), [(_refuse, "refused"), (_raise, "raised")])
def test_errors_before_anything_happened(act: Any, kind: str) -> None:
    def make() -> World:
        world = _world()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if oomkit.current().count > 1:
                act(None, None)
            return torch.zeros(())

        world.step = step
        return world

    verdict = judge(make, TWO, ROWS)
    assert verdict.kind == kind, verdict


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_faults_strike_before_the_update(phase: str, share: float) -> None:
    verdict = judge(_world, Trouble("fault", phase, share=share))
    assert (verdict.kind, verdict.fired, verdict.split) == ("exact", 1, True), verdict


def test_random_numbers_that_are_not_put_back_are_a_change() -> None:
    """Of an error that is the program's own, everything stays as it is."""

    def make() -> World:
        world = _world()
        step, calls = world.step, [0]

        def fails(x: torch.Tensor, y: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] == 2 and oomkit.current().weight < 1:
                torch.rand(1)
                raise ValueError("of the program")
            return step(x, y)

        world.step = fails
        return world

    assert judge(make, TWO, ROWS, rng="none").kind == "changed"


def test_small_differences_count() -> None:
    def make() -> World:
        world = _world()
        step = world.step
        world.step = lambda x, y: step(x, y) * (1 + 1e-7 * (oomkit.current().count - 1))
        return world

    assert judge(make, TWO, ROWS, verify=False).kind == "silent"
    assert judge(lambda: _tolerant(make()), TWO, ROWS, verify=False).kind == "exact"


def _tolerant(world: World) -> World:
    world.tolerance = 1e-5
    return world
