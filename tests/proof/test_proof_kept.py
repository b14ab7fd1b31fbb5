"""What was proven is remembered with the sizes: believed of the same code, once losses agree."""

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
from oomkit import _C, sizes
from oomkit._engine import store as _store
from oomkit._proof import kept as _proof_kept

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


def _coupled(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out - out.mean(0), y)


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


def _file(caplog: pytest.LogCaptureFixture) -> None:
    """A run whose proof is in the file."""
    _run(_step(remember=True))
    assert ["proved the split" in line for line in _said(caplog)] == [True]
    _next_run()


def test_a_later_run_compares_losses_alone(caplog_info: pytest.LogCaptureFixture) -> None:
    _file(caplog_info)
    runs.clear()
    step = _step(remember=True)
    got = _run(step)
    assert ["by an earlier run" in line for line in _said(caplog_info)] == [True]
    k = step.records[-1].accumulation_steps
    assert len(runs) == 3 + 3 * k  # the whole of a micro-batch and its two parts, once
    fresh()
    torch.testing.assert_close(got, _run(_step()))


def test_of_a_checkpoint(caplog_info: pytest.LogCaptureFixture) -> None:
    step = _step()
    _run(step)
    state = json.loads(json.dumps(step.state_dict()))
    _said(caplog_info)
    fresh()
    again = _step()
    again.load_state_dict(state)
    _run(again)
    assert ["by an earlier run" in line for line in _said(caplog_info)] == [True]
    assert sizes.state_dict(again)["signatures"][0]["proven"] == state["signatures"][0]["proven"]


def test_a_third_run_has_it_through_the_second(caplog_info: pytest.LogCaptureFixture) -> None:
    """Also where the second has split nothing."""
    _file(caplog_info)
    for calls in (3, 0, 3):
        step = _step(remember=True)
        if calls:
            _run(step, calls)
        else:
            step(*(t[:8] for t in _batch()))  # the file is read
        assert ["by an earlier run" in line for line in _said(caplog_info)] == [True] * (calls > 0)
        state = step.state_dict()
        _next_run()
    again = _step()
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_proofs_of_other_batches_stay() -> None:
    first, second = ([(key, None, {("even", key): 0.5}, 0)] for key in (5, 6))
    one = _proof_kept.noted(_run, first)
    assert one is not None
    both = _proof_kept.noted(_run, second, [one, "nonsense"])
    assert both is not None
    assert _proof_kept.recalled(_run, [both], 5) == (None, {("even", 5): 0.5}, False)
    assert _proof_kept.recalled(_run, [both], 6) == (None, {("even", 6): 0.5}, False)
    assert _proof_kept.noted(_run, [], [both]) == _proof_kept.noted(_run, [], [one, both])
    assert _proof_kept.noted(_step, [], [both]) is None  # of another code
    newer = _proof_kept.noted(_run, [(5, None, {}, 1)], [both])
    assert newer is not None
    assert _proof_kept.recalled(_run, [newer], 5) == (None, {}, True)


def test_another_code_is_proven_anew(caplog_info: pytest.LogCaptureFixture) -> None:
    step = _step()
    _run(step)
    state = step.state_dict()
    _said(caplog_info)
    fresh()
    model = step.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch
    def other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = 2 * loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    other.load_state_dict(state)
    _run(other)
    assert ["proved the split" in line for line in _said(caplog_info)] == [True]


def test_of_another_model_nothing_is_believed(caplog_info: pytest.LogCaptureFixture) -> None:
    step = _step()
    _run(step)
    state = step.state_dict()
    state["parameters"] = [state["parameters"][0], state["parameters"][1] + 4]
    _said(caplog_info)
    fresh()
    again = _step()
    again.load_state_dict(state)
    _run(again)
    assert ["proved the split" in line for line in _said(caplog_info)] == [True]


def test_what_the_step_calls_may_be_another(
    caplog_info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code is the same: losses tell, before an update."""
    _file(caplog_info)
    monkeypatch.setitem(globals(), "loss_of", _coupled)
    step = _step(remember=True)
    before = [p.detach().clone() for p in step.model.parameters()]
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        _run(step)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_weights_are_remembered_too(
    caplog_info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "loss_of", _ignoring)
    want = _run(_step(remember=True), ignored=True)
    assert any("treated as a mean over" in line for line in _said(caplog_info))
    _next_run()
    got = _run(_step(remember=True), ignored=True)
    assert ["by an earlier run" in line for line in _said(caplog_info)] == [True]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"code": 1}', "null", "nonsense", '{"code": "CODE", "proofs": [1]}']
)
def test_a_text_of_somebody_else(text: str, caplog_info: pytest.LogCaptureFixture) -> None:
    step = _step()
    _run(step)
    state = step.state_dict()
    code = json.loads(state["signatures"][0]["proven"])["code"]
    state["signatures"][0]["proven"] = text.replace("CODE", code)
    _said(caplog_info)
    fresh()
    again = _step()
    again.load_state_dict(state)
    _run(again)
    assert ["proved the split" in line for line in _said(caplog_info)] == [True]


@pytest.mark.parametrize("wrong", [1, None, ["x"], "x" * 200_000])
def test_no_text_is_an_error(wrong: Any) -> None:
    step = _step()
    _run(step)
    state = step.state_dict()
    state["signatures"][0]["proven"] = wrong
    with pytest.raises(ValueError, match="'proven' expected a text"):
        _step().load_state_dict(state)


def test_a_step_that_is_decorated_anew(caplog_info: pytest.LogCaptureFixture) -> None:
    """In each turn of a loop: sizes of the one before. The split is proven anew."""
    _C._keep_sizes(True)
    for _ in range(3):
        _run(_step())
        gc.collect()
        assert ["proved the split" in line for line in _said(caplog_info)] == [True]


def test_weights_of_classes_are_found_anew() -> None:
    """They are a tensor of the model's."""
    from oomkit._proof.weights import Weigher

    rule = Weigher("classes", 1, "mean", None, 0, torch.ones(3))
    assert _proof_kept.noted(_run, [(5, rule, {}, 0)]) is None
    text = _proof_kept.noted(_run, [(5, None, {("even", 2): float("inf")}, 1)])
    assert text is not None
    assert _proof_kept.recalled(_run, [text], 5) == (None, {("even", 2): float("inf")}, True)
    assert _proof_kept.recalled(_run, [text], 6) is None
    assert _proof_kept.recalled(_step, [text], 5) is None


def test_how_numbers_are_joined_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss is no mean over rows: twice the loss is not one either, a share of rows is."""
    from oomkit._proof.numbers import BY_LOSS, BY_ROWS

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
    step = step_of()
    second = _run(step, ignored=True)
    torch.testing.assert_close(second, first)
    for loss, double, _ in second:
        torch.testing.assert_close(double, 2 * loss)
    state = json.loads(step.state_dict()["signatures"][0]["proven"])
    assert state["figures"]["result[1]"] & BY_LOSS and state["figures"]["result[2]"] & BY_ROWS
    assert _proof_kept.figures(_run, ["nonsense", "{}"]) == {}
