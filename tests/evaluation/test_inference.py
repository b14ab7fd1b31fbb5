"""Inference mode: evaluation works split, training gets torch's own error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom


class Counting(nn.Module):
    """A small buffer (kept as bytes) and a large one (kept as a tensor), both moving."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(200, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.small += 1
        self.large += 1
        return self.linear(x)


def _make(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(SEED)
    x = torch.randn(8, 6)
    if kind == "batch":
        with torch.inference_mode():
            x = x.clone()
    if kind == "model":
        with torch.inference_mode():
            return nn.Sequential(nn.BatchNorm1d(6), MLP()).eval(), x
    return nn.Sequential(nn.BatchNorm1d(6), MLP()).eval(), x


@pytest.mark.parametrize("how", ["split", "oom"])
@pytest.mark.parametrize("mode", ["inside", "outside"])
@pytest.mark.parametrize("kind", ["batch", "model", "neither"])
def test_evaluation_is_split(kind: str, mode: str, how: str) -> None:
    model, x = _make(kind)

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        if mode == "outside":
            return model(x)
        with torch.inference_mode():
            return model(x)

    with torch.inference_mode():
        expected = model(x)
    decorated = oomkit.auto_batch(evaluate, accumulation_steps=2 if how == "split" else 1)
    with torch.inference_mode(mode == "outside"):
        if how == "split":
            result = decorated(x)
        else:
            with inject_oom(nth=1) as armed:
                result = decorated(x)
            assert armed.fired == 1
    assert torch.allclose(result, expected, atol=1e-6)
    assert decorated.records[0].accumulation_steps == 2


def test_a_site_first_called_in_inference_mode() -> None:
    """Its copies of buffers are written to by later calls outside."""
    model, x = Counting(), torch.randn(8, 6)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with torch.inference_mode():
        step(x)
    with torch.no_grad():
        step(x)
    with inject_oom(nth=1), torch.no_grad():
        step(x)  # two parts of four rows
    assert model.small.unique().tolist() == model.large.unique().tolist() == [4.0]


def test_inference_buffers_are_put_back() -> None:
    with torch.inference_mode():
        model = Counting()
    x = torch.randn(8, 6)

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    evaluate(x)
    with inject_oom(nth=1) as armed:
        evaluate(x)
    assert armed.fired == 1
    assert model.small.unique().tolist() == model.large.unique().tolist() == [3.0]


@pytest.mark.parametrize("restore", [False, True])
def test_an_inference_batch_changed_in_place(restore: bool) -> None:
    """It has no version: its values tell."""

    @oomkit.auto_batch(restore_batch=restore)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            x.mul_(2)
            return torch.zeros(1024)[: len(x)] + x

    with torch.inference_mode():
        x = torch.ones(8)
    with inject_oom(nth=1, min_bytes=4096):
        if restore:
            assert evaluate(x).tolist() == [2.0] * 8
        else:
            with pytest.raises(oomkit.SplitError, match="changed x in place"):
                evaluate(x)


@pytest.mark.parametrize("how", ["whole", "split", "oom"])
@pytest.mark.parametrize("kind", ["batch", "model"])
def test_training_gets_torchs_own_error(kind: str, how: str) -> None:
    model, x = _make(kind)

    def step(x: torch.Tensor) -> None:
        F.mse_loss(model(x), torch.zeros(len(x), 3)).backward()

    decorated = oomkit.auto_batch(step, accumulation_steps=2 if how == "split" else 1)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        if how == "oom":
            with inject_oom(nth=1):
                decorated(x)
        else:
            decorated(x)
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_changed_in_inference_mode_is_seen() -> None:
    with torch.inference_mode():
        linear = nn.Linear(6, 3)

    @oomkit.auto_batch(accumulation_steps=2)
    def evaluate(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            linear.weight.add_(1)
            return linear(x)

    with pytest.raises(oomkit.SplitError, match="parameter 'weight' of Linear was changed"):
        evaluate(torch.randn(8, 6))


def test_a_training_step_called_from_inference_mode() -> None:
    """What is put back must not be an inference tensor: later backwards add to it."""
    model, x = MLP(), torch.randn(8, 6)
    model(x).sum().backward()
    expected = [2 * p.grad for p in model.parameters()]

    @oomkit.auto_batch(gradient_safety="copy", reduction="sum")
    def step(x: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            model(x.clone()).sum().backward()

    with inject_oom(nth=7, phase="backward") as armed, torch.inference_mode():
        step(x)
    assert armed.fired == 1
    for p, e in zip(model.parameters(), expected, strict=True):
        assert not p.grad.is_inference()
        assert torch.allclose(p.grad, e, atol=1e-5)
