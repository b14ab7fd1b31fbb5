"""Gradients that add up over several calls, and memory that runs out in one of the later ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sample import sampled
from helpers.seeds import seed_all
from helpers.seen import Seen
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import SEED

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

WINDOW = 4
FORMS = ("inside", "returned", "backward", "tuple")


class World:
    """A model, its optimizer, a step in some form, and two windows.

    It draws numbers twice, so that two halves have other masks than the whole."""

    def __init__(self, form: str = "inside", norm: bool = False, dropout: float = 0.3) -> None:
        seed_all(SEED)
        self.form = form
        self.model = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8) if norm else nn.Identity(),
            nn.Dropout(dropout),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 3),
        ).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = [
            (torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,)))
            for _ in range(2 * WINDOW)
        ]
        self.step = oomkit.auto_batch(self.loss, backward=form == "backward")

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.model(x)
        loss = F.cross_entropy(out, y) / WINDOW
        if self.form == "inside":
            loss.backward()
            return loss.detach()
        return (loss, out.detach()) if self.form == "tuple" else loss

    def call(self, x: torch.Tensor, y: torch.Tensor) -> None:
        result = self.step(x, y)
        if self.form in ("returned", "tuple"):
            (result[0] if self.form == "tuple" else result).backward()

    def run(self, at: int, around: Callable[[], Any]) -> list[torch.Tensor]:
        """The gradients of the second window, with its call `at` inside of `around()`."""
        for i, (x, y) in enumerate(self.data):
            if i == WINDOW:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if i == WINDOW + at:
                with around():
                    self.call(x, y)
            else:
                self.call(x, y)
        return [*(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]


def _count(form: str, phase: str = "backward", **options: Any) -> int:
    counted = inject_oom(nth=2**60, phase=phase)
    World(form, **options).run(3, lambda: counted)
    return counted.seen


def _near(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all((x - y).abs().max() <= 1e-14 for x, y in zip(a, b, strict=True))


@pytest.mark.sample(4)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_error_in_the_backward_of_a_later_call(form: str, norm: bool) -> None:
    """Each: the shape is proven, numbers are drawn, gradients of earlier calls are there."""
    planned = World(form, norm)
    expected = planned.run(3, lambda: force_slices([4, 4]))
    stream, buffers = torch.get_rng_state(), [*planned.model.buffers()]
    for nth in sampled(range(1, _count(form, norm=norm) + 1), 12):
        world, fault = World(form, norm), inject_oom(nth=nth, phase="backward")
        got = world.run(3, lambda: fault)  # noqa: B023
        assert fault.fired == 1
        assert _near(expected, got), nth
        assert torch.equal(stream, torch.get_rng_state())
        assert all(map(torch.equal, buffers, world.model.buffers()))
        assert world.step.records[WINDOW + 3].ooms == 1


def test_the_very_tensors_stay_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    last = _count("inside")
    world, held = World(), list[Any]()

    def around() -> Any:
        held.extend(p.grad for p in world.model.parameters())
        return inject_oom(nth=last, phase="backward")

    with caplog.at_level(logging.INFO, "oomkit"):
        world.run(3, around)
    assert all(p.grad is g for p, g in zip(world.model.parameters(), held, strict=True))
    assert "up to rounding, not bit for bit" in caplog.text


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("times", [1, 2])
def test_errors_one_after_the_other(form: str, times: int) -> None:
    """A later one strikes what computes again, which is tried twice, or a micro-batch."""
    cuts = [4] * 2, [2] * 4, [1] * 8
    fine = [World(form).run(3, lambda: force_slices(each)) for each in cuts]  # noqa: B023
    last, refused = _count(form), 0
    for nth in sampled(range(1, 4 * last), 9):
        fault = inject_oom(nth=last, phase="backward", then=inject_oom(nth=nth, times=times))
        world = World(form)
        try:
            got = world.run(3, lambda: fault)  # noqa: B023
        except oomkit.OutOfMemory as error:
            assert "zero_grad()" in str(error)
            refused += 1
            continue
        assert any(_near(each, got) for each in fine), nth
    assert (refused > 0) == (times == 2)


def test_a_step_that_is_not_the_same_the_second_time_is_refused() -> None:
    """It would take something else off than was added."""
    last = _count("inside")
    world, calls = World(), Seen([0])

    def loss(x: torch.Tensor, y: torch.Tensor) -> None:
        calls[0] += 1
        (F.cross_entropy(world.model(x), y) * calls[0]).backward()

    world.step = oomkit.auto_batch(loss)
    with pytest.raises(oomkit.OutOfMemory, match="could not be recomputed") as caught:
        world.run(3, lambda: inject_oom(nth=last, phase="backward"))
    assert "zero_grad()" in str(caught.value)
    assert not getattr(caught.value, "__notes__", [])


def test_what_overflowed_is_not_taken_off() -> None:
    last = _count("inside")
    world, huge = World(), [1.0]

    def loss(x: torch.Tensor, y: torch.Tensor) -> None:
        value = F.cross_entropy(world.model(x), y)
        value.backward(torch.full_like(value, huge[0]))

    world.step = oomkit.auto_batch(loss)

    def around() -> Any:
        huge[0] = float("inf")
        return inject_oom(nth=last - 3, phase="backward")  # no gradient of the root is made

    with pytest.raises(oomkit.OutOfMemory, match="could not be recomputed"):
        world.run(3, around)


def test_a_step_that_catches_everything() -> None:
    """What ends the second run may be caught; nothing of the rest counts."""
    expected = World().run(3, lambda: force_slices([4, 4]))
    last = _count("inside")
    world = World()

    def loss(x: torch.Tensor, y: torch.Tensor) -> None:
        value = F.cross_entropy(world.model(x), y) / WINDOW
        try:
            value.backward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            world.model.zero_grad()

    world.step = oomkit.auto_batch(loss)
    got = world.run(3, lambda: inject_oom(nth=last, phase="backward"))
    assert _near(expected, got)


def test_a_reentrant_checkpoint_is_refused() -> None:
    """Its backward takes no list of leaves, and what it has added so far is a part."""
    world = World()

    def loss(x: torch.Tensor, y: torch.Tensor) -> None:
        inner = world.model[:3](x)
        out = checkpoint(world.model[3:], inner, use_reentrant=True)
        (F.cross_entropy(out, y) / WINDOW).backward()

    world.step = oomkit.auto_batch(loss)
    seen = inject_oom(nth=2**60, phase="backward")
    world.run(3, lambda: seen)
    world = World()
    world.step = oomkit.auto_batch(loss)
    with pytest.raises((oomkit.OutOfMemory, oomkit.SplitError)):
        world.run(3, lambda: inject_oom(nth=seen.seen, phase="backward"))


def test_an_interrupt_in_the_second_run_passes() -> None:
    last = _count("inside")
    world, runs = World(), Seen([0])

    def loss(x: torch.Tensor, y: torch.Tensor) -> None:
        runs[0] += 1
        if runs[0] == WINDOW + 5:  # the last call of the window, for the second time
            raise KeyboardInterrupt
        (F.cross_entropy(world.model(x), y) / WINDOW).backward()

    world.step = oomkit.auto_batch(loss)
    with pytest.raises(KeyboardInterrupt) as caught:
        world.run(3, lambda: inject_oom(nth=last, phase="backward"))
    assert any("zero_grad()" in note for note in getattr(caught.value, "__notes__", []))
