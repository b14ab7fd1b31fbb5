"""Hugging Face's accelerate: its wrappers step once, accumulate() counts once per batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

BATCHES = 4


@pytest.fixture(autouse=True)
def _no_accelerator_left() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """Four batches of a whole step over accelerate's wrappers, in double precision."""

    def __init__(self, inside: bool = False, accumulation: int = 1, hidden: bool = False) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(SEED)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        adam = torch.optim.AdamW(net.parameters(), lr=0.01)
        halved = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
        self.adam = adam
        self.net, self.opt, self.sched = self.accelerator.prepare(net, adam, halved)
        net, opt, sched = self.net, self.opt, self.sched
        registry = {"a": {"b": {"c": deque([self.accelerator])}}}
        shown = None if hidden else self.accelerator

        def body(accelerator: Accelerator, x: torch.Tensor, y: torch.Tensor) -> float:
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
            sched.step()
            opt.zero_grad()
            return loss.item()

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            accelerator = registry["a"]["b"]["c"][0] if shown is None else shown
            if not inside:
                return body(accelerator, x, y)
            with accelerator.accumulate(net):
                return body(accelerator, x, y)

        self.step: Any = step
        self.losses: list[float] = []

    def go(self, fault: tuple[int, int, str | None] | None = None) -> Run:
        source = torch.Generator().manual_seed(1)
        for batch in range(BATCHES):
            x = torch.randn(8, 6, generator=source).double()
            y = torch.randint(0, 3, (8,), generator=source)
            if fault is not None and fault[0] == batch:
                with inject_oom(nth=fault[1], phase=fault[2]) as armed:
                    self.losses.append(self.step(x, y))
                assert armed.fired == 1
            else:
                self.losses.append(self.step(x, y))
        return self

    def numbers(self) -> list[torch.Tensor]:
        steps = [s["step"].double() for s in self.adam.state_dict()["state"].values()]
        rest = [self.losses, self.sched.get_last_lr()]
        return [*(p.detach() for p in self.net.parameters()), *steps, *map(torch.tensor, rest)]

    def counts(self) -> list[Any]:
        inner = self.sched.scheduler
        return [
            self.accelerator.step,
            self.accelerator.sync_gradients,
            inner.last_epoch,
            inner._step_count,
            [p.grad is None for p in self.net.parameters()],
        ]


def _equal(a: Run, b: Run) -> bool:
    assert a.counts() == b.counts()
    return all((x - y).abs().max() <= 1e-12 for x, y in zip(a.numbers(), b.numbers(), strict=True))


SHAPES = {
    "plain": {},
    "accumulate": {"inside": True},
    "accumulate 2": {"inside": True, "accumulation": 2},
}
FAULTS = [(0, 2, None), (1, 1, "backward"), (2, 6, "backward"), (3, 1, "backward")]


@pytest.mark.parametrize("shape", SHAPES)
def test_split_from_the_start(shape: str) -> None:
    whole = Run(**SHAPES[shape]).go()
    split = Run(**SHAPES[shape])
    split.step = oomkit.auto_batch(split.step, accumulation_steps=2)
    assert _equal(whole, split.go())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_out_of_memory(shape: str, fault: tuple[int, int, str | None]) -> None:
    whole = Run(**SHAPES[shape]).go()
    run = Run(**SHAPES[shape])
    run.step = oomkit.auto_batch(run.step)
    assert _equal(whole, run.go(fault))
    assert max(r.accumulation_steps for r in run.step.records) > 1


def test_an_accelerator_that_was_not_found() -> None:
    """Its count may have moved in the failed attempt: refused once, known from then on."""
    run = Run(inside=True, accumulation=2, hidden=True)
    run.step = oomkit.auto_batch(run.step, model=run.net, optimizer=run.opt)
    x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
    with inject_oom(nth=2):
        with pytest.raises(oomkit.SplitError, match=r"pass participants=\[accelerator\]"):
            run.step(x, y)
    assert "_do_sync" not in vars(run.accelerator) and "accumulate" not in vars(run.accelerator)
    before = run.accelerator.step
    with inject_oom(nth=2):
        run.step(x, y)
    assert run.accelerator.step == before + 1


def test_an_accelerator_that_was_not_found_is_found_before_the_first_split() -> None:
    whole = Run(inside=True, accumulation=2).go()
    run = Run(inside=True, accumulation=2, hidden=True)
    run.step = oomkit.auto_batch(run.step, accumulation_steps=2)
    assert _equal(whole, run.go())


def test_an_accelerator_as_a_participant() -> None:
    whole = Run(inside=True, accumulation=2).go()
    run = Run(inside=True, accumulation=2, hidden=True)
    run.step = oomkit.auto_batch(run.step, participants=[run.accelerator])
    assert _equal(whole, run.go((1, 1, "backward")))


def test_accumulate_twice_in_a_step_is_refused() -> None:
    run = Run()
    accelerator, net = run.accelerator, run.net

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        for _ in range(2):
            with accelerator.accumulate(net):
                accelerator.backward(net(x).mean())

    with pytest.raises(oomkit.SplitError, match="entered twice in one step"):
        step(torch.randn(8, 6).double())
    assert accelerator.step == 0
    assert all(p.grad is None for p in net.parameters())
