"""Weights, the forgotten sum and verify= where the caller runs backward on the loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from zoo import MLP, SEED

import oomkit
from oomkit.testing import force_slices

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

TOLERANCE = 1e-12
SLICES = {2: [4, 3], 3: [3, 2, 2], 5: [2, 2, 1, 1, 1]}


@pytest.fixture(autouse=True)
def _said_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        warnings.filterwarnings("ignore", message=".* runs once per micro-batch")
        yield


def _batch(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED + rows)
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))


def _model() -> MLP:
    torch.manual_seed(SEED)
    return MLP().double()


def _weight(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("case", ["mean", "sum", "labels", "items"])
def test_equal_to_the_whole_batch(case: str, k: int) -> None:
    """With a gradient of 1/4, and the accumulated gradients of a call before."""
    x, y = _batch()
    options: dict[str, Any] = {}
    if case in ("labels", "items"):
        y[:3] = -100
    if case == "labels":
        options["weight"] = _weight
    if case == "sum":
        options["reduction"] = "sum"
    outcome = []
    for slices in ([7], SLICES[k]):
        model = _model()

        @oomkit.auto_batch(**options)
        def loss(x: torch.Tensor, y: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            reduction = "sum" if case in ("sum", "items") else "mean"
            value = F.cross_entropy(model(x), y, reduction=reduction)  # noqa: B023
            return value if num_items_in_batch is None else value / num_items_in_batch

        with force_slices(slices):
            for _ in range(2):
                value = loss(x, y, 4 if case == "items" else None)
                (value / 4).backward()
        outcome.append((value.item(), [p.grad for p in model.parameters()]))
    (whole_loss, whole), (split_loss, split) = outcome
    assert split_loss == pytest.approx(whole_loss, rel=TOLERANCE)
    assert all(
        torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(whole, split, strict=True)
        if a is not None and b is not None
    )


def test_several_weights_for_a_returned_loss_are_refused() -> None:
    model = _model()
    loss = oomkit.auto_batch(
        lambda x, y: F.cross_entropy(model(x), y), weight=lambda batch: (1, 1), model=model
    )
    with force_slices([4, 3]), pytest.raises(oomkit.SplitError, match="got 2, expected 1"):
        loss(*_batch())


def test_unequal_labels_are_said() -> None:
    model = _model()
    loss = oomkit.auto_batch(lambda x, y: F.cross_entropy(model(x), y), model=model, verify=False)
    x, y = _batch()
    y[:3] = -100
    with force_slices([4, 3]), pytest.warns(oomkit.OomkitWarning, match="labels of -100"):
        loss(x, y).backward()


@pytest.mark.parametrize("verify", [False])
def test_a_forgotten_sum_is_said(verify: bool | None) -> None:
    model = _model()

    @oomkit.auto_batch(verify=verify)
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="sum")

    if verify is False:
        loss(*_batch()).backward()
        loss(*_batch()).backward()
    with force_slices([4, 3]):
        with pytest.warns(
            oomkit.OomkitWarning, match="looks like a sum|If the loss is a sum"
        ) as said:
            loss(*_batch()).backward()
        loss(*_batch()).backward()
    assert len(said) == 1


def test_losses_of_rows_are_not_verified() -> None:
    model = _model()
    sizes: Seen[int] = Seen()

    @oomkit.auto_batch(verify=True)
    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return F.cross_entropy(model(x), y, reduction="none")

    with force_slices([4, 3]):
        losses(*_batch()).mean().backward()
    assert sizes == [4, 3, 4, 3]  # and again at the backward
