"""A mean over what the samples of a list have: boxes of images, tokens of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import inject_oom

ROWS, WIDTH, CLASSES = 12, 6, 3
Batch = tuple[Any, ...]


def _tensors(lengths: list[int]) -> Batch:
    return (
        [torch.randn(n, WIDTH).double() for n in lengths],
        [torch.randint(0, CLASSES, (n,)) for n in lengths],
    )


def _targets(lengths: list[int]) -> Batch:
    boxes = [
        {"boxes": torch.rand(n, 4), "labels": torch.randint(0, CLASSES, (n,))} for n in lengths
    ]
    return torch.randn(len(lengths), WIDTH).double(), boxes


def _pairs(lengths: list[int]) -> Batch:
    x, y = _tensors(lengths)
    return ([*zip(x, y, strict=True)],)


def _packed(model: nn.Module, x: list[torch.Tensor], y: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(torch.cat(x)), torch.cat(y))


def _of_pairs(model: nn.Module, samples: list[Any]) -> torch.Tensor:
    return _packed(model, [x for x, _ in samples], [y for _, y in samples])


def _detector(model: nn.Module, x: torch.Tensor, targets: list[Any]) -> torch.Tensor:
    """Images without boxes have a loss, too (DETR, with one class for all of them)."""
    boxes = max(1, sum(len(each["labels"]) for each in targets))
    out = model(x)
    of_boxes = [
        F.cross_entropy(row.expand(len(each["labels"]), -1), each["labels"], reduction="sum")
        for row, each in zip(out, targets, strict=True)
    ]
    return (torch.stack(of_boxes).sum() + out.square().sum()) / boxes


def _per_sample(model: nn.Module, x: list[torch.Tensor], y: list[torch.Tensor]) -> torch.Tensor:
    """The mean over samples of means: lengths make no difference."""
    return torch.stack([F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)]).mean()


STEPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[list[int]], Batch], int]] = {
    "lists of tensors": (_packed, _tensors, 1),
    "a list of pairs": (_of_pairs, _pairs, 1),
    "targets of a detector": (_detector, _targets, 0),
    "a mean of means": (_per_sample, _tensors, 1),
}


def _train(decorate: Any, kind: str, equal: int) -> list[torch.Tensor]:
    loss, batch, least = STEPS[kind]
    torch.manual_seed(4)
    model = nn.Linear(WIDTH, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, *args)
        value.backward()
        optimizer.step()
        return value.detach()

    trains = decorate(step)
    found = []
    for call in range(6):
        lengths = [3] * ROWS if call < equal else torch.randint(least, 5, (ROWS,)).tolist()
        if call == 4 and least == 0:
            lengths = [0] * (ROWS - 1) + [1]
        found.append(trains(*batch(lengths)))
    return [*found, *model.parameters()]


@pytest.mark.sample(20)
@pytest.mark.parametrize("steps", [2, 3, 12])
@pytest.mark.parametrize("equal", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", STEPS)
def test_lengths(kind: str, equal: int, steps: int) -> None:
    """Also where all are as long in the first calls: the first one with others is right."""
    want = _train(lambda step: step, kind, equal)
    got = _train(oomkit.auto_batch(accumulation_steps=steps), kind, equal)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def test_samples_that_are_not_alike() -> None:
    """They have no lengths to tell, and are no error of their own."""
    model = nn.Linear(2, 1)

    @oomkit.auto_batch
    def step(x: torch.Tensor, samples: list[Any]) -> None:
        model(x).mean().backward()

    x = torch.randn(4, 2)
    samples = [torch.randn(3), {"a": torch.randn(2)}, torch.tensor(1.0), None]
    with inject_oom():
        step(x, samples)
    want = torch.autograd.grad(model(x).mean(), [*model.parameters()])
    for param, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(param.grad, gradient)
