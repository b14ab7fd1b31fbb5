"""A step that is decorated anew in each turn of a loop begins with what the last one found."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oomkit

MIB = 2**20


@pytest.fixture(autouse=True)
def no_budget_left() -> Iterator[None]:
    oomkit._C._keep_sizes(True)
    yield
    oomkit._C._keep_sizes(False)
    oomkit.limit_memory(None)


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


def decorated(model: nn.Module, factor: int = 1, **options: Any) -> Any:
    """One turn of the loop: the same code each time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @oomkit.auto_batch(reduction="mean", **options)
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        for _ in range(factor - 1):
            hidden = hidden.sin()
        loss = nn.functional.cross_entropy(model[2](hidden), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def batch(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 64), torch.randint(8, (rows,))


def limit(model: nn.Module, data: Any, more: int) -> None:
    gc.collect()
    oomkit.limit_memory(2**40, device="cpu")
    oomkit.limit_memory((oomkit.memory("cpu").allocated or 0) + more, device="cpu")


def found(step: Any) -> list[tuple[int, int]]:
    return [(record.accumulation_steps, record.ooms) for record in step.records]


def test_later_turns_of_a_loop_meet_no_error() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 1 * MIB)
    ooms, plans = [], []
    for _ in range(4):
        step = decorated(model)
        for _ in range(3):
            step(*data)
        ooms.append(sum(n for _, n in found(step)))
        plans.append([k for k, _ in found(step)])
    assert ooms[0] > 0 and ooms[1:] == [0, 0, 0]
    assert plans[1][0] == plans[0][-1] and plans[-1][-1] <= plans[0][-1]
    assert step.records[0].reason == "remembered"


def test_a_function_that_is_defined_where_the_loop_is() -> None:
    model, (x, y) = model_of(512), batch()
    limit(model, x, 1 * MIB)
    ooms = []
    for _ in range(3):

        @oomkit.auto_batch(participants=model)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()

        step(x, y)
        ooms.append(step.records[0].ooms)
    assert ooms[0] > 0 and ooms[1:] == [0, 0]


def test_a_model_of_another_size_learns_anew() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 1 * MIB)
    step = decorated(model)
    step(*data)
    del step
    other = model_of(64)
    step = decorated(other)
    step(*data)
    assert found(step) == [(1, 0)]


def test_another_function_of_the_same_model_learns_anew() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 1 * MIB)
    step = decorated(model)
    step(*data)
    del step

    @oomkit.auto_batch(participants=model)
    def other(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    other(*data)
    assert other.records[0].ooms > 0


def test_a_step_that_lives_keeps_its_knowledge_to_itself() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 1 * MIB)
    first = decorated(model)
    first(*data)
    second = decorated(model)
    second(*data)
    assert found(second)[0][1] > 0


def test_sizes_that_need_less_than_they_did_are_thrown_away() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 4 * MIB)
    step = decorated(model, 8)
    for _ in range(3):
        step(*data)
    many = found(step)[-1][0]
    del step
    step = decorated(model, 1)
    for _ in range(4):
        step(*data)
    assert found(step)[0] == (many, 0) and found(step)[-1][0] < many


def test_sizes_that_fit_no_longer_are_thrown_away() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 4 * MIB)
    step = decorated(model, 1)
    for _ in range(3):
        step(*data)
    few = found(step)[-1][0]
    del step
    step = decorated(model, 8)
    for _ in range(4):
        step(*data)
    assert found(step)[0][1] > 0 and found(step)[-1][0] > few
    assert found(step)[-1][1] == 0


def test_what_is_kept_is_forgotten_with_the_switch() -> None:
    model, data = model_of(512), batch()
    limit(model, data, 1 * MIB)
    for _ in range(2):
        step = decorated(model)
        step(*data)
        assert found(step)[0][1] > 0
        del step
        oomkit._C._keep_sizes(True)


def test_what_is_kept_does_not_keep_the_code() -> None:
    scope: dict[str, Any] = {"nn": nn, "model": model_of(512)}
    exec("def step(x, y):\n nn.functional.cross_entropy(model(x), y).backward()\n", scope)
    data = batch()
    limit(scope["model"], data, 2 * MIB)
    step = oomkit.auto_batch(scope["step"], participants=scope["model"])
    step(*data)
    assert step.records[0].ooms > 0
    code: types.CodeType = scope["step"].__code__
    ref = weakref.ref(code)
    scope.clear()
    del step, code
    gc.collect()
    assert ref() is None


def test_bounds_that_an_error_taught_are_kept_with_them() -> None:
    model, data = model_of(512), batch(8)
    sizes: list[int] = []

    def make() -> Any:
        @oomkit.auto_batch(participants=model)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if len(x) == 1:
                raise ValueError("one row")
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()

        return step

    limit(model, data, 64 * MIB)
    make()(*data)
    assert sizes[-4:] == [2, 2, 2, 2]
    sizes.clear()
    make()(*data)
    assert sizes == [2, 2, 2, 2]
