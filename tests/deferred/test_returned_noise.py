"""A replay's losses beside the one that was returned: an error where they differ by more than
rounding, and a warning where random numbers may explain it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # the warnings that are there without it

CHANGED = "so their gradients are not those of that call"


def _said(model: nn.Module, loss: torch.Tensor, noisy: bool) -> list[str]:
    """Warnings and the error of a backward that runs out of memory."""
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with inject_oom(nth=4, phase="backward") as fault:
            try:
                loss.backward()
            except oomkit.OutOfMemory as e:
                error = str(e)
    assert fault.fired == 1
    said = [str(w.message) for w in caught if issubclass(w.category, oomkit.OomkitWarning)]
    assert not any(CHANGED in text for text in said) or noisy
    if error is None:
        return said
    assert not noisy and "is not retried" in error
    for p, was in zip(model.parameters(), before, strict=True):
        assert p.grad is None if was is None else torch.equal(p.grad, was)
    return [*said, error]


def _replayed(
    factor: float, *, dropout: float = 0.0, warm: int = 1, drawn: bool = False, total: bool = False
) -> list[str]:
    """What is said of a backward that runs out of memory after a global has changed."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(warm + 1)]
    scale = [1.0]

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="sum" if total else "mean") * scale[0]

    for x, y in data[:-1]:
        step(x, y).backward()
    loss = step(*data[-1])
    if drawn:
        torch.randn(3)
    scale[0] = factor
    return _said(model, loss, noisy=dropout > 0)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_without_random_numbers_rounding_alone_is_allowed(warm: int, drawn: bool) -> None:
    """The program may draw between the call and its backward: that is no noise of the call."""
    assert _replayed(1.0, warm=warm, drawn=drawn) == []
    for factor in (1.001, 1.1, 1.5):
        (text,) = _replayed(factor, warm=warm, drawn=drawn)
        assert CHANGED in text


def test_with_them_it_is_coarse() -> None:
    assert _replayed(1.001, dropout=0.1) == []
    (text,) = _replayed(1.6, dropout=0.1)
    assert CHANGED in text


def test_a_sum_is_said_once() -> None:
    said = _replayed(1.0, warm=3, total=True)
    assert len(said) == 1 and 'reduction="sum"' in said[0]


def test_a_loss_that_is_only_near_a_sum_is_said_as_well() -> None:
    """Both halves have 0.45 of the loss: nearly what adds up to it, but it was not that."""
    kind, changed = _replayed(0.45, warm=3)
    assert 'reduction="sum"' in kind and CHANGED in changed


def _rows_replayed(factor: float, *, dropout: float = 0.0, coupled: bool = False) -> list[str]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))
    x, y, scale = torch.randn(8, 6), torch.randint(0, 3, (8,)), [1.0]

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out = out - out.mean(0) if coupled else out
        return F.cross_entropy(out, y, reduction="none") * scale[0]

    step(x, y).mean().backward()
    loss = step(x, y).mean()
    scale[0] = factor
    return _said(model, loss, noisy=dropout > 0)


def test_rows_are_compared_too() -> None:
    assert _rows_replayed(1.0) == []
    for factor in (1.001, 1.5):
        (text,) = _rows_replayed(factor)
        assert CHANGED in text and "one of their rows differs" in text
    assert _rows_replayed(1.001, dropout=0.1) == []
    (text,) = _rows_replayed(1.6, dropout=0.1)
    assert CHANGED in text


def test_rows_that_depend_on_each_other_are_said() -> None:
    (text,) = _rows_replayed(1.0, coupled=True)
    assert "couples the samples" in text


def test_rows_that_the_caller_has_changed_in_place_are_not_compared() -> None:
    model = nn.Linear(6, 3)
    x = torch.randn(8, 6)
    step = oomkit.auto_batch(lambda x: model(x) * 1.0, model=model)
    step(x).sum().backward()
    rows = step(x)
    rows.mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with inject_oom(nth=2, phase="backward"):
            rows.sum().backward()
