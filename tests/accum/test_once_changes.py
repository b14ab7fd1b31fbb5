"""What a micro-batch must not move: parameters, gradients and buffers, by whatever means."""

from __future__ import annotations

import copy
import io
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore:oomkit. the batch is split and BatchNorm"),
]  # runs are counted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - self.centre


def _snapshot(*modules: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for m in modules for t in m.state_dict().values()]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _data_add(model: Net, ema: Net) -> None:
    model.layer.weight.data.add_(1.0)


def _grad(model: Net, ema: Net) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def _ema_data(model: Net, ema: Net) -> None:
    for e, p in zip(ema.parameters(), model.parameters(), strict=True):
        e.data.mul_(0.9).add_(p.data, alpha=0.2)


def _ema_lerp(model: Net, ema: Net) -> None:
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.lerp_(p, 0.1)


def _ema_copy(model: Net, ema: Net) -> None:
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.copy_(0.9 * e + 0.1 * p)


def _replace(model: Net, ema: Net) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.detach() * 2)


def _take_out(model: Net, ema: Net) -> None:
    model.layer.register_parameter("bias", None)


def _buffer(model: Net, ema: Net) -> None:
    model.centre.add_(0.5)


def _buffer_data(model: Net, ema: Net) -> None:
    model.centre.data.add_(0.5)


def _buffer_rebound(model: Net, ema: Net) -> None:
    model.centre = model.centre + 0.5


def _buffer_of_the_ema(model: Net, ema: Net) -> None:
    with torch.no_grad():
        for e, b in zip(ema.buffers(), model.buffers(), strict=True):
            e.copy_(0.9 * e + 0.1 * b + 1.0)


CHANGES: dict[str, tuple[Callable[[Net, Net], None], str]] = {
    "p.data.add_": (_data_add, "layer.weight.* was changed"),
    "p.grad = g": (_grad, "gradient of .*layer.weight.* was set"),
    "ema .data": (_ema_data, "of Net was changed"),
    "ema lerp_": (_ema_lerp, "of Net was changed"),
    "ema copy_": (_ema_copy, "of Net was changed"),
    "replaced": (_replace, "replaces parameter 'weight' of a module"),
    "taken out": (_take_out, "replaces parameter 'bias' of a module"),
    "buffer": (_buffer, "the buffer 'centre' of a Net was changed"),
    "buffer .data": (_buffer_data, "the buffer 'centre' of a Net was changed"),
    "buffer rebound": (_buffer_rebound, "the buffer 'centre' of a Net was changed"),
    "buffer of the ema": (_buffer_of_the_ema, "the buffer 'centre' of a Net was changed"),
}


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.refusals
def test_a_change_is_refused_by_name_and_taken_back(name: str, when: str, oom: bool) -> None:
    change, match = CHANGES[name]
    torch.manual_seed(1)
    model = Net()
    ema = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for p in ema.parameters():
            p.add_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def plain(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        if when == "before" and name != "p.grad = g":
            change(model, ema)
        model(x).pow(2).mean().backward()
        if when == "after" or name == "p.grad = g":
            change(model, ema)
        optimizer.step()

    before = _snapshot(model, ema)
    x = torch.randn(8, 4)
    step = oomkit.auto_batch(plain, accumulation_steps=1 if oom else 2)
    if not oom:
        # A parameter replaced before the backward is met there as a stranger.
        with pytest.raises(
            oomkit.SplitError, match=f"{match}|is created again in each micro-batch"
        ):
            step(x)
        assert _same(before, _snapshot(model, ema))
        assert all(p.grad is None for p in model.parameters())
        assert not model._forward_hooks and not model._forward_pre_hooks
    elif when == "after":
        with inject_oom(nth=2, phase="backward") as armed:
            with pytest.raises((oomkit.SplitError, oomkit.OutOfMemory), match=match):
                step(x)
        assert armed.fired == 1
        assert _same(before, _snapshot(model, ema))


def test_buffers_that_a_forward_owns_may_move() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.register_buffer("rebound", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.mul_(0.9).add_(x.detach().mean(0))
            self.rebound = self.rebound * 0.9
            return x + self.table

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), Codebook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=3)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model[1](model[0](x))
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()

    with pytest.warns(oomkit.OomkitWarning) as caught:
        step(torch.randn(9, 4))
    said = " ".join(str(w.message) for w in caught)
    assert "the buffer 'table' of a Codebook (changed in a forward)" in said
    assert "'rebound'" in said and "running_mean" not in said
    assert model[2].table.abs().sum() > 0


