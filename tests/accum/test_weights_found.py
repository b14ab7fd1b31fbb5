"""Weights that a proof finds by itself: of classes wherever they are kept, with other rows in
front than the first dimension, and of masks of what does not count."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomkit

SEED = 31
ROWS, WIDTH, CLASSES = 12, 6, 3
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LIST = WEIGHTS.tolist()
HELD = types.SimpleNamespace(weights=WEIGHTS.clone())
DICT = {"weights": WEIGHTS.clone()}

Loss = Callable[..., torch.Tensor]
Batch = Callable[[int], tuple[torch.Tensor, ...]]


def _train(decorate: Callable[[Any], Any], loss: Loss, batch: Batch, calls: int = 4) -> list[Any]:
    """Some calls of a step: losses, and parameters after each."""
    torch.manual_seed(SEED)
    model = nn.Linear(WIDTH, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @decorate
    def step(*given: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, *given)
        value.backward()
        optimizer.step()
        return value.detach()

    seen = []
    for call in range(calls):
        torch.manual_seed(SEED + call)
        seen += [step(*batch(call)), model.weight.detach().clone(), model.bias.detach().clone()]
    return seen


def _same(loss: Loss, batch: Batch, calls: int = 4, **options: Any) -> None:
    want = _train(lambda step: step, loss, batch, calls)
    got = _train(oomkit.auto_batch(**options), loss, batch, calls)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def _labelled(call: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, WIDTH).double(), torch.randint(0, CLASSES, (ROWS,))


def _some_ignored(call: int) -> tuple[torch.Tensor, ...]:
    x, y = _labelled(call)
    return x, y.masked_fill(torch.rand(ROWS) < 0.3, 255)


# --- weights of classes ---

FORMS: dict[str, Loss] = {
    "a global": lambda m, x, y: F.cross_entropy(m(x), y, WEIGHTS, ignore_index=255),
    "an attribute": lambda m, x, y: F.cross_entropy(m(x), y, HELD.weights, ignore_index=255),
    "an entry": lambda m, x, y: F.cross_entropy(m(x), y, DICT["weights"], ignore_index=255),
    "made each time": lambda m, x, y: F.cross_entropy(
        m(x), y, torch.tensor(LIST, dtype=torch.float64), ignore_index=255
    ),
    "a partial": partial(
        lambda m, x, y, weight: F.cross_entropy(m(x), y, weight, ignore_index=255),
        weight=WEIGHTS,
    ),
    "a module that is made each time": lambda m, x, y: nn.CrossEntropyLoss(
        WEIGHTS, ignore_index=255
    )(m(x), y),
    "of log probabilities": lambda m, x, y: F.nll_loss(
        m(x).log_softmax(1), y, WEIGHTS, ignore_index=255
    ),
    "smoothed": lambda m, x, y: F.cross_entropy(
        m(x), y, WEIGHTS, ignore_index=255, label_smoothing=0.1
    ),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("steps", [2, 3, 12])
@pytest.mark.parametrize("batch", [_labelled, _some_ignored])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_classes(form: str, batch: Batch, steps: int) -> None:
    _same(FORMS[form], batch, accumulation_steps=steps)


@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss(WEIGHTS, ignore_index=1)])
def test_weights_of_classes_of_which_one_does_not_count(criterion: nn.Module | None) -> None:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if criterion is not None:
            return criterion(m(x), y)
        return F.cross_entropy(m(x), y, WEIGHTS, ignore_index=1)

    _same(loss, _labelled, accumulation_steps=3)


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("steps", [2, 3, 12])
def test_weights_of_the_classes_of_what_comes_next(ignored: int, steps: int) -> None:
    """Labels that the loss shifts: the first column has none."""

    def batch(call: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(ROWS, 5, WIDTH).double()
        y = torch.randint(0, CLASSES, (ROWS, 5))
        return x, y.masked_fill(torch.rand(ROWS, 5) < 0.3, ignored)

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, then = m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten()
        return F.cross_entropy(out, then, WEIGHTS, ignore_index=ignored)

    _same(loss, batch, accumulation_steps=steps)


def test_weights_of_the_classes_of_an_image() -> None:
    def batch(call: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(ROWS, 2, 2, WIDTH).double(), torch.randint(0, CLASSES, (ROWS, 2, 2))

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x).movedim(-1, 1), y, WEIGHTS)

    _same(loss, batch, accumulation_steps=3)


@pytest.mark.sample(7)
@pytest.mark.parametrize("first", [None, WEIGHTS.flip(0), torch.ones(CLASSES).double()])
@pytest.mark.parametrize("how", ["functional", "module", "argument", "in place", "many terms"])
def test_weights_that_change(how: str, first: torch.Tensor | None) -> None:
    """As those that begin after some epochs: the call that has them first is right already, and
    so is one that goes back."""
    current: list[Any] = [None]
    criterion = nn.CrossEntropyLoss(None if first is None else first.clone())

    def batch(call: int) -> tuple[torch.Tensor, ...]:
        current[0] = WEIGHTS if call in (4, 6) else first
        if how == "in place" and first is not None:
            current[0] = criterion.weight.copy_(current[0])
        elif how == "module":
            criterion.weight = current[0]
        given = () if how != "argument" or first is None else (current[0],)
        return *_labelled(call), *given

    def loss(
        m: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        if how == "module":
            return criterion(m(x), y)
        if how == "many terms":  # more than numbers are read of
            out = m(x)
            return sum(F.cross_entropy(out, y, current[0]) for _ in range(70)) / 70
        return F.cross_entropy(m(x), y, current[0] if weight is None else weight)

    _same(loss, batch, 8, accumulation_steps=3)


def test_weights_of_the_batch_are_refused() -> None:
    """What a part computes of its own labels are no weights of the whole."""

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x), y, 1.0 / (1.0 + y.bincount(minlength=CLASSES).double()))

    with pytest.raises(oomkit.SplitError, match="differs by"):
        _train(oomkit.auto_batch(accumulation_steps=3), loss, _labelled)


# --- rows in the second dimension ---

TIME = 5


def _columns(call: int) -> tuple[torch.Tensor, ...]:
    y = torch.randint(0, CLASSES, (TIME, ROWS))
    return torch.randn(TIME, ROWS, WIDTH).double(), y


def _padded_columns(call: int) -> tuple[torch.Tensor, ...]:
    x, y = _columns(call)
    lengths = torch.randint(2, TIME + 1, (ROWS,))
    return x, y.clamp(min=1).where(torch.arange(TIME)[:, None] < lengths, 0)


def _flat(out: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **options)


def _masked(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = _flat(m(x), y, reduction="none")
    return (each * (y != 0).flatten()).sum() / (y != 0).sum()


COLUMNS: dict[str, Loss] = {
    "ignored": lambda m, x, y: _flat(m(x), y, ignore_index=0),
    "shifted": lambda m, x, y: _flat(m(x[:-1]), y[1:], ignore_index=0),
    "masked": _masked,
    "weighed": lambda m, x, y: _flat(m(x), y, weight=WEIGHTS),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("steps", [2, 3, 12])
@pytest.mark.parametrize("batch", [_columns, _padded_columns])
@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_in_the_second_dimension(kind: str, batch: Batch, steps: int) -> None:
    _same(COLUMNS[kind], batch, accumulation_steps=steps, dim=1)


def test_labels_that_are_ignored_later_in_the_second_dimension() -> None:
    def batch(call: int) -> tuple[torch.Tensor, ...]:
        x, y = _columns(call)
        if call >= 2:
            y[2:, : ROWS // 2] = -100
        return x, y

    _same(lambda m, x, y: _flat(m(x), y), batch, accumulation_steps=3, dim=1)


def test_a_sparse_leaf_with_rows_in_the_second_dimension() -> None:
    """It has nothing that is counted."""

    def batch(call: int) -> tuple[torch.Tensor, ...]:
        return torch.eye(WIDTH, ROWS).double().to_sparse(), *_padded_columns(call)

    def loss(m: nn.Module, s: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _flat(m(x + s.to_dense().t()), y, ignore_index=0)

    _same(loss, batch, accumulation_steps=3, dim=1)


def test_how_the_second_dimension_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="oomkit"):
        _train(oomkit.auto_batch(accumulation_steps=3, dim=1), COLUMNS["shifted"], _padded_columns)
    assert ".movedim(1, 0)[:, 1:] that are not 0" in caplog.text


# --- masks of what does not count ---


def _padding(call: int) -> tuple[torch.Tensor, ...]:
    """True is padding, as in key_padding_mask; 0 is a label, too."""
    x, y = torch.randn(ROWS, TIME, WIDTH).double(), torch.randint(0, CLASSES, (ROWS, TIME))
    padding = torch.arange(TIME) >= torch.randint(2, TIME + 1, (ROWS, 1))
    return x, y.masked_fill(padding, 0), padding


def _late_padding(call: int) -> tuple[torch.Tensor, ...]:
    x, y, padding = _padding(call)
    return x, y, padding if call >= 3 else torch.zeros_like(padding)


def _without_padding(
    m: nn.Module, x: torch.Tensor, y: torch.Tensor, padding: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(m(x)[~padding], y[~padding])


def _shifted_without_padding(
    m: nn.Module, x: torch.Tensor, y: torch.Tensor, padding: torch.Tensor
) -> torch.Tensor:
    return _without_padding(m, x[:, :-1], y[:, 1:], padding[:, 1:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("steps", [2, 3, 12])
@pytest.mark.parametrize("batch", [_padding, _late_padding])
@pytest.mark.parametrize("loss", [_without_padding, _shifted_without_padding])
def test_a_mask_of_padding(loss: Loss, batch: Batch, steps: int) -> None:
    _same(loss, batch, 5, accumulation_steps=steps)


def test_a_mask_of_padding_of_rows() -> None:
    def batch(call: int) -> tuple[torch.Tensor, ...]:
        padding = torch.rand(ROWS) < 0.3
        return *_labelled(call), padding

    _same(_without_padding, batch, accumulation_steps=3)


# --- what is said where none is found ---


def test_weights_that_fit_by_chance_are_not_proposed() -> None:
    """As many labels are not 0 as the step counts, of the rows that are looked at first."""

    def batch(call: int) -> tuple[torch.Tensor, ...]:
        counted = torch.tensor([1, 1, 2, 2, 1, 1, 2, 1, 2, 1, 2, 1])
        labelled = torch.tensor([1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1, 1])
        x = torch.randn(ROWS, 2, WIDTH).double().abs()
        x[:, :, 0] *= torch.where(torch.arange(2) < counted[:, None], 1.0, -1.0)
        y = torch.randint(1, CLASSES, (ROWS, 2))
        return x, y.where(torch.arange(2) < labelled[:, None], 0)

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = (x[:, :, 0] > 0).flatten()
        return (_flat(m(x), y, reduction="none") * mask).sum() / mask.sum()

    with pytest.raises(oomkit.SplitError, match="couples the samples") as caught:
        _train(oomkit.auto_batch(accumulation_steps=3), loss, batch)
    assert "not 0" not in str(caught.value)
