"""Which normalisations couple the samples of a batch: said, and noise where losses are compared."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from zoo import SEED

import oomkit


class _Subclass(nn.BatchNorm1d):
    """As timm and torchvision have them."""


class _Other(nn.modules.batchnorm._NormBase):
    """Of a kind of its own: in training mode it may do anything with the batch."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


Make = Callable[[], nn.Module]

ALONE: dict[str, tuple[Make, bool]] = {  # what makes it, in training mode or not
    "instance": (lambda: nn.InstanceNorm1d(4), True),
    "instance, evaluated": (lambda: nn.InstanceNorm1d(4), False),
    "instance, tracked and evaluated": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        False,
    ),
    "lazy instance": (lambda: nn.LazyInstanceNorm1d(track_running_stats=False), True),
    "group": (lambda: nn.GroupNorm(2, 4), True),
    "batch, evaluated": (lambda: nn.BatchNorm1d(4), False),
}
COUPLED: dict[str, tuple[Make, bool]] = {
    "batch": (lambda: nn.BatchNorm1d(4), True),
    "lazy batch": (nn.LazyBatchNorm1d, True),
    "subclass": (lambda: _Subclass(4), True),
    "untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), True),
    "untracked, evaluated": (lambda: nn.BatchNorm1d(4, track_running_stats=False), False),
    "other": (lambda: _Other(4), True),
}


def _model(make: Make, training: bool) -> nn.Module:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), make(), nn.Tanh(), nn.Conv1d(4, 1, 1)).double()
    model(torch.randn(2, 3, 5, dtype=torch.float64))  # lazy ones are made
    return model.train(training)


def _dice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Over the batch as a whole: a product of sums, so that samples depend on each other."""
    p = torch.sigmoid(model(x))
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def _run(
    make: Make, training: bool, coupled: bool, caplog: pytest.LogCaptureFixture
) -> tuple[list[str], str]:
    model = _model(make, training)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    y = (torch.rand(8, 1, 5, dtype=torch.float64) < torch.linspace(0, 1, 8)[:, None, None]).double()

    @oomkit.auto_batch(accumulation_steps=2, verify=True, model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = _dice(model, x, y) if coupled else F.mse_loss(model(x), y)
        loss.backward()

    with (
        warnings.catch_warnings(record=True) as said,
        caplog.at_level(logging.INFO, "oomkit"),
    ):
        warnings.simplefilter("always")
        step(x, y)
    return [str(w.message) for w in said], caplog.text


@pytest.mark.parametrize("name", ALONE)
def test_statistics_of_each_sample_are_said_of_none(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    said, log = _run(*ALONE[name], False, caplog)
    assert said == []
    assert "proved the split" in log and "coarsely" not in log


@pytest.mark.parametrize("name", ALONE)
def test_a_loss_that_couples_the_samples_is_found_beside_them(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(oomkit.SplitError, match="couples the samples"):
        _run(*ALONE[name], True, caplog)


@pytest.mark.parametrize("name", COUPLED)
def test_statistics_of_the_batch_are_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, training = COUPLED[name]
    if name == "other":  # unknown to the proof: it is refused as what it is
        with pytest.raises(oomkit.SplitError, match="couples the samples"):
            _run(make, training, False, caplog)
        return
    said, log = _run(make, training, False, caplog)
    kind = type(_model(make, training)[1]).__name__
    words = "is in training mode" if training else "has no running statistics"
    assert sum(f"{kind} {words}" in text for text in said) == 1
    assert "proved the split" in log  # they are left out of the comparison


def test_tracked_statistics_of_samples_are_named_and_rolled_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They move once for each micro-batch, which is said as of any buffer."""
    model = _model(lambda: nn.InstanceNorm1d(4, track_running_stats=True), True)
    before = [b.clone() for b in model.buffers()]
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    fails = Seen([True])

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        loss.backward()

    with pytest.warns(oomkit.OomkitWarning, match=r"'running_mean' of a InstanceNorm1d"):
        step(x)
    twin = _model(lambda: nn.InstanceNorm1d(4, track_running_stats=True), True)
    for own, start in zip(twin.buffers(), before, strict=True):
        own.copy_(start)
    for half in (x[:4], x[4:]):
        twin(half)
    for got, expected in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tracked", [False, True])
def test_parts_of_an_evaluation_in_training_mode(tracked: bool) -> None:
    """Finished parts are kept unless statistics moved in them, of which no version tells."""
    model = _model(lambda: nn.InstanceNorm1d(4, track_running_stats=tracked), True)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    seen: Seen[int] = Seen()

    @oomkit.auto_batch(model=model, accumulation_steps=2, verify=False)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        with torch.no_grad():
            out = model(x)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return out  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = evaluate(x)
    torch.testing.assert_close(got, model(x).detach(), rtol=0, atol=1e-12)
    assert seen[:3] == ([4, 4, 2] if not tracked else seen[:3])
    assert (seen[2:] == [2, 2]) == (not tracked)


def test_running_statistics_are_no_weights_of_classes(caplog: pytest.LogCaptureFixture) -> None:
    """They change in each call, and never are what a loss is a mean over: proven once."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "oomkit"):
        warnings.simplefilter("ignore")
        for _ in range(12):
            step(torch.randn(32, 6), torch.randint(10, (32,)))
    assert caplog.text.count("proved the split") == 1
