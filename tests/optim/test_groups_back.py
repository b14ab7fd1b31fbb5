"""Groups of an optimizer that the step itself changes: what fails leaves those of the entry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Optimizer = torch.optim.Optimizer
CALLS = 4

OPTIMIZERS: dict[str, Callable[[nn.Linear], Optimizer]] = {
    "sgd": lambda head: torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda head: torch.optim.Adam(head.parameters(), lr=0.01),
    "adamw, two groups": lambda head: torch.optim.AdamW(
        [{"params": [head.weight]}, {"params": [head.bias], "weight_decay": 0.0}], lr=0.01
    ),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "no scheduler": lambda opt: None,
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, halved),
}


def halved(epoch: int) -> float:
    return 0.5**epoch


class World:
    def __init__(self, optimizer: str = "adam", scheduler: str = "no scheduler") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.opt = OPTIMIZERS[optimizer](self.model[2])
        self.sched = SCHEDULERS[scheduler](self.opt)
        self.groups = len(self.opt.param_groups)
        self.batches = [
            (torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,)))
            for _ in range(CALLS)
        ]

    def grow(self) -> None:
        """As often as the step wants, for it asks whether it is done already."""
        if len(self.opt.param_groups) > self.groups:
            return
        self.opt.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.02})
        if isinstance(self.sched, torch.optim.lr_scheduler.LambdaLR):
            self.sched.base_lrs.append(0.02)
            self.sched.lr_lambdas.append(halved)
            self.opt.param_groups[-1]["initial_lr"] = 0.02

    def train(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.opt.step()
        if self.sched is not None:
            self.sched.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "optimizer": copy.deepcopy(self.opt.state_dict()),
            "scheduler": None if self.sched is None else self.sched._last_lr,
        }


def added_in_call_1(world: World, **failing: Any) -> Any:
    """A world after some calls, of which one fails in its first attempt."""

    def step(x: torch.Tensor, y: torch.Tensor, number: int) -> float:
        if number >= 1:
            world.grow()
        return world.train(x, y)

    decorated: Any = oomkit.auto_batch(step) if failing else step
    for number in range(CALLS):
        with (
            inject_oom(nth=1, phase=failing["phase"])
            if (failing and number == failing["call"])
            else nullcontext() as armed
        ):
            decorated(*world.batches[number], number)
        assert armed is None or armed.fired == 1
    return world.state()


@pytest.mark.sample(40)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_group_that_the_step_adds_is_there_once_and_is_trained(
    optimizer: str, scheduler: str, call: int, phase: str
) -> None:
    expected = added_in_call_1(World(optimizer, scheduler))
    world = World(optimizer, scheduler)
    torch.testing.assert_close(added_in_call_1(world, call=call, phase=phase), expected)
    assert len(world.opt.param_groups) == world.groups + 1


class Noted:
    """Which groups an optimizer has, with what is in them, by identity."""

    def __init__(self, opt: Optimizer) -> None:
        self.list = opt.param_groups
        self.groups = list(opt.param_groups)
        self.values = [dict(group) for group in self.groups]
        self.params = [list(group["params"]) for group in self.groups]
        self.state = copy.deepcopy(opt.state_dict())

    def check(self, opt: Optimizer) -> None:
        assert opt.param_groups is self.list
        assert [*map(id, opt.param_groups)] == [*map(id, self.groups)]
        for group, values, params in zip(self.groups, self.values, self.params, strict=True):
            assert group == values
            assert group["params"] is values["params"]
            assert [*map(id, group["params"])] == [*map(id, params)]
        torch.testing.assert_close(opt.state_dict(), self.state, rtol=0, atol=0)


def unfrozen(opt: Optimizer, model: nn.Sequential) -> None:
    for p in model[0].parameters():
        p.requires_grad_(True)
    opt.add_param_group({"params": list(model[0].parameters())})


def merged(opt: Optimizer, _: nn.Sequential) -> None:
    opt.param_groups[0]["params"] += opt.param_groups.pop()["params"]


def replaced(opt: Optimizer, _: nn.Sequential) -> None:
    opt.param_groups = [dict(group) for group in opt.param_groups]


def other_parameters(opt: Optimizer, model: nn.Sequential) -> None:
    opt.param_groups[0]["params"] = [model[0].weight]
    opt.param_groups[1]["params"][0] = model[0].bias


def new_value(opt: Optimizer, _: nn.Sequential) -> None:
    opt.param_groups[1].setdefault("history", []).append(opt.param_groups[1]["lr"])


def longer_list(opt: Optimizer, _: nn.Sequential) -> None:
    opt.param_groups[0]["rates"].append(opt.param_groups[0]["lr"])


CHANGES: dict[str, Callable[[Optimizer, nn.Sequential], Any]] = {
    "unfrozen": unfrozen,
    "popped": lambda opt, _: opt.param_groups.pop(0),
    "merged": merged,
    "turned round": lambda opt, _: opt.param_groups.reverse(),
    "cleared": lambda opt, _: opt.param_groups.clear(),
    "replaced": replaced,
    "loaded": lambda opt, _: opt.load_state_dict(opt.state_dict()),
    "other parameters": other_parameters,
    "a new value": new_value,
    "a longer list": longer_list,
}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.refusals
def test_a_refused_step_leaves_the_groups_as_they_were(change: str, phase: str) -> None:
    world = World("adamw, two groups")
    model, opt = world.model, world.opt
    model[0].requires_grad_(False)
    opt.param_groups[0]["rates"] = [0.5]

    @oomkit.auto_batch
    def step(x: torch.Tensor, number: int) -> None:
        if number == 1:
            CHANGES[change](opt, model)
        opt.zero_grad()
        (model(x) / model(x).std(dim=0)).square().mean().backward()  # of the batch: no split
        opt.step()

    step(world.batches[0][0], 0)
    noted = Noted(opt)
    with inject_oom(nth=1, phase=phase), pytest.raises(oomkit.SplitError):
        step(world.batches[1][0], 1)
    noted.check(opt)
    assert not model[0].weight.requires_grad
    step(world.batches[2][0], 2)


@pytest.mark.parametrize("safety", ["predict", "parts", "copy"])
def test_an_update_that_fails_leaves_no_group_and_no_state_of_it(safety: str) -> None:
    world = World("adam")
    opt = world.opt

    @oomkit.auto_batch(optimizer_safety=safety)
    def step(x: torch.Tensor, y: torch.Tensor, grows: bool) -> float:
        if grows:
            world.grow()
        return world.train(x, y)

    step(*world.batches[0], False)
    noted = Noted(opt)
    with inject_oom(nth=1, times=None, phase="optimizer"), pytest.raises(torch.OutOfMemoryError):
        step(*world.batches[1], True)
    noted.check(opt)
    assert set(opt.state) == set(world.model[2].parameters())


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("guard", ["asks", "first micro-batch"])
def test_a_layer_that_the_step_unfreezes_is_trained_or_the_step_refused(
    guard: str, call: int, phase: str
) -> None:
    def run(decorate: bool) -> tuple[World, bool]:
        world = World("adam")
        world.model[0].requires_grad_(False)
        opt, model = world.opt, world.model

        def step(x: torch.Tensor, y: torch.Tensor, number: int) -> float:
            wanted = len(opt.param_groups) == 1 and guard == "asks"
            if number >= 1 and (wanted or (number == 1 and guard != "asks" and first())):
                unfrozen(opt, model)
            return world.train(x, y)

        def first() -> bool:
            return oomkit.current().index == 0

        decorated: Any = oomkit.auto_batch(step) if decorate else step
        for number in range(CALLS):
            noted = Noted(opt)
            try:
                with (
                    inject_oom(nth=1, phase=phase) if decorate and call == number else nullcontext()
                ):
                    decorated(*world.batches[number], number)
            except oomkit.SplitError:
                noted.check(opt)
                assert not model[0].weight.requires_grad
                return world, True
        return world, False

    world, refused = run(True)
    if not refused:
        torch.testing.assert_close(world.state(), run(False)[0].state())


def test_values_of_groups_that_the_step_turns_round_stay_with_their_groups() -> None:
    """A micro-batch begins with the values of the entry: each group with its own."""
    world = World("adamw, two groups")
    opt = world.opt
    opt.param_groups[1]["lr"] = 0.25

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        opt.param_groups.sort(key=lambda group: -group["lr"])
        return world.train(x, y)

    bias, weight = opt.param_groups[1], opt.param_groups[0]
    step(*world.batches[0])
    assert opt.param_groups[0] is bias and opt.param_groups[1] is weight
    assert (bias["lr"], weight["lr"]) == (0.25, 0.01)
    assert bias["params"] == [world.model[2].bias] and bias["weight_decay"] == 0.0


def test_a_list_of_a_group_that_was_changed_between_calls_is_not_put_back() -> None:
    world = World("sgd")
    group = world.opt.param_groups[0]
    group["rates"] = [1]

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        if oomkit.current().is_last:
            group["rates"].append(2)
        return world.train(x, y)

    step(*world.batches[0])
    step(*world.batches[1])
    group["rates"][0] = 3
    for phase in ("forward", "backward"):
        with inject_oom(nth=1, phase=phase):
            step(*world.batches[2])
    assert group["rates"] == [3, 2, 2, 2, 2]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_group_of_a_module_that_the_step_has_made_is_told_of(phase: str) -> None:
    """The module stays, so that the retry would not add the group again."""

    class Trainer:
        head: nn.Linear | None = None

        def __init__(self) -> None:
            self.model = nn.Linear(4, 3)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

        def step(self, x: torch.Tensor) -> None:
            if self.head is None:
                self.head = nn.Linear(3, 1)
                self.optimizer.add_param_group({"params": list(self.head.parameters())})
            self.optimizer.zero_grad()
            self.head(self.model(x)).square().mean().backward()
            self.optimizer.step()

    trainer, x = Trainer(), torch.randn(8, 4)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    nth = 6 if phase == "forward" else 2
    with inject_oom(nth=nth, phase=phase) as armed:
        with pytest.raises(oomkit.OutOfMemory, match="the group alone went back"):
            oomkit.auto_batch(trainer.step)(x)
    assert armed.fired == 1
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert len(trainer.optimizer.param_groups) == 1
