"""Metrics of torchmetrics in a step that runs out of memory: each row counts once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import oomkit
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
    # The proof looks at a few rows, which may have none of a kind.
    pytest.mark.filterwarnings("ignore:No positive samples"),
    pytest.mark.filterwarnings("ignore:No negative samples"),
]

CLASSES = 3


def collection() -> torchmetrics.MetricCollection:
    kinds = [MulticlassAccuracy, MulticlassF1Score, MulticlassAUROC]
    return torchmetrics.MetricCollection([kind(num_classes=CLASSES) for kind in kinds])


METRICS: dict[str, Callable[[], Any]] = {
    "sums": lambda: MulticlassAccuracy(num_classes=CLASSES),
    "lists": lambda: MulticlassAUROC(num_classes=CLASSES),
    "collection": collection,
    "mean": torchmetrics.MeanMetric,
    "cat": torchmetrics.CatMetric,
    "wrapper": lambda: torchmetrics.wrappers.MinMaxMetric(MulticlassAccuracy(CLASSES)),
}


def _feed(metric: Any, logits: torch.Tensor, y: torch.Tensor, forward: bool) -> None:
    scalar = isinstance(metric, (torchmetrics.MeanMetric, torchmetrics.CatMetric))
    arguments = (logits.max(1).values,) if scalar else (logits.softmax(1), y)
    if forward:
        metric(*arguments)
    else:
        metric.update(*arguments)


def _counts(metric: nn.Module) -> list[int]:
    parts = metric.modules()
    return [m._update_count for m in parts if isinstance(m, torchmetrics.Metric)]


@pytest.mark.parametrize("forward", [False, True], ids=["update", "forward"])
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("calls", [0, 3], ids=["first", "later"])
def test_rows_of_a_failed_attempt_do_not_count(name: str, forward: bool, calls: int) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randint(0, CLASSES, (8,))
    model = nn.Linear(4, CLASSES)
    metric, expected = METRICS[name](), METRICS[name]()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = model(x)
        _feed(metric, logits.detach(), y, forward)
        nn.functional.cross_entropy(logits, y).backward()

    with torch.no_grad():
        logits = model(x)
    for _ in range(calls):
        step(x, y)
        _feed(expected, logits, y, forward)
    with inject_oom(nth=2, phase="backward") as armed:
        step(x, y)
    assert armed.fired == 1
    for part in (slice(4), slice(4, 8)):
        _feed(expected, logits[part], y[part], forward)
    assert _counts(metric) == _counts(expected)
    torch.testing.assert_close(metric.compute(), expected.compute())


def test_a_metric_that_the_object_of_a_method_has() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randint(0, CLASSES, (8,))

    class Trainer:
        def __init__(self) -> None:
            self.model, self.metrics = nn.Linear(4, CLASSES), {"train": collection()}

        @oomkit.auto_batch
        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            logits = self.model(x)
            for metric in self.metrics.values():
                metric.update(logits.detach().softmax(1), y)
            nn.functional.cross_entropy(logits, y).backward()

    trainer = Trainer()
    with inject_oom(nth=2, phase="backward"):
        trainer.step(x, y)
    accuracy = trainer.metrics["train"]["MulticlassAccuracy"]
    rows = accuracy.tp.sum() + accuracy.fn.sum()
    assert rows.item() == 8 and accuracy._update_count == 2


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("forward", [False, True], ids=["update", "forward"])
def test_a_metric_that_counts_calls_is_told(weighs: bool, forward: bool) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randint(0, CLASSES, (8,))
    model, mean, accuracy = nn.Linear(4, CLASSES), torchmetrics.MeanMetric(), METRICS["lists"]()
    add = mean if forward else mean.update

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        add(loss, weight=len(x)) if weighs else add(loss)
        accuracy.update(logits.detach().softmax(1), y)
        loss.backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", oomkit.OomkitWarning)
        for _ in range(3):
            step(x, y)
    said = [str(each.message) for each in caught if each.category is oomkit.OomkitWarning]
    assert [text for text in said if "once per micro-batch" in text] == []
    told = [text for text in said if "counts calls of its update()" in text]
    assert len(told) == (not weighs)


def test_what_rounding_makes_of_a_long_count_is_not_told() -> None:
    """A million calls have gone before: in single precision a sum of them is as large."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randint(0, CLASSES, (8,))
    model, mean = nn.Linear(4, CLASSES), torchmetrics.MeanMetric()
    mean.update(1.37, weight=1e6)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        mean.update(loss, weight=len(x))
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        for _ in range(3):
            step(x, y)
