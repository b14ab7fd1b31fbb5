"""Attributes that torch sets on optimizers and schedulers while they step: after a roll-back they
are those of the entry."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def attributes(*things: Any) -> list[dict[str, Any]]:
    return [dict(vars(thing)) for thing in things]


@pytest.mark.parametrize("safety", ["predict", "copy", "parts"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_refused_first_step_leaves_no_attribute_behind(name: str, safety: str) -> None:
    """A scheduler wraps the optimizer's step(), and the wrapper sets `_opt_called` on it."""
    net = nn.Linear(3, 2)
    opt = OPTIMIZERS[name](net.parameters())
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)

    @oomkit.auto_batch(optimizer_safety=safety)
    def step(x: torch.Tensor) -> None:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
        sched.step()

    before = attributes(opt, sched)
    with inject_oom(nth=1, times=None, phase="optimizer"), pytest.raises(torch.OutOfMemoryError):
        step(torch.ones(4, 3))
    assert attributes(opt, sched) == before
    step(torch.ones(4, 3))
    assert opt._opt_called is True
    assert sched.last_epoch == 1


def test_a_scheduler_that_steps_after_a_refused_step_comes_before_the_optimizer() -> None:
    """torch warns of it by that attribute."""
    net = nn.Linear(3, 2)
    opt = OPTIMIZERS["adamw"](net.parameters())
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()

    with inject_oom(nth=1, times=None, phase="optimizer"), pytest.raises(torch.OutOfMemoryError):
        step(torch.ones(4, 3))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        sched.step()


def fused(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, eps=1e-2, fused=True)


def scaled(
    net: nn.Module, opt: torch.optim.Optimizer, **options: Any
) -> tuple[torch.amp.GradScaler, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor) -> None:
        opt.zero_grad()
        scaler.scale(net(x).pow(2).mean()).backward()
        scaler.step(opt)
        scaler.update()

    return scaler, step


def trained(faults: Callable[[], Any], **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2, dtype=torch.float64)
    opt = fused(net)
    _, step = scaled(net, opt, **options)
    x = torch.randn(4, 3, dtype=torch.float64)
    try:
        with faults():
            step(x)
    except torch.OutOfMemoryError:
        pass
    else:
        return [p.detach() for p in net.parameters()]
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(opt))
    step(x)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("times", [1, 2, 3, 4, None])
@pytest.mark.parametrize("safety", ["predict", "copy", "parts"])
def test_a_scale_that_a_failed_step_left_is_not_used_again(safety: str, times: int | None) -> None:
    """GradScaler.step() sets `grad_scale` on a fused optimizer, takes it away when step() has
    returned, and multiplies by what it finds: a replay had the square of the scale."""
    options = {"optimizer_safety": safety}
    want = trained(nullcontext, **options)
    got = trained(lambda: inject_oom(nth=1, times=times, phase="optimizer"), **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_partial_update_leaves_no_scale_behind() -> None:
    """After it comes a checkpoint, which has none of these attributes."""

    class Half(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            with inject_oom(nth=1, times=None):
                torch.ones(1)

    net = nn.Linear(3, 2)
    opt = Half(net.parameters(), fused=True)
    _, step = scaled(net, opt)
    with pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(4, 3))
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(opt))


def test_a_partial_update_counts_as_no_step() -> None:
    """It asks for a checkpoint, and random programs go on from one as if there had been none."""
    net = nn.Linear(3, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()

    before = sorted(vars(opt))
    with inject_oom(nth=4, phase="optimizer"), pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(1, 3))
    assert sorted(vars(opt)) == before
    assert sched.last_epoch == 0


class Counting(torch.optim.SGD):
    """What its step() keeps beside its state."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.last = "begun"
        super().step()


def test_attributes_of_an_optimizer_of_ones_own_go_back() -> None:
    net = nn.Linear(3, 2)
    opt = Counting(net.parameters(), lr=0.1, momentum=0.5, foreach=False)
    seen: Seen[int] = Seen()

    @oomkit.auto_batch(optimizer_safety="copy")
    def step(x: torch.Tensor) -> None:
        seen.append(opt.calls)
        net(x).mean().backward()
        opt.step()

    with inject_oom(nth=1, times=2, phase="optimizer"):
        step(torch.ones(4, 3))
    assert seen == [0] * len(seen)
    assert len(seen) > 1


def test_a_step_before_the_one_that_failed_is_counted() -> None:
    net = nn.Linear(3, 2)
    opt = Counting(net.parameters(), lr=0.1, momentum=0.5, foreach=False)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()
        with inject_oom(nth=1, times=None, phase="optimizer"):
            opt.step()

    with pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(4, 3))
    assert opt.calls == 1


@pytest.mark.parametrize("chained", [False, True])
def test_a_scheduler_that_fails_half_way_goes_back(chained: bool) -> None:
    """With a tensor for a rate it allocates; by then it has counted."""
    net = nn.Linear(3, 2)
    for p in net.parameters():
        p.requires_grad_(False)
    opt = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5), foreach=False)
    inner = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (epoch + torch.ones(())))
    sched = torch.optim.lr_scheduler.ChainedScheduler([inner], opt) if chained else inner

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x)
        sched.step()

    before = attributes(opt, sched, inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fault = inject_oom(nth=4, times=None)
        with fault, pytest.raises(torch.OutOfMemoryError):
            step(torch.ones(4, 3))
        assert fault.fired
        assert [sorted(a) for a in attributes(opt, sched, inner)] == [sorted(a) for a in before]
        assert inner.last_epoch == 0
        assert inner._step_count == 1
        step(torch.ones(4, 3))
    assert inner.last_epoch == 1