def test_where_something_is_compiled_buffers_are_said_and_not_hooked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = types.ModuleType("torch._dynamo.utils")
    vars(utils)["counters"] = {"frames": {"total": 1}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    model = Net()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        assert not model._forward_hooks
        model(x).sum().backward()
        model.centre.add_(0.5)

    with pytest.warns(oomkit.OomkitWarning, match=r"the buffer 'centre' of a Net \(changed\)"):
        step(torch.randn(8, 4))


def test_a_buffer_changed_in_the_last_micro_batch_is_the_steps_own() -> None:
    model = Net()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        if oomkit.current().is_last:
            model.seen.add_(1)

    step(torch.randn(8, 4))
    assert model.seen.item() == 1


def test_a_model_copied_or_called_in_the_first_micro_batch_has_no_hook_of_ours() -> None:
    model = Net()
    copies: list[Net] = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        copies.append(copy.deepcopy(model))
        assert copies[-1](x).shape == model(x).shape
        model(x).sum().backward()

    step(torch.randn(8, 4))
    torch.save(copies[0], io.BytesIO())
    copies[0](torch.randn(2, 4))
    assert not model._forward_hooks


@pytest.mark.parametrize("where", ["forward", "backward", "later"])
def test_a_keyboard_interrupt_rolls_back_and_passes(where: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, state = _snapshot(model), torch.get_rng_state()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = F.dropout(model(x))
        if where == "forward":
            raise KeyboardInterrupt
        if where == "backward":

            def stop(g: torch.Tensor) -> None:
                raise KeyboardInterrupt

            out.register_hook(stop)
        out.sum().backward()
        optimizer.param_groups[0]["lr"] = 5.0
        raise KeyboardInterrupt

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(KeyboardInterrupt) as caught:
        step(x)
    assert caught.value.__traceback__ is not None and caught.value.__traceback__.tb_next is not None
    assert _same(before, _snapshot(model)) and torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_interrupt_after_the_update_takes_nothing_back() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _snapshot(model)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(torch.randn(8, 4))
    assert not _same(before, _snapshot(model))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, StopIteration])
def test_other_errors_of_a_whole_batch_leave_things_as_the_plain_step_does(error: Any) -> None:
    model = nn.Linear(4, 3)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        raise error("mine")

    with pytest.raises(error, match="mine") as caught:
        step(torch.randn(8, 4))
    assert all(p.grad is not None for p in model.parameters())
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.refusals
def test_a_buffer_that_torch_told_nobody_of_is_seen_to_move() -> None:
    """Put beside the hook that registration has, into a module that had none before."""
    model = nn.Linear(4, 3)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        late = model._buffers.get("late")
        if late is not None:
            late.add_(1)
        model(x).pow(2).mean().backward()

    x = torch.randn(8, 4)
    step(x)
    model._buffers["late"] = torch.zeros(1)
    with inject_oom(nth=3), pytest.raises(oomkit.SplitError, match="the buffer 'late' of a Linear"):
        step(x)


@pytest.mark.parametrize("nth", range(2, 7))
def test_memory_that_lacks_to_look_at_a_gradient_is_no_change_by_hand(nth: int) -> None:
    """Whether anything is in it is asked with any(), whose OutOfMemoryError is a RuntimeError."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model.zero_grad(set_to_none=False)
        model(x).pow(2).mean().backward()

    x = torch.randn(8, 4)
    step(x)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with inject_oom(nth=1, then=inject_oom(nth=nth, phase="recovery")):
        step(x)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, gradient)
