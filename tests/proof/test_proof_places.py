"""A split that passes where it is first compared, and is wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit

ROWS, LENGTH, WORDS = 16, 8, 5


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def kept(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("odd", [1.0, 0.4])
def test_weights_that_hold_in_one_micro_batch_alone(odd: float, graph: bool) -> None:
    """A mean over tokens, but for rows of the second micro-batch that may have weights of their
    own: the first rows say a mean over the mask, the next ones do not. In a step that needs a
    graph losses alone say nothing."""
    model, optimizer = make()
    lengths = torch.tensor([1, 5, 2, 8] * (ROWS // 4))[:, None]
    mask = (torch.arange(LENGTH)[None, :] < lengths).double()
    share = torch.ones(ROWS, 1).double()
    share[5:8] = odd
    share[6] = 1.0

    @oomkit.auto_batch(accumulation_steps=4, model=model, optimizer=optimizer)
    def step(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, share: torch.Tensor) -> None:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        weights = mask * share
        loss = (losses * weights).sum() / weights.sum()
        if graph:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()

    torch.manual_seed(1)
    x, y = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))
    before = kept(model)
    if odd == 1.0:
        step(x, y, mask, share)
        assert not equal(before, kept(model))
        return
    with pytest.raises(oomkit.SplitError):
        step(x, y, mask, share)
    assert equal(before, kept(model))


def _ignored_later(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """The first batches have every label, and are means over rows."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    if options:
        step = oomkit.auto_batch(
            step, accumulation_steps=4, model=model, optimizer=optimizer, **options
        )
    torch.manual_seed(1)
    x, y = torch.randint(WORDS, (LENGTH, ROWS)), torch.randint(WORDS, (LENGTH, ROWS))
    for _ in range(4):  # what was shown is looked at again in the second call
        step(x, y)
    ignored = torch.arange(LENGTH)[:, None] >= torch.arange(1, ROWS + 1)[None, :]
    step(x, y.masked_fill(ignored, -100))


@pytest.mark.parametrize("dim", [1, {"x": 1, "y": 1}])
def test_labels_that_are_ignored_later_where_rows_stand_in_another_dimension(dim: Any) -> None:
    (one, of_one), (other, of_other) = make(), make()
    _ignored_later(one, of_one)
    _ignored_later(other, of_other, dim=dim)
    for whole, made in zip(kept(one), kept(other), strict=True):
        torch.testing.assert_close(made, whole, rtol=1e-10, atol=1e-12)
