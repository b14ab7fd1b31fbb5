"""A list of two numbers is no list of two rows, where a micro-batch has two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

SEED = 5
pytestmark = pytest.mark.filterwarnings("ignore:oomkit")


def _numbers(loss: torch.Tensor, other: torch.Tensor) -> Any:
    return [loss.item(), other.item()]


def _in_a_dict(loss: torch.Tensor, other: torch.Tensor) -> Any:
    return {"losses": [loss.item(), other.item()]}


def _tensors(loss: torch.Tensor, other: torch.Tensor) -> Any:
    return [loss.detach(), other.detach()]


def _flat(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        result = result["losses"]
    return torch.tensor([float(value) for value in result], dtype=torch.float64)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("made", [_numbers, _in_a_dict, _tensors])
@pytest.mark.parametrize(("call", "nth", "times"), [(0, 1, 2), (2, 2, 2), (1, 3, 2), (2, 1, 3)])
def test_each_call_returns_two(made: Any, call: int, nth: int, times: int, trains: bool) -> None:
    generator = torch.Generator().manual_seed(SEED)
    batches = [torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(6)]
    found = []
    for protect in (False, True):
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            with torch.set_grad_enabled(trains):
                out = model(x)
                loss, other = out.square().mean(), out.abs().mean()
            if trains:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return made(loss, other)

        called: Any = oomkit.auto_batch(step) if protect else step
        results = []
        for i, x in enumerate(batches):
            if protect and i == call:
                with inject_oom(nth=nth, times=times, phase="forward", min_bytes=65):
                    results.append(_flat(called(x)))
            else:
                results.append(_flat(called(x)))
        found.append(results)
    for plain, protected in zip(*found, strict=True):
        torch.testing.assert_close(protected, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("passing", [(8, 8, 8, 4), (8, 5, 8, 8), (8, 8, 4, 8), (5, 3, 8, 6)])
@pytest.mark.parametrize("value", [1, 0.5, "row"])
def test_rows_that_were_chosen_are_all_there(passing: tuple[int, ...], value: Any) -> None:
    """As many of each half of the batch."""
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> list[Any]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return [value for row in x[:, 0].tolist() if row > 0]

    for i, count in enumerate(passing):
        x = torch.ones(8, 4, dtype=torch.float64)
        left = 8 - count  # of both halves, in turn
        x[[0, 4, 1, 5, 2, 6, 3, 7][:left], 0] = -1
        if i == 2:
            with inject_oom(nth=1, phase="backward"):
                assert step(x) == [value] * count
        else:
            assert step(x) == [value] * count


@pytest.mark.parametrize("times", [1, 2])
def test_a_list_that_parts_make_longer_is_not_joined(times: int) -> None:
    """The classes that are predicted: those of the parts, one behind the other, are others."""
    found = []
    for protect in (False, True):
        torch.manual_seed(SEED)
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            out = model(x)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            return sorted(set(out.argmax(1).tolist()))

        called: Any = oomkit.auto_batch(step) if protect else step
        for rows in (8, 8):
            called(torch.randn(rows, 6, dtype=torch.float64))
        few = torch.randn(1, 6, dtype=torch.float64).expand(3, 6).contiguous()
        if protect:
            with inject_oom(phase="forward", times=times):
                found.append(called(few))
        else:
            found.append(called(few))
    assert found[0] == found[1]
    assert len(found[0]) == 1
