"""One decorated method, several objects: what one has taught the step says nothing of another."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

X = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) / 16


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """pytest keeps every log record, and thousands of them would be the leak."""
    logger = logging.getLogger("oomkit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Trainer:
    def __init__(self, scale: float = 1.0, rewrite: bool = False) -> None:
        self.model = nn.Linear(2, 1).double()
        self.model.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.scale, self.rewrite = scale, rewrite

    @oomkit.auto_batch
    def step(self, x: torch.Tensor) -> float:
        self.model.zero_grad()
        loss = self.scale * self.model(x).pow(2).mean()
        loss.backward()
        if self.rewrite:
            self.model.seen += 1.0  # type: ignore[operator]
        return loss.item()

    @oomkit.auto_batch
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.model(x).pow(2).mean()

    @oomkit.auto_batch
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _split_once(trainer: Trainer) -> None:
    with inject_oom(nth=1, phase="backward") as armed:
        trainer.step(X)
    assert armed.fired == 1


def _last() -> oomkit.StepRecord:
    return Trainer.step.records[-1]


def test_sizes_are_those_of_the_object() -> None:
    one, two = Trainer(), Trainer()
    _split_once(one)
    for _ in range(2):
        one.step(X)
        assert _last().accumulation_steps == 2
        two.step(X)
        assert _last().accumulation_steps == 1
    _split_once(two)
    two.step(X)
    assert _last().accumulation_steps == 2


def test_the_records_are_those_of_the_step() -> None:
    before = Trainer.step.records
    start = before[-1].step if before else 0
    one, two = Trainer(), Trainer()
    for trainer in (one, two, one):
        trainer.step(X)
    records = Trainer.step.records[-3:]
    assert [r.step for r in records] == [start + 1, start + 2, start + 3]
    assert {r.label for r in records} == {"Trainer.step"}
    assert one.step.records == two.step.records  # type: ignore[attr-defined]


@pytest.mark.refusals
def test_what_one_passed_is_asked_of_the_other() -> None:
    """The second step moves a buffer: counted twice in two micro-batches, without a word."""
    fine, rewriting = Trainer(), Trainer(rewrite=True)
    _split_once(fine)
    fine.step(X)
    rewriting.step(X)
    with pytest.raises(oomkit.SplitError, match=r"seen.* was changed in micro-batch 1 of 2"):
        _split_once(rewriting)


def test_losses_of_one_are_not_compared_with_those_of_the_other() -> None:
    large, small = Trainer(scale=8.0), Trainer()
    small.model.load_state_dict(large.model.state_dict())
    for _ in range(3):
        small.step(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # eight times as large looks like a forgotten sum
        with inject_oom(nth=1, times=2, phase="backward") as armed:
            large.step(X)
    assert armed.fired == 2


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_alternating_objects_get_their_own_gradients(phase: str) -> None:
    one, two = Trainer(), Trainer(scale=3.0)
    expected = []
    for trainer in (one, two):
        trainer.step(X)
        expected.append(trainer.model.weight.grad.clone())
    for _ in range(2):
        for trainer, whole in zip((one, two), expected, strict=True):
            with inject_oom(nth=1, phase=phase) as armed:
                trainer.step(X)
            assert armed.fired == 1
            assert torch.allclose(trainer.model.weight.grad, whole, rtol=0, atol=1e-12)


def test_a_returned_loss_waits_while_another_object_is_at_work() -> None:
    one, two = Trainer(), Trainer(scale=3.0)
    (one.scale * one.model(X).pow(2).mean()).backward()
    expected = one.model.weight.grad.clone()
    one.model.zero_grad()
    waiting = one.loss(X)
    two.loss(X).backward()
    with inject_oom(nth=1, phase="backward") as armed:
        waiting.backward()
    assert armed.fired == 1
    assert torch.allclose(one.model.weight.grad, expected, rtol=0, atol=1e-12)
    assert not torch.equal(two.model.weight.grad, expected)


def test_class_methods_know_by_class() -> None:
    class Heir(Trainer):
        pass

    x = torch.zeros(4)
    with inject_oom(nth=1) as armed:
        assert torch.equal(Trainer.of_class(x), x + 1)
    assert armed.fired == 1
    Heir.of_class(x)
    assert Trainer.of_class.records[-1].accumulation_steps == 1
    Trainer.of_class(x)
    assert Trainer.of_class.records[-1].accumulation_steps == 2


def test_an_object_that_takes_no_weak_references_and_one_given_by_name() -> None:
    class Slots:
        __slots__ = ("factor",)

        @oomkit.auto_batch
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    thing, other = Slots(), Slots()
    thing.factor, other.factor = 2.0, 3.0
    with inject_oom(nth=1) as armed:
        assert torch.equal(thing.step(X), X * 2)
    assert armed.fired == 1
    assert torch.equal(other.step(X), X * 3)
    assert torch.equal(Slots.step(self=other, x=X), X * 3)


def test_equal_objects_are_different_ones() -> None:
    class Equal(Trainer):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    one, two = Equal(), Equal()
    _split_once(one)
    two.step(X)
    assert _last().accumulation_steps == 1


def test_objects_come_and_go_and_leave_nothing() -> None:
    keeper = Trainer()
    keeper.step(X)

    def many(count: int) -> None:
        for i in range(count):
            trainer = Trainer()
            if i % 10:
                trainer.step(X)
            else:
                _split_once(trainer)
            assert _last().accumulation_steps == (1 if i % 10 else 2)  # whatever its address
        del trainer

    many(60)
    gc.collect()
    before = len(gc.get_objects()), oomkit.memory("cpu").allocated
    many(60)
    gc.collect()
    after = len(gc.get_objects()), oomkit.memory("cpu").allocated
    assert after[0] - before[0] <= 5  # what others left may go meanwhile
    assert after[1] == before[1]


def test_an_object_is_not_kept_alive() -> None:
    one, two = Trainer(), Trainer()
    one.step(X)
    two.step(X)
    refs = [weakref.ref(thing) for thing in (one, two, one.model, two.model)]
    del one, two
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_a_step_made_in_a_loop_knows_its_own_and_leaves_nothing() -> None:
    model = nn.Linear(2, 1).double()

    def loop(count: int) -> list[weakref.ref[Any]]:
        refs = []
        for i in range(count):

            @oomkit.auto_batch
            def step(x: torch.Tensor) -> float:
                model.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                return loss.item()

            if i % 40 == 0:
                with inject_oom(nth=1, phase="backward"):
                    step(X)
            step(X)
            assert step.records[-1].accumulation_steps == (2 if i % 40 == 0 else 1)
            refs.append(weakref.ref(step))
        del step
        return refs

    loop(50)
    gc.collect()
    kind = type(oomkit.auto_batch(len))
    before = len(gc.get_objects()), sys.getrefcount(kind), oomkit.memory("cpu").allocated
    refs = loop(1000)
    gc.collect()
    assert all(ref() is None for ref in refs)
    del refs
    after = len(gc.get_objects()), sys.getrefcount(kind), oomkit.memory("cpu").allocated
    assert max(abs(after[0] - before[0]), abs(after[1] - before[1])) <= 5
    assert after[2] == before[2]
