"""What one micro-batch does not show, nor eval mode: rows that are coupled with those of others, or
in training mode alone, beside random numbers that no part of a batch can be given."""

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
@pytest.mark.refusals
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


def _answers(seed: int, fits: int, steps: int) -> nn.Module:
    """Two to each prompt, far from each other, with advantages of their own group."""
    print("seed", seed)
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).double()

    @oomkit.auto_batch(model=model, accumulation_steps=steps)
    def step(
        x: torch.Tensor, taken: torch.Tensor, reward: torch.Tensor, group: torch.Tensor
    ) -> None:
        if len(x) > fits and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        share = model(x).log_softmax(1).gather(1, taken[:, None])[:, 0]
        total = torch.zeros(8).double().index_add(0, group, reward)
        count = torch.zeros(8).double().index_add(0, group, torch.ones_like(reward))
        advantage = reward - (total / count.clamp(min=1))[group]
        (-(share - share.detach()).exp() * advantage).mean().backward()

    batch = torch.randn(16, 6).double(), torch.randint(4, (16,)), torch.randn(16).double()
    with pytest.raises(oomkit.SplitError):
        step(*batch, torch.arange(8).repeat(2))
    return model


@pytest.mark.parametrize(("fits", "steps"), [(8, 1), (4, 1), (2, 1), (16, 16), (2, 16)])
def test_rows_of_different_micro_batches_in_a_loss_whose_value_is_constant(
    fits: int, steps: int
) -> None:
    """Of 16 micro-batches each has one row, and is compared with some of more."""
    for seed in range(4):
        assert all(p.grad is None for p in _answers(seed, fits, steps).parameters())


def test_lists_and_arrays_are_dealt() -> None:
    model = nn.Linear(6, 4).double()

    @oomkit.auto_batch(model=model, accumulation_steps=4, batch=["x", "y", "names"])
    def step(x: torch.Tensor, y: np.ndarray, names: list[str]) -> None:
        scale = torch.tensor([1.0 + len(name) for name in names]).double()
        loss = F.cross_entropy(model(x), torch.from_numpy(y), reduction="none")
        (loss * scale).mean().backward()

    names = ["a" * i for i in range(16)]
    step(torch.randn(16, 6).double(), np.arange(16) % 4, names)
    assert step.records[-1].accumulation_steps == 4
