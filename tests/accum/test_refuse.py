"""Steps that a split would get wrong: refused by line, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import IGNORE, World, same
from torch import nn
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

Step = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass
class Case:
    make: Callable[[World], Step]
    split: str  # what SplitError says when the batch is split
    whole: str | None = None  # what OutOfMemory says when it is not even split
    line: bool = True  # the message names a line of this file


def _gan(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.critic_opt.zero_grad()
        w.critic(w.net(x).detach()).mean().backward()
        w.critic_opt.step()
        w.opt.zero_grad()
        (-w.critic(w.net(x)).mean()).backward()
        w.opt.step()

    return step


def _gan_as_methods(w: World) -> Step:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.critic, self.opt, self.critic_opt = w.net, w.critic, w.opt, w.critic_opt

        def critic_step(self, x: torch.Tensor) -> None:
            self.critic_opt.zero_grad()
            self.critic(self.net(x).detach()).mean().backward()
            self.critic_opt.step()

        def net_step(self, x: torch.Tensor) -> None:
            self.opt.zero_grad()
            (-self.critic(self.net(x)).mean()).backward()
            self.opt.step()

        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.critic_step(x)
            self.net_step(x)

    return Trainer().step


def _two_updates_without_modules(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        out = w.net(x)
        w.critic(out.detach()).mean().backward()
        w.critic_opt.step()
        F.cross_entropy(out, y).backward()
        w.opt.step()

    return step


def _forward_after(kind: str) -> Callable[[World], Step]:
    def make(w: World) -> Step:
        scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0)
        averaged = torch.optim.swa_utils.AveragedModel(w.net)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            w.opt.zero_grad()
            loss = w.loss(x, y)
            if kind in ("scaler", "by keyword"):
                scaler.scale(loss).backward()
                scaler.step(w.opt) if kind == "scaler" else scaler.step(optimizer=w.opt)
                scaler.update()
            else:
                loss.backward()
                w.opt.step()
            if kind == "averaged":
                averaged.update_parameters(w.net)
                with torch.no_grad():
                    return averaged(x)
            if kind == "submodule":
                return w.net[0](x).detach()
            if kind == "no_grad":
                with torch.no_grad():
                    return w.loss(x, y)
            return w.loss(x, y).detach()

        return step

    return make


def _lbfgs(w: World) -> Step:
    optimizer = torch.optim.LBFGS(w.net.parameters(), max_iter=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = w.loss(x, y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


def _closure_by_name(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            w.opt.zero_grad()
            loss = w.loss(x, y)
            loss.backward()
            return loss

        w.opt.step(closure=closure)

    return step


def _backward_in_a_hook(kind: str) -> Callable[[World], Step]:
    def make(w: World) -> Step:
        def auxiliary(*args: Any) -> None:
            with torch.enable_grad():
                w.critic[0].weight.pow(2).sum().backward()

        if kind == "module":
            w.net[3].register_full_backward_hook(auxiliary)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            w.opt.zero_grad()
            w.critic_opt.zero_grad()
            hidden = w.net[0](x)
            if kind == "tensor":
                hidden.register_hook(auxiliary)
            F.cross_entropy(
                w.net[3](w.net[2](w.net[1](hidden))) + 0 * w.critic[0].bias.sum(), y
            ).backward()
            w.opt.step()
            w.critic_opt.step()

        return step

    return make


def _past_autograd(where: str) -> Callable[[World], Step]:
    """The engine called directly: no function of torch.autograd sees that backward."""

    def make(w: World) -> Step:
        engine = torch.autograd.Variable._execution_engine

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss = w.loss(x, y)
            if where == "second":
                loss.backward(retain_graph=True)
            engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
            )
            w.opt.step()
            if where == "cleared":
                w.opt.zero_grad()

        return step

    return make


def _per_sample_gradients(w: World) -> Step:
    """As by Opacus: an update that is made of the clipped gradient of each sample."""

    given: dict[Any, torch.Tensor] = {}

    def keep(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        given[layer] = args[0].detach()

    def each_sample(layer: Any, inner: Any, outer: Any) -> None:
        layer.weight.grad_sample = torch.einsum("ni,nj->nij", outer[0], given[layer])
        layer.bias.grad_sample = outer[0]

    for layer in (w.critic[0], w.critic[2]):
        layer.register_forward_hook(keep)
        layer.register_full_backward_hook(each_sample)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.critic_opt.zero_grad()
        w.critic(w.net(x).detach().requires_grad_()).mean().backward()
        for p in w.critic.parameters():
            each: Any = p.grad_sample  # type: ignore[attr-defined]
            p.grad = (each / each.flatten(1).norm(dim=1).clamp(1).view(-1, *[1] * p.dim())).sum(0)
        w.critic_opt.step()

    return step


def _main_gradients(w: World) -> Step:
    """As by Megatron: sums in an attribute, of which the update is made."""
    for p in w.critic.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
        p.register_hook(lambda gradient, p=p: p.main_grad.add_(gradient))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for p in w.critic.parameters():
            p.main_grad.zero_()  # type: ignore[attr-defined]
        w.critic(w.net(x).detach()).mean().backward()
        for p in w.critic.parameters():
            p.grad = p.main_grad.clone()  # type: ignore[attr-defined]
        w.critic_opt.step()

    return step


CASES = {
    "gan": Case(_gan, "Sequential is called at .* after its update at"),
    "gan as methods": Case(_gan_as_methods, "Sequential is called at .* after its update at"),
    "two updates": Case(
        _two_updates_without_modules, "an update is made at .* between two backward"
    ),
    "forward after step": Case(_forward_after("plain"), "Call it after the decorated step"),
    "forward without gradient": Case(_forward_after("no_grad"), "update only after the last"),
    "forward of a submodule": Case(_forward_after("submodule"), "Linear is called at"),
    "forward after scaler.step": Case(_forward_after("scaler"), "Call it after the decorated step"),
    "forward after scaler.step(optimizer=)": Case(_forward_after("by keyword"), "Call it after"),
    "forward of an average": Case(_forward_after("averaged"), "AveragedModel is called at"),
    "lbfgs": Case(_lbfgs, r"closure to LBFGS.step\(\), .* Decorate", "with a closure", line=False),
    "closure by name": Case(_closure_by_name, r"closure to Adam.step\(\)", "a closure", line=False),
    "backward in a tensor hook": Case(_backward_in_a_hook("tensor"), "by a hook inside another"),
    "backward in a module hook": Case(_backward_in_a_hook("module"), "add that loss to the loss"),
    "past autograd": Case(_past_autograd("only"), "bypasses torch.autograd", line=False),
    "past autograd, second": Case(
        _past_autograd("second"), "by hand, or by a backward", line=False
    ),
    "past autograd, cleared": Case(
        _past_autograd("cleared"), "by hand, or by a backward", line=False
    ),
    "per-sample gradients": Case(
        _per_sample_gradients, "backward has left 'grad_sample' of parameter", line=False
    ),
    "main gradients": Case(_main_gradients, "backward has left 'main_grad' of para", line=False),
}


# A fault of the phase "backward" does not strike where the engine is called directly.
RUNS = [
    (name, how)
    for name in CASES
    for how in ("split", "forward", "backward")
    if how != "backward" or name not in ("past autograd", "past autograd, cleared")
]


@IGNORE
@pytest.mark.parametrize(("name", "how"), RUNS)
@pytest.mark.refusals
def test_refused_and_nothing_changed(name: str, how: str) -> None:
    case = CASES[name]
    w = World()
    if name.startswith("past autograd"):
        w.net.zero_grad()
    plain = case.make(w)
    options: dict[str, Any] = {"gradient_safety": "copy"}
    before = w.state()
    if how == "split":
        with pytest.raises(oomkit.SplitError, match=case.split) as caught:
            oomkit.auto_batch(plain, accumulation_steps=2, **options)(w.x, w.y)
    else:
        expected = oomkit.SplitError if case.whole is None else oomkit.OutOfMemory
        with inject_oom(nth=1, phase=None if how == "forward" else "backward") as armed:
            with pytest.raises(expected, match=case.whole or case.split) as caught:
                oomkit.auto_batch(plain, **options)(w.x, w.y)
        assert armed.fired == 1
    assert (__file__ in str(caught.value)) == case.line or case.whole is not None
    after = w.state()
    for was, now in zip(before[1], after[1], strict=True):  # what the step cleared stays so
        assert all(b is None or same(a, b) for a, b in zip(was, now, strict=True))
    del before[1], after[1]
    for part, (was, now) in enumerate(zip(before, after, strict=True)):
        assert same(was, now), part
    oomkit.auto_batch(plain, **options)(w.x, w.y)  # an ordinary call works
    twin = World()
    if name.startswith("past autograd"):
        twin.net.zero_grad()
    case.make(twin)(twin.x, twin.y)
    assert same(w.state()[:4], twin.state()[:4])


@IGNORE
def test_a_refusal_that_the_step_catches_is_raised_all_thesame() -> None:
    w = World()

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        w.loss(x, y).backward()
        w.opt.step()
        try:
            return w.loss(x, y).item()
        except Exception:
            return 0.0

    before = w.state()
    with pytest.raises(oomkit.SplitError, match="Do not catch oomkit's errors in the step"):
        oomkit.auto_batch(step, accumulation_steps=2, gradient_safety="copy")(w.x, w.y)
    assert same(before, w.state())


@IGNORE
def test_unseen_backward_of_a_call_that_runs_out_of_memory_is_not_counted_twice() -> None:
    """What the failed attempt left in .grad cannot be told: the replay refuses, and says so."""
    w = World()
    w.net.zero_grad()
    before = [p.detach().clone() for p in w.net.parameters()]

    def late(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = w.loss(x, y)
        one = (torch.ones_like(loss),)
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), one, False, False, (), True, accumulate_grad=True
        )
        torch.empty(4096)

    with inject_oom(nth=1, min_bytes=4096):
        with pytest.raises(oomkit.SplitError, match=r"call zero_grad\(\) before you continue"):
            oomkit.auto_batch(late)(w.x, w.y)
    assert all(torch.equal(a, p) for a, p in zip(before, w.net.parameters(), strict=True))


def test_lbfgs_that_fails_half_way_says_so() -> None:
    w = World()
    w.net.eval()
    step = _lbfgs(w)
    protected = oomkit.auto_batch(step)
    for _ in range(8):  # these could go back: the object has another optimizer, too
        protected(w.x, w.y)
        w.net.zero_grad()
    with inject_oom(nth=2**60) as counted:
        protected(w.x, w.y)
    w.net.zero_grad()
    with inject_oom(nth=counted.seen):
        with pytest.raises(oomkit.PartialUpdate, match="half done"):
            protected(w.x, w.y)
    before = [p.detach().clone() for p in w.net.parameters()]
    with inject_oom(nth=counted.seen - 8):
        with pytest.raises(oomkit.OutOfMemory, match="with a closure"):
            oomkit.auto_batch(step, optimizer_safety="copy")(w.x, w.y)
    assert all(torch.equal(a, p) for a, p in zip(before, w.net.parameters(), strict=True))


def test_buffers_that_a_forward_changes_are_said_once() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 3))

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()

    x = torch.randn(8, 6)
    with pytest.warns(oomkit.OomkitWarning, match="_u.*changed in a forward") as said:
        step(x)
        step(x)
    assert len(said) == 1


def test_batch_normalisation_is_said_once_and_by_its_own_warning() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()

    x = torch.randn(8, 6)
    with pytest.warns(oomkit.OomkitWarning) as said:
        step(x)
        step(x)
    assert ["BatchNorm1d is in training mode" in str(w.message) for w in said] == [True]
