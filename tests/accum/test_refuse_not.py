"""What is not refused: beside the steps of test_refuse.py, the ones that look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import IGNORE, World
from torch import nn
from torch.nn.modules import module as torch_module
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

Step = Callable[[torch.Tensor, torch.Tensor], Any]


def _joint(w: World, extra: Callable[[], Any] = lambda: None) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        w.opt.zero_grad()
        w.critic_opt.zero_grad()
        out = w.net(x)
        (F.cross_entropy(out, y) + w.critic(out).mean()).backward()
        w.critic_opt.step()
        w.opt.step()
        return extra()

    return step


@pytest.mark.parametrize("k", [1, 2, 4])
def test_optimizers_stepped_one_after_the_other_are_exact(k: int) -> None:
    worlds = []
    for decorated in (False, True):
        w = World()
        w.net.eval().double()
        w.critic.eval().double()
        w.x = w.x.double()
        w.opt = torch.optim.Adam(w.net.parameters(), lr=0.01)
        w.critic_opt = torch.optim.SGD(w.critic.parameters(), lr=0.1, momentum=0.9)
        criterion = nn.L1Loss()  # holds nothing: it may be called after the update
        step = _joint(w, lambda c=criterion: c(torch.ones(2), torch.zeros(2)).item())
        if not decorated:
            step(w.x, w.y)
        elif k > 1:
            oomkit.auto_batch(step, accumulation_steps=k)(w.x, w.y)
        else:
            with inject_oom(nth=2, phase="backward") as armed:
                oomkit.auto_batch(step)(w.x, w.y)
            assert armed.fired == 1
        worlds.append(w)
    for module in ("net", "critic"):
        pairs = zip(*(getattr(w, module).parameters() for w in worlds), strict=True)
        assert all((a - b).abs().max() <= 1e-12 for a, b in pairs)


@IGNORE
@pytest.mark.parametrize("kept", ["average", "norm", "same", "cache"])
def test_what_a_step_keeps_on_its_parameters_is_no_gradient(kept: str) -> None:
    """Averages that move behind the update, figures of another shape, what stays as it is."""
    found = []
    for k in (1, 2):
        w = World()
        w.net.eval()
        for p in w.net.parameters():
            p.kept = torch.zeros_like(p)  # type: ignore[attr-defined]

        def step(x: torch.Tensor, y: torch.Tensor, w: World = w) -> None:
            w.opt.zero_grad()
            for p in w.net.parameters() if kept == "cache" else ():
                p.kept = p.detach().round(decimals=3)  # type: ignore[attr-defined]
            w.loss(x, y).backward()
            for p in w.net.parameters() if kept == "norm" else ():
                p.kept = p.detach().flatten().norm()[None, None, None]  # type: ignore[attr-defined]
            w.opt.step()
            if kept == "average" and oomkit.current().is_last:
                for p in w.net.parameters():
                    p.kept.lerp_(p.detach(), 0.5)  # type: ignore[attr-defined]

        for _ in range(2):
            oomkit.auto_batch(step, accumulation_steps=k)(w.x, w.y)
        found.append([p.kept for p in w.net.parameters()])  # type: ignore[attr-defined]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@IGNORE
def test_a_forward_in_the_last_micro_batch_is_the_steps_own_decision() -> None:
    w = World()
    seen = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.loss(x, y).backward()
        w.opt.step()
        if oomkit.current().is_last:
            seen.append(w.loss(w.x, w.y).item())

    step(w.x, w.y)
    assert seen == [w.loss(w.x, w.y).item()]
    assert not torch_module._global_forward_pre_hooks


@IGNORE
def test_another_network_may_be_called_after_an_update() -> None:
    w = World()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        w.opt.zero_grad()
        out = w.net(x)
        F.cross_entropy(out, y).backward()
        w.opt.step()
        return w.critic(out.detach()).detach()

    assert step(w.x, w.y).shape == (8, 1)


@IGNORE
def test_the_forward_hook_goes_with_every_kind_of_end() -> None:
    w = World()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.loss(x, y).backward()
        w.opt.step()
        if isinstance(end, BaseException):
            raise end

    for end in (None, ValueError("mine"), KeyboardInterrupt()):
        decorated = oomkit.auto_batch(step, accumulation_steps=2)
        if end is None:
            decorated(w.x, w.y)
        else:
            with pytest.raises(type(end)):
                decorated(w.x, w.y)
        assert not torch_module._global_forward_pre_hooks


def test_a_backward_inside_a_functions_backward_stays_allowed() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                (x.detach() @ held[0]).backward(grad)
            return grad @ weight.t(), None

    def run(k: int) -> torch.Tensor:
        torch.manual_seed(SEED)
        first = nn.Linear(4, 5).double()
        held.append(nn.Parameter(torch.randn(5, 2, dtype=torch.float64)))
        weight = held[0]

        def step(x: torch.Tensor) -> None:
            Inner.apply(first(x), weight).pow(2).mean().backward()

        x = torch.randn(8, 4, dtype=torch.float64)
        (step if k == 1 else oomkit.auto_batch(step, accumulation_steps=k, model=[first]))(x)
        grads = torch.cat([p.grad.flatten() for p in (*first.parameters(), weight)])
        held.clear()
        return grads

    held: list[nn.Parameter] = []
    assert (run(1) - run(4)).abs().max() <= 1e-12


@pytest.mark.parametrize("source", ["torch.autograd", "torch.autograd.graph"])
def test_functions_taken_from_their_modules_are_seen(source: str) -> None:
    from torch.autograd import backward
    from torch.autograd.graph import _engine_run_backward

    w = World()
    w.net.eval()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.net.zero_grad()
        loss = w.loss(x, y)
        if source == "torch.autograd":
            backward(loss)
        else:
            one = (torch.ones_like(loss),)
            _engine_run_backward(
                (loss,), one, False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    step(w.x, w.y)
    whole = [p.grad.clone() for p in w.net.parameters()]
    oomkit.auto_batch(step, accumulation_steps=2)(w.x, w.y)
    for a, p in zip(whole, w.net.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6)
