"""A number that is small in the first calls is no loss that cancels: its parts are compared."""

from __future__ import annotations

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tensor", "number", "dict", "tuple"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_evaluated_loss_of_another_reduction_is_refused(form: str, reduction: str) -> None:
    """Its parts would be added where they are to be averaged, or the other way round."""

    @oomkit.auto_batch(accumulation_steps=2, reduction=reduction)
    def step(x: torch.Tensor) -> object:
        loss = x.square().mean() if reduction == "sum" else x.square().sum()
        return {
            "tensor": loss,
            "number": loss.item(),
            "dict": {"loss": loss},
            "tuple": (loss, x),
        }[form]

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), pytest.raises(oomkit.SplitError, match="of the joined parts"):
        step(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tensor", "number", "dict", "tuple"])
def test_an_evaluated_sum_is_added(form: str) -> None:
    @oomkit.auto_batch(accumulation_steps=3, reduction="sum")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        made = {"tensor": loss, "number": loss.item(), "dict": {"loss": loss}, "tuple": (loss, x)}
        return made[form]  # type: ignore[return-value]

    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found: object = step(x)
        found = found["loss"] if isinstance(found, dict) else found
        found = found[0] if isinstance(found, tuple) else found
        assert abs(float(found) - float(x.square().sum())) < 1e-4  # type: ignore[arg-type]
