"""What eval mode does not show: rows that are coupled in training mode alone, beside random numbers
that no part of a batch can be given."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Layer = Callable[[torch.Tensor], torch.Tensor]


def _mixup(x: torch.Tensor) -> torch.Tensor:
    """Of hidden layers, by numpy."""
    share = np.random.beta(2.0, 2.0)
    return share * x + (1 - share) * x[torch.from_numpy(np.random.permutation(len(x)))]


def _sometimes(x: torch.Tensor) -> torch.Tensor:
    """The same operators, whether it mixes or not."""
    share = 1.0 if random.random() < 0.5 else np.random.beta(2.0, 2.0)
    return share * x + (1 - share) * x[torch.from_numpy(np.random.permutation(len(x)))]


def _standardised(x: torch.Tensor) -> torch.Tensor:
    return _dropped(x - 0.5 * x.mean(0))


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Between halves, as a cut and paste by numpy is made."""
    taken = torch.from_numpy(np.random.rand(len(x), 1) < 0.5 + 0 * np.random.rand())
    return torch.where(taken, x.flip(0), x)


def _dropped(x: torch.Tensor) -> torch.Tensor:
    """Two arrays for each row: no part is given both."""
    return x * torch.from_numpy(
        np.random.rand(len(x), 1) * np.random.rand(len(x), x.shape[1]) > 0.1
    )


def _plain(x: torch.Tensor) -> torch.Tensor:
    return _dropped(x)


def _halved(x: torch.Tensor) -> torch.Tensor:
    """Noise and its opposite: a row has the numbers of its place."""
    half = torch.from_numpy(np.random.randn((len(x) + 1) // 2, 1))
    return _dropped(x + 0.1 * torch.cat([half, -half])[: len(x)])


def _run(layer: Layer, seed: int, ignores: bool = False) -> oomkit.StepRecord:
    print("seed", seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 4)]).double()

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(model[0](x))
        value = F.cross_entropy(model[1](layer(x) if model.training else x), y)
        value.backward()
        return value.detach()

    x, y = torch.randn(16, 6).double(), torch.randint(4, (16,))
    with inject_oom(nth=2, phase="backward"):
        step(x, y.masked_fill(torch.rand(16) < 0.3, -100) if ignores else y)
    return step.records[-1]


@pytest.mark.parametrize("layer", [_mixup, _sometimes, _standardised, _swapped])
def test_rows_that_are_coupled_in_training_mode_alone(layer: Layer) -> None:
    for seed in range(4):
        with pytest.raises(oomkit.SplitError):
            _run(layer, seed)


def test_numbers_that_choose_rows_in_another_call_alone() -> None:
    """Of this call's all rows draw one share, so that its parts are exact."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        share = 0.0 if random.random() < 0.5 else 0.5
        return x - share * x.mean(0)

    splits = 0
    for seed in range(16):
        try:
            splits += _run(chosen, seed).accumulation_steps == 2
        except oomkit.SplitError as error:
            print(error)
    assert splits <= 4  # three draws: two are expected, of one draw eight


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("layer", [_plain, _halved])
def test_rows_that_are_alone_are_split(
    layer: Layer, ignores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    for seed in range(3):
        assert _run(layer, seed, ignores).accumulation_steps == 2
    assert ignores or "in eval mode alone" in caplog.text
