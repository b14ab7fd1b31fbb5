"""10,000 recovered OOMs leave nothing: no tensor byte, no object, no reference. `make test` has a
tenth of them."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sample import WHOLE
from zoo import MLP

import oomkit
from oomkit.testing import inject_oom


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """pytest keeps every log record: 10,000 of them would be the leak."""
    logger = logging.getLogger("oomkit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def _alive() -> int:
    return oomkit.memory("cpu").allocated or 0


def test_ten_thousand_recovered_ooms_leave_nothing() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 4)

    def plain(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        kept = [model(x)]
        loss = kept[0].pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def ooms(count: int) -> None:
        for i in range(count):
            # A step of its own each time: one that found a smaller size keeps it.
            step = oomkit.auto_batch(plain)
            with inject_oom(nth=1 + i % 6, phase="forward" if i % 2 else "backward") as armed:
                step(x)
            assert armed.fired == 1

    ooms(40)
    alive: list[int] = []  # numbers alone, which are no objects to the collector
    objects: list[int] = []
    gc.collect()
    gc.disable()
    try:
        # What is made once in a process (a cache that is filled) is not made by each block.
        while len(objects) < 3 or (len(objects) < 6 and objects[-1] != objects[-2]):
            alive.append(_alive())
            objects.append(len(gc.get_objects()))
            ooms(5_000 if WHOLE else 30)
    finally:
        gc.enable()
    assert objects[-1] == objects[-2], objects
    assert len({*alive}) == 1, alive


@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_nothing_of_a_failed_backward_stays_queued(kind: str) -> None:
    """The defect of every peer on CPU: bytes after recovery equal the baseline exactly."""
    model: torch.nn.Module
    if kind == "conv":
        model = torch.nn.Sequential(  # deep enough for a queue behind every failure
            *(
                torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.Tanh())
                for _ in range(6)
            )
        )
        x = torch.randn(8, 2, 5, 5)
    else:
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        x = torch.randn(8, 6, 16)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).pow(2).mean().backward()

    step(x)
    model.zero_grad()
    gc.collect()
    with inject_oom(nth=2**60, phase="backward") as counted:
        step(x)
    model.zero_grad()
    gc.collect()
    gc.disable()
    baseline = _alive()
    try:
        for n in range(1, counted.seen + 1):
            # From there on everything fails: the call gives up, and all is as before.
            with inject_oom(nth=n, times=None, phase="backward") as armed:
                with pytest.raises(oomkit.OutOfMemory) as caught:
                    step(x)
            assert armed.fired >= 1
            del caught
            assert _alive() == baseline, (kind, n)
    finally:
        gc.enable()


def test_objects_of_the_types_are_counted_right() -> None:
    kinds = [oomkit.StepRecord, type(oomkit.auto_batch(lambda x: x)), oomkit.guard]

    def use() -> None:
        @oomkit.auto_batch
        def step(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        step(torch.zeros(2))
        step.records  # noqa: B018
        with oomkit.guard():
            pass

    use()
    gc.collect()
    before = [sys.getrefcount(kind) for kind in kinds]
    for _ in range(500):
        use()
    gc.collect()
    after = [sys.getrefcount(kind) for kind in kinds]
    assert all(b - a <= 2 for a, b in zip(before, after, strict=True)), (before, after)


def test_an_exception_that_the_caller_handles_keeps_its_traceback() -> None:
    model = MLP()
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    def fails() -> None:
        local = "kept"
        raise ValueError(local)

    try:
        fails()
    except ValueError as error:
        with inject_oom(nth=1, phase="backward") as armed:
            step(x, y)
        assert armed.fired == 1
        frames = [f.name for f in traceback.extract_tb(error.__traceback__)]
        assert frames[-1] == "fails"
        assert error.__traceback__ is not None
        inner = error.__traceback__.tb_next
        assert inner is not None and inner.tb_frame.f_locals["local"] == "kept"


def test_the_steps_own_hold_on_the_exception_is_broken() -> None:
    """A step that stores the OOM in a local makes a cycle; it is cut without the collector."""
    x = torch.randn(64, 64)
    sizes: list[int] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        big = x * 2
        sizes.append(_alive())
        try:
            return big + 1
        except torch.OutOfMemoryError as error:
            kept: Any = error
            raise kept  # noqa: B904  (the same exception, from a local that holds it)

    with torch.no_grad():
        step(x)
        gc.collect()
        gc.disable()
        try:
            baseline = _alive()
            with inject_oom(nth=2, min_bytes=64 * 64 * 4) as armed:
                step(x)
            assert armed.fired == 1
            assert _alive() == baseline
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["one row", "in turn", "not found"])
def test_whole_batches_that_run_again_leave_nothing(kind: str) -> None:
    """With the two runs that show that they do the same, of a new step each time."""
    one, two = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    x = torch.randn(1 if kind == "one row" else 4, 4)

    def train(x: torch.Tensor) -> None:
        one.zero_grad()
        one(x).square().mean().backward()
        if kind == "in turn":
            two.zero_grad()
            two(x).square().mean().backward()

    def ooms(count: int) -> None:
        for _ in range(count):
            if kind == "not found":
                step, given = oomkit.auto_batch(lambda: train(x)), ()
            else:
                step, given = oomkit.auto_batch(train), (x,)
            with inject_oom(nth=2, phase="backward") as armed:
                step(*given)
            assert armed.fired == 1

    ooms(20)
    gc.collect()
    gc.disable()
    try:
        bytes0, objects0 = _alive(), len(gc.get_objects())
        ooms(400 if WHOLE else 60)
        del_bytes, del_objects = _alive() - bytes0, len(gc.get_objects()) - objects0
    finally:
        gc.enable()
    assert del_bytes == 0
    assert abs(del_objects) <= 5


@pytest.mark.parametrize("kind", ["whole", "rows", "split", "dropped"])
def test_returned_losses_leave_nothing(kind: str) -> None:
    model = torch.nn.Linear(4, 3)
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
    reduction = "none" if kind == "rows" else "mean"
    k = 2 if kind == "split" else 1

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction=reduction)

    def ooms(count: int) -> None:
        for _ in range(count):
            step = oomkit.auto_batch(compute, accumulation_steps=k, verify=False)
            loss = step(x, y).mean()
            if kind != "dropped":
                with inject_oom(nth=3, phase="backward") as armed:
                    loss.backward()
                assert armed.fired == (kind != "split")
            model.zero_grad()

    ooms(50)
    gc.collect()
    gc.disable()
    try:
        bytes0, objects0 = _alive(), len(gc.get_objects())
        ooms(1000 if WHOLE else 300)
        del_bytes, del_objects = _alive() - bytes0, len(gc.get_objects()) - objects0
    finally:
        gc.enable()
    assert del_bytes == 0
    assert abs(del_objects) <= 5
