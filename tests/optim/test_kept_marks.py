"""What is kept of an optimizer from call to call is not believed where something has changed."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Step = Callable[[torch.Tensor], None]


def make(
    kind: str = "SGD", factor: float = 0.5, **options: object
) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1.0)

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False, **options)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        if factor != 1.0:
            optimizer.param_groups[0]["lr"] *= factor
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def fail_in_each(step: Step, phase: str, x: torch.Tensor) -> int:
    """Fails the first allocation of a phase in a call. How often it did."""
    with inject_oom(nth=1, phase=phase) as armed:
        step(x)
    return armed.fired


def test_a_rate_that_was_set_between_calls_is_the_one_that_goes_back() -> None:
    _, optimizer, step = make()
    x = torch.randn(8, 4)
    step(x)
    step(x)
    for rate in (1.0, 8.0, 3.0):
        optimizer.param_groups[0]["lr"] = rate
        assert fail_in_each(step, "backward", x)
        assert optimizer.param_groups[0]["lr"] == rate / 2


def test_a_group_that_was_added_between_calls_goes_back_too() -> None:
    _, optimizer, step = make()
    x = torch.randn(8, 4)
    step(x)
    group = {"params": [nn.Parameter(torch.ones(2))], "lr": 5.0}
    optimizer.param_groups.insert(0, {**optimizer.param_groups[0], **group})
    assert fail_in_each(step, "backward", x)
    assert [group["lr"] for group in optimizer.param_groups] == [2.5, 0.5]


@pytest.mark.parametrize("whole", [False, True], ids=["one value", "state of a parameter"])
def test_state_that_was_replaced_between_calls_is_not_undone(whole: bool) -> None:
    model, optimizer, step = make("Adam", 1.0, optimizer_safety="copy")
    x = torch.randn(8, 4)
    step(x)
    step(x)
    old = dict(optimizer.state[model.weight])
    moments = torch.zeros_like(old["exp_avg"])
    if whole:
        optimizer.state[model.weight] = {**old, "exp_avg": moments}
    else:
        optimizer.state[model.weight]["exp_avg"] = moments
    assert fail_in_each(step, "optimizer", x)
    assert optimizer.state[model.weight]["exp_avg"] is moments
    assert old["exp_avg"].any() and moments.any()


def test_state_that_was_taken_away_between_calls_is_not_put_back() -> None:
    model, optimizer, step = make("Adam", 1.0, optimizer_safety="copy")
    x = torch.randn(8, 4)
    step(x)
    step(x)
    old = optimizer.state[model.weight]
    optimizer.state.clear()
    assert fail_in_each(step, "optimizer", x)
    assert optimizer.state[model.weight] is not old
    assert optimizer.state[model.weight]["step"] == 1 and old["step"] == 2


def test_a_parameter_that_was_exchanged_between_calls_is_not_taken_for_the_old_one() -> None:
    model, optimizer, step = make(factor=1.0, optimizer_safety="copy")
    x = torch.randn(8, 4)
    step(x)
    step(x)
    old = model.bias
    before = old.detach().clone()
    model.bias = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"][1] = model.bias
    assert fail_in_each(step, "backward", x)
    assert torch.equal(old, before) and model.bias.any()


def test_nothing_of_ours_is_in_an_optimizer_between_calls() -> None:
    model, optimizer, step = make("Adam", 1.0)
    names = sorted(vars(optimizer))
    for _ in range(3):
        step(torch.randn(8, 4))
        assert sorted(vars(optimizer)) == names
        assert "oomkit" not in str([type(value).__module__ for value in vars(optimizer).values()])
        assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == {
            "state",
            "param_groups",
        }


def test_state_dies_with_its_optimizer_and_with_what_replaces_it() -> None:
    model, optimizer, step = make("Adam", 1.0)
    x = torch.randn(8, 4)
    step(x)
    step(x)
    moments = weakref.ref(optimizer.state[model.weight]["exp_avg"])
    optimizer.state.clear()
    gc.collect()
    assert moments() is None
    step(x)
    parameter, group = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer, step
    gc.collect()
    assert parameter() is None and group() is None
