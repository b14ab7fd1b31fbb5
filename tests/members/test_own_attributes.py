"""Attributes are read and set without making a dictionary of them, which slows reading."""

from __future__ import annotations

import functools
import gc
import random
import sys

import pytest
import torch
from torch import nn

import oomkit
from oomkit import _C, testing

in_an_array = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="a dictionary slows nothing down here"
)


def has_dictionary(value: object, name: str) -> bool:
    """Was a dictionary ever made of its attributes? One of them is `name`."""
    return any(type(inner) is dict and name in inner for inner in gc.get_referents(value))


class Trainer:
    def __init__(self, kind=torch.optim.lr_scheduler.StepLR):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = kind(self.optimizer, 2)
        self.other = None

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def asked(self) -> list[bool]:
        return [
            has_dictionary(self, "scheduler"),
            has_dictionary(self.optimizer, "param_groups"),
            has_dictionary(self.scheduler, "last_epoch"),
        ]


@in_an_array
def test_calls_make_no_dictionary_of_what_takes_part():
    class Fresh(torch.optim.lr_scheduler.StepLR):
        """What earlier tests gave StepLR may have used up the names that its objects share."""

    trainer, plain = Trainer(Fresh), Trainer(Fresh)
    step = oomkit.auto_batch(trainer.step)
    for _ in range(3):
        step(torch.ones(8, 4))
        plain.step(torch.ones(8, 4))
    assert trainer.asked() == plain.asked()  # what earlier tests gave a class may make one, too
    vars(trainer.scheduler)
    assert trainer.asked()[2]


@pytest.mark.parametrize("asked", [False, True])
def test_an_attribute_that_a_failed_update_has_left_goes_again(asked):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.tries = getattr(self, "tries", 0) + 1
            self.new = torch.empty(16)
            return super().step(closure)

    model = nn.Linear(4, 4)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.tries, optimizer.kept = 0, "kept"
    if asked:
        vars(optimizer)

    @oomkit.auto_batch
    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()

    step(torch.ones(8, 4))
    assert optimizer.tries == 1
    del optimizer.new
    before = optimizer.step
    failing = testing.inject_oom(times=None, phase="optimizer")
    with failing, pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(8, 4))
    assert failing.fired
    assert (optimizer.tries, optimizer.kept) == (1, "kept")
    assert not hasattr(optimizer, "new")
    assert optimizer.step == before
    step(torch.ones(8, 4))
    assert optimizer.tries == 2


@pytest.mark.parametrize("when", ["before", "in the step"])
def test_names_that_are_no_strings_are_left_alone(when):
    trainer = Trainer()
    if when == "before":
        vars(trainer.scheduler)[7] = vars(trainer.optimizer)[7] = "kept"

    def step(batch):
        if when == "in the step":
            vars(trainer.scheduler)[3.5] = vars(trainer.optimizer)[3.5] = "new"
        return trainer.step(batch)

    for phase in ("backward", "optimizer"):
        with testing.inject_oom(phase=phase) as failing:
            oomkit.auto_batch(step, optimizer=trainer.optimizer)(torch.ones(8, 4))
        assert failing.fired
    assert trainer.scheduler.last_epoch == 2
    assert vars(trainer.scheduler).get(7) == ("kept" if when == "before" else None)


def test_a_property_of_the_name_of_a_method_is_not_set():
    class Scheduler(torch.optim.lr_scheduler.StepLR):
        step = property(lambda self: functools.partial(torch.optim.lr_scheduler.StepLR.step, self))

    trainer = Trainer(Scheduler)
    oomkit.auto_batch(trainer.step)(torch.ones(8, 4))
    assert trainer.scheduler.last_epoch == 1
    assert "step" not in vars(trainer.scheduler)


def of_a_class_of_its_own(numbers: random.Random) -> bool:
    """Does a call leave the optimizer's step() in place, having called it?"""

    class Many(torch.optim.SGD):
        """Its objects share names that no other class has."""

    model = nn.Linear(2, 2)
    optimizer = Many(model.parameters(), lr=0.1)
    for _ in range(numbers.randrange(10)):
        setattr(optimizer, f"x{numbers.randrange(10**6)}", None)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    wrapper = optimizer.step

    @oomkit.auto_batch
    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()

    step(torch.ones(2, 2))
    return optimizer.step is wrapper and optimizer._opt_called  # the wrapper sets it


def test_a_method_is_found_wherever_the_names_of_its_class_put_it():
    """They are looked up as a dictionary does; what is set in its place shows where it was."""
    numbers = random.Random(20261129)
    assert all(of_a_class_of_its_own(numbers) for _ in range(150))


def test_names_and_values_are_told_wherever_they_lie():
    class Plain:
        pass

    class Slots:
        __slots__ = ("a",)

    one, other = Plain(), Plain()
    one.a, one.b, one.c = 1, 2, 3
    other.a, other.b, other.c = 1, 2, 3
    del one.b, other.b
    vars(other)[5] = "no name"
    for value in (one, other):
        assert sorted(_C._attributes(value, frozenset())) == [("a", 1), ("c", 3)]
        assert _C._attributes(value, frozenset({"a"})) == [("c", 3)]
    assert _C._attributes(Slots(), frozenset()) == []
    assert _C._attributes(Plain, frozenset()) == []
    assert _C._attributes(3, frozenset()) == []
    with pytest.raises(TypeError, match="expected an object and a set"):
        _C._attributes(one, 3)
