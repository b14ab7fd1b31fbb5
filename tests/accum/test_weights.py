"""Split against whole in double precision: equal to rounding (1e-12) for every reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from zoo import MLP, SEED

import oomkit
from oomkit.testing import force_slices, inject_oom

TOLERANCE = 1e-12


def _batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED + rows)
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))


def _model() -> MLP:
    torch.manual_seed(SEED)
    return MLP().double()


def _gradients(model: MLP) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(
        torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE) for x, y in zip(a, b, strict=True)
    )


def _mean(model: MLP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _sum(model: MLP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def _masked(model: MLP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over labelled rows only: their share differs from micro-batch to micro-batch."""
    return F.cross_entropy(model(x), y, ignore_index=-100)


def _penalty(model: MLP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradients inside the loss are the loss's own: they have no weight."""
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + slope.pow(2).sum(1).mean()


CASES: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "mean": (_mean, {}),
    "sum": (_sum, {"reduction": "sum"}),
    "penalty": (_penalty, {}),
    "weighted": (_masked, {"weight": lambda batch: (batch[1] != -100).sum()}),
}


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("prior", [False, True], ids=["no-gradients", "gradients-before"])
def test_split_equals_whole(case: str, rows: int, k: int, prior: bool) -> None:
    loss_of, options = CASES[case]
    x, y = _batch(rows)
    if case == "weighted":
        y[:3] = -100
    outcome = []
    for steps in (1, k):
        model = _model()
        if prior:
            _mean(model, *_batch(5)).backward()

        @oomkit.auto_batch(accumulation_steps=steps, **options)
        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = loss_of(model, x, y)  # noqa: B023
            loss.backward()
            return loss.item()

        loss = step(x, y)
        assert step.records[0].accumulation_steps == steps
        outcome.append((loss, _gradients(model)))
    (whole_loss, whole), (split_loss, split) = outcome
    assert abs(whole_loss - split_loss) <= TOLERANCE * abs(whole_loss)
    assert _close(whole, split)


def test_gradients_before_the_step_survive_every_fault() -> None:
    """Copies are taken (the shape is unproven): bitwise the undisturbed split run."""
    x, y = _batch(7)

    def run(fault: dict[str, Any] | None, **options: Any) -> tuple[list[torch.Tensor], Any]:
        model = _model()
        _mean(model, *_batch(5)).backward()

        @oomkit.auto_batch(**options)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            _mean(model, x, y).backward()

        armed = None
        if fault is None:
            step(x, y)
        else:
            with inject_oom(**fault) as armed:
                step(x, y)
        return _gradients(model), armed

    expected, _ = run(None, accumulation_steps=2)
    for phase in ("forward", "backward"):
        _, armed = run({"nth": 2**60, "phase": phase})
        for n in range(1, armed.seen + 1):
            got, armed_n = run({"nth": n, "phase": phase})
            assert armed_n.fired == 1
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), (phase, n)


def test_gradients_before_a_proven_step_are_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    """No copies once the shape is proven: leaves that moved keep their whole contribution."""
    caplog.set_level("INFO", logger="oomkit")
    x, y = _batch(8)
    whole = _model()
    _mean(whole, *_batch(5)).backward()
    _mean(whole, x, y).backward()
    seen = None
    n = 1
    while seen is None or n <= seen:
        model = _model()

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            _mean(model, x, y).backward()  # noqa: B023

        _mean(model, *_batch(5)).backward()
        step(x, y)  # with gradients at entry: without any nothing is proven
        model.zero_grad()
        _mean(model, *_batch(5)).backward()
        with inject_oom(nth=n if seen is not None else 2**60, phase="backward") as armed:
            step(x, y)
        if seen is None:
            seen = armed.seen
            continue
        assert armed.fired == 1
        assert _close(_gradients(whole), _gradients(model)), n
        n += 1
    assert seen > 3
    assert "keeps gradients of the failed attempt" in caplog.text


def test_gradient_safety_off_raises_instead_of_guessing() -> None:
    """Dropout moved the random stream, no copy: refused, and it says what to do."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    F.cross_entropy(model(x), y).backward()

    @oomkit.auto_batch(gradient_safety="off")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    with inject_oom(nth=2**60, phase="backward") as armed:
        step(x, y)
    with inject_oom(nth=armed.seen, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match='gradient_safety="copy"'):
            step(x, y)


def test_forced_slices_are_the_slices_that_run() -> None:
    sizes: list[int] = []
    model = _model()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        sizes.append(len(x))
        _mean(model, x, y).backward()

    with force_slices([3, 2, 2]):
        step(*_batch(7))
    assert sizes == [3, 2, 2]
    step(*_batch(7))
    assert sizes == [3, 2, 2, 7]


def test_forced_slices_must_add_up() -> None:
    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None: ...

    with force_slices([3, 2]):
        with pytest.raises(oomkit.SplitError, match="add up to the batch of 7 rows"):
            step(torch.zeros(7))


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("case", list(CASES))
def test_whole_steps_equal_the_whole_batch(case: str, k: int) -> None:
    """zero_grad, backward, clip, update, twice: parameters and losses."""
    loss_of, options = CASES[case]
    outcome = []
    for slices in ([7], {2: [4, 3], 3: [3, 2, 2], 5: [2, 2, 1, 1, 1]}[k]):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @oomkit.auto_batch(**options)
        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_of(model, x, y)  # noqa: B023
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: B023
            optimizer.step()  # noqa: B023
            return loss.item()

        losses = []
        for _ in range(2):
            x, y = _batch(7)
            if case == "weighted":
                y[:3] = -100
            with force_slices(slices):
                losses.append(step(x, y))
        outcome.append((losses, [p.detach() for p in model.parameters()]))
    (whole_losses, whole), (split_losses, split) = outcome
    assert split_losses == pytest.approx(whole_losses, rel=TOLERANCE)
    assert _close(whole, split)
