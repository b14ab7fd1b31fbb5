"""Sizes outlive a run, a checkpoint and a decorated function; what was proven does not."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.new_store import fresh
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit import _C
from oomkit._engine import store as _store

SEED, ROWS, WIDTH = 8, 512, 32
BUDGET = 350_000  # bytes beyond what is there at first: a part of the batch
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

runs: Seen[int] = Seen()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OOMKIT_CACHE_DIR", str(tmp_path))
    fresh()
    yield tmp_path
    fresh()


def _mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def _ignoring(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, ignore_index=-100)


def _normalised(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out.register_hook(lambda g: g / g.norm())
    return F.cross_entropy(out, y)


loss_of: Loss = _mean


def _step(**options: Any) -> Any:
    """As each run of the program makes it."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        runs.append(len(x))
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.model = model
    return step


def _batch(ignored: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(SEED)
    y = torch.randint(0, 8, (ROWS,), generator=g)
    if ignored:
        y[:200] = -100
    return torch.randn(ROWS, WIDTH, generator=g), y


def _run(step: Any, calls: int = 3, ignored: bool = False) -> list[torch.Tensor]:
    gc.collect()
    x, y = _batch(ignored)
    with oomkit.limit_memory(2**40, device="cpu"):
        before = oomkit.memory("cpu").allocated
    with oomkit.limit_memory(before + BUDGET, device="cpu"):
        losses = [step(x, y) for _ in range(calls)]
    assert step.records[-1].accumulation_steps > 1
    return losses


def _next_run() -> None:
    _store.flush()
    fresh()
    _C._keep_sizes(False)
    _C._keep_sizes(True)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    words = ("proved", "treated as")
    said = [r.getMessage() for r in caplog.records if any(w in r.getMessage() for w in words)]
    caplog.clear()
    return said


@pytest.fixture
def caplog_info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="oomkit")
    return caplog


def _proved(caplog: pytest.LogCaptureFixture) -> bool:
    return any("proved the split" in line for line in _said(caplog))


def test_a_later_run_begins_with_sizes_and_proves_anew(
    caplog_info: pytest.LogCaptureFixture,
) -> None:
    want = _run(_step(remember=True))
    assert _proved(caplog_info)
    _next_run()
    step = _step(remember=True)
    torch.testing.assert_close(_run(step), want)
    assert step.records[0].ooms == 0  # the size is known
    assert _proved(caplog_info)


def test_of_a_checkpoint(caplog_info: pytest.LogCaptureFixture) -> None:
    step = _step()
    _run(step)
    state = json.loads(json.dumps(step.state_dict()))
    assert _proved(caplog_info)
    fresh()
    again = _step()
    again.load_state_dict(state)
    _run(again)
    assert again.records[0].ooms == 0
    assert _proved(caplog_info)


def test_a_checkpoint_with_a_proof_in_it(caplog_info: pytest.LogCaptureFixture) -> None:
    """As earlier releases wrote them: it is not read."""
    step = _step()
    _run(step)
    state = step.state_dict()
    state["signatures"][0]["proven"] = '{"code": "0123", "proofs": []}'
    assert _proved(caplog_info)
    fresh()
    again = _step()
    again.load_state_dict(state)
    _run(again)
    assert _proved(caplog_info)
    assert "proven" not in again.state_dict()["signatures"][0]


@pytest.mark.parametrize("kept", ["file", "checkpoint"])
def test_what_the_step_calls_may_be_another(
    kept: str, caplog_info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's code is the same, and so are its losses: only gradients tell."""
    first = _step(remember=kept == "file")
    _run(first)
    assert _proved(caplog_info)
    state = first.state_dict()
    _next_run()
    monkeypatch.setitem(globals(), "loss_of", _normalised)
    step = _step(remember=kept == "file")
    if kept == "checkpoint":
        step.load_state_dict(state)
    before = [p.detach().clone() for p in step.model.parameters()]
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        _run(step)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_weights_are_found_anew(
    caplog_info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "loss_of", _ignoring)
    want = _run(_step(remember=True), ignored=True)
    assert any("treated as a mean over" in line for line in _said(caplog_info))
    _next_run()
    got = _run(_step(remember=True), ignored=True)
    assert any("treated as a mean over" in line for line in _said(caplog_info))
    torch.testing.assert_close(got, want)


def test_a_step_that_is_decorated_anew(caplog_info: pytest.LogCaptureFixture) -> None:
    """In each turn of a loop: sizes of the one before. The split is proven anew."""
    _C._keep_sizes(True)
    for _ in range(3):
        _run(_step())
        gc.collect()
        assert ["proved the split" in line for line in _said(caplog_info)] == [True]


def test_how_numbers_are_joined_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss is no mean over rows: twice the loss is not one either, a share of rows is."""

    def returned(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(out, y, ignore_index=-100)
        numbers[:] = [2 * loss.detach(), (out.argmax(1) == 3).double().mean()]
        return loss

    def step_of() -> Any:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @oomkit.auto_batch(remember=True)
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            runs.append(len(x))
            optimizer.zero_grad()
            loss = returned(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach(), *numbers

        return step

    numbers: list[torch.Tensor] = []
    monkeypatch.setitem(globals(), "loss_of", _ignoring)
    first = _run(step_of(), ignored=True)
    _next_run()
    second = _run(step_of(), ignored=True)
    torch.testing.assert_close(second, first)
    for loss, double, _ in second:
        torch.testing.assert_close(double, 2 * loss)
