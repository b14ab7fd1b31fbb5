"""Where models and optimizers are found: values that are bound before the call."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

Made = tuple[nn.Module, torch.optim.Optimizer]


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def _default(made: Made) -> Callable[..., Any]:
    def step(x: Any, model: Any = made[0], optimizer: Any = made[1]) -> None:
        _update(model, optimizer, x)

    return step


def _keyword_default(made: Made) -> Callable[..., Any]:
    def step(x: Any, *, made: Any = made[0], by: Any = made[1]) -> None:
        _update(made, by, x)

    return step


def _default_of_a_helper(made: Made) -> Callable[..., Any]:
    def helper(x: Any, model: Any = made[0], optimizer: Any = made[1]) -> None:
        _update(model, optimizer, x)

    def step(x: Any) -> None:
        helper(x)

    return step


def _partial(made: Made) -> Callable[..., Any]:
    def step(model: Any, x: Any, optimizer: Any) -> None:
        _update(model, optimizer, x)

    return functools.partial(step, made[0], optimizer=made[1])


def _class_attributes(made: Made) -> Callable[..., Any]:
    class Base:
        model = made[0]

    class Trainer(Base):
        optimizer = made[1]

        def step(self, x: Any) -> None:
            _update(self.model, self.optimizer, x)

    return Trainer().step


def _class_method(made: Made) -> Callable[..., Any]:
    class Base:
        model, optimizer = made

        @classmethod
        def step(cls, x: Any) -> None:
            _update(cls.model, cls.optimizer, x)

    class Trainer(Base):
        pass

    return Trainer.step


def _namespace(made: Made) -> Callable[..., Any]:
    class Globals:
        model, optimizer = made

    def step(x: Any) -> None:
        _update(Globals.model, Globals.optimizer, x)

    return step


def _partial_by_name(made: Made) -> Callable[..., Any]:
    update = functools.partial(_update, *made)
    return lambda x: update(x)


def _functions_in_a_list(made: Made) -> Callable[..., Any]:
    updates = [lambda x: _update(*made, x)]

    def step(x: Any) -> None:
        for update in updates:
            update(x)

    return step


def _partials_in_a_dictionary(made: Made) -> Callable[..., Any]:
    updates = {"all": functools.partial(_update, *made)}
    return lambda x: updates["all"](x)


class _Updater:
    def __init__(self, made: Made) -> None:
        self.made, self.others = made, [self.run]

    def run(self, x: Any) -> None:
        _update(*self.made, x)


def _objects_in_a_list(made: Made) -> Callable[..., Any]:
    updaters = [_Updater(made)]
    return lambda x: updaters[0].run(x)


class _Calls:
    """A trainer that is given what it does."""

    def __init__(self, update: Callable[[Any], None]) -> None:
        self.update = update

    def step(self, x: Any) -> None:
        self.update(x)


def _function_of_a_trainer(made: Made) -> Callable[..., Any]:
    return _Calls(lambda x: _update(*made, x)).step


def _method_of_another_object(made: Made) -> Callable[..., Any]:
    return _Calls(_Updater(made).run).step


def _partial_of_a_trainer(made: Made) -> Callable[..., Any]:
    return _Calls(functools.partial(_update, *made)).step


def _closure_of_what_calls_an_object(made: Made) -> Callable[..., Any]:
    model, optimizer = made

    class Step:
        def __call__(self, x: Any) -> None:
            _update(model, optimizer, x)

    return Step()


WAYS = [
    _closure_of_what_calls_an_object,
    _default,
    _keyword_default,
    _default_of_a_helper,
    _partial,
    _class_attributes,
    _class_method,
    _namespace,
    _partial_by_name,
    _functions_in_a_list,
    _partials_in_a_dictionary,
    _objects_in_a_list,
    _function_of_a_trainer,
    _method_of_another_object,
    _partial_of_a_trainer,
]


@pytest.mark.parametrize("way", WAYS)
def test_found_where_they_are_bound_beforehand(way: Callable[..., Any]) -> None:
    after = []
    for split in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = oomkit.auto_batch(way((model, optimizer)), reduction="mean")
        x = torch.randn(6, 4).double()
        if split:
            with force_slices([4, 2]):
                step(x)
        else:
            step(x)
        after.append(model.weight.detach().clone())
    assert torch.allclose(*after, rtol=0, atol=1e-12)


def test_an_attribute_of_a_class_may_be_replaced() -> None:
    def make() -> Made:
        model = nn.Linear(4, 2).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    class Trainer:
        model, optimizer = make()

        @classmethod
        @oomkit.auto_batch(reduction="mean")
        def step(cls, x: Any) -> None:
            _update(cls.model, cls.optimizer, x)

    x = torch.randn(6, 4).double()
    Trainer.step(x)
    Trainer.model, Trainer.optimizer = make()
    bias = Trainer.model.bias.detach().clone()
    before = Trainer.model.weight.detach().clone()
    with force_slices([4, 2]):
        Trainer.step(x)
    expected = before - 0.1 * torch.func.grad(
        lambda w: nn.functional.linear(x, w, bias).pow(2).mean()
    )(before)
    assert torch.allclose(Trainer.model.weight, expected, rtol=0, atol=1e-12)


def test_what_a_default_holds_is_not_kept_alive() -> None:
    model = nn.Linear(4, 2)
    gone = weakref.ref(model)
    step = oomkit.auto_batch(_default((model, torch.optim.SGD(model.parameters(), lr=0.1))))
    step(torch.randn(4, 4))
    step.__wrapped__.__defaults__ = (None, None)
    del model
    gc.collect()
    assert gone() is None


class _Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


def test_a_generator_of_a_part_of_the_model_goes_back() -> None:
    losses = []
    for strikes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([_Noise()])[0], nn.Linear(4, 4))

        @oomkit.auto_batch
        def step(x: torch.Tensor, model: nn.Module = model) -> float:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.item()

        step(torch.ones(1, 4))
        with inject_oom(nth=2, phase="backward") if strikes else nullcontext():
            losses.append(step(torch.ones(1, 4)))
    assert losses[0] == losses[1]
