"""A small number is rounding where its parts are large, and is compared where they are not."""

from __future__ import annotations

import logging

import pytest
import torch

import oomkit
from oomkit.testing import inject_oom


@pytest.mark.filterwarnings("ignore")
def test_a_tiny_sum_beside_the_loss_is_not_taken_for_rounding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(batch="x")
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return {"loss": x.abs().sum() * 1e-8}

    x = torch.randn(8, 4)
    with inject_oom(nth=3, phase="backward"), pytest.raises(oomkit.SplitError, match="'loss'"):
        step(x)


def _cancelling(rows: int, seed: int) -> torch.Tensor:
    """Advantages of groups: their mean is 0 up to rounding, that of some rows is not."""
    x = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    return x - x.mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_evaluated_loss_that_cancels_is_no_other_one_for_its_rounding(reduction: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return x.mean() if reduction == "mean" else x.sum()

    with torch.no_grad():
        for seed in range(20):  # rounding differs in some
            split = oomkit.auto_batch(loss, accumulation_steps=2, reduction=reduction)
            x, ones = _cancelling(4, seed), torch.ones(4)
            assert abs(float(split(x)) - float(loss(x))) < 1e-6
            assert float(split(ones)) == float(loss(ones))  # joined as any other


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-7])
def test_an_evaluated_loss_whose_parts_do_not_cancel_is_compared(scale: float) -> None:
    @oomkit.auto_batch(accumulation_steps=2)
    def spread(x: torch.Tensor) -> torch.Tensor:
        return scale * x.var(correction=0)

    with torch.no_grad(), pytest.raises(oomkit.SplitError, match="result of the joined parts"):
        spread(_cancelling(4, 0))


@pytest.mark.filterwarnings("ignore")
def test_an_evaluated_loss_of_rounding_alone_proves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where one group's advantages are 0 and another's cancel: no part has a large loss."""
    caplog.set_level(logging.INFO, logger="oomkit")

    @oomkit.auto_batch(accumulation_steps=2, reduction="mean")
    def loss(x: torch.Tensor) -> torch.Tensor:
        return x.mean() + 1e-12 * x.var(correction=0)

    x = torch.cat([_cancelling(15, 0).reshape(3, 5), torch.zeros(1, 5)])
    with torch.no_grad():
        assert abs(float(loss(x))) < 1e-6
        assert "the loss is too small to tell" in caplog.text
        with pytest.raises(oomkit.SplitError, match="result of the joined parts"):
            loss(1e6 * x)
