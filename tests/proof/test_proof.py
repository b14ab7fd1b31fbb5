"""The proof of a split: what it leaves behind, what it says, when it is made, what it may cost."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.sample import places
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.testing import force_slices, inject_oom

SEED = 20
ROWS = 8


def _model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


def _batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Linear(6, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _double(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _batch(rows)
    return x.double(), y


def _run(form: str, cleared: bool, call: Callable[..., Any]) -> list[Any]:
    """Two calls of a step; everything that they leave."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes: Seen[int] = Seen()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if cleared:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if form == "returned":
            return loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = call(step, form, model)
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state(), *losses]
    state = [s[k] for s in optimizer.state.values() for k in sorted(s)]
    return [t.detach().clone() for t in [*tensors, *state]] + [len(sizes)]


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("form", ["step", "returned"])
def test_it_leaves_nothing_behind(form: str, cleared: bool) -> None:
    """Dropout, statistics, gradients at entry: bit for bit what the same slices leave alone."""

    def calls(step: Any, form: str) -> list[torch.Tensor]:
        losses = []
        for _ in range(2):
            losses.append(step(*_batch()))
            if form == "returned":
                losses[-1].backward()
        return losses

    def forced(step: Any, form: str, model: nn.Module) -> list[torch.Tensor]:
        decorated = oomkit.auto_batch(step, model=model)
        with force_slices([4, 4]):
            return calls(decorated, form)

    def proven(step: Any, form: str, model: nn.Module) -> list[torch.Tensor]:
        return calls(oomkit.auto_batch(step, model=model, accumulation_steps=2), form)

    want, got = _run(form, cleared, forced), _run(form, cleared, proven)
    assert want.pop() == 4 < got.pop()  # the proof ran
    for one, two in zip(want, got, strict=True):
        assert torch.equal(one, two)


def test_gradients_of_the_entry_are_the_same_tensors_again() -> None:
    model, _ = _linear()
    before = [torch.ones_like(p) for p in model.parameters()]
    for p, g in zip(model.parameters(), before, strict=True):
        p.grad = g

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    x, y = _double()
    whole = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    step(x, y)
    for p, g, added in zip(model.parameters(), before, whole, strict=True):
        assert p.grad is g
        torch.testing.assert_close(g, 1 + added, rtol=0, atol=1e-12)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "proved the split" in r.getMessage()]


@pytest.mark.parametrize(("verify", "times"), [(None, 1), (True, 2), ("warn", 1), (False, 0)])
def test_how_often(verify: Any, times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each structure of the batch; with True for each shape."""
    caplog.set_level(logging.INFO, logger="oomkit")
    model, _ = _linear()

    @oomkit.auto_batch(accumulation_steps=2, verify=verify, model=model)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    for width in (1, 1, 2):
        step(torch.randn(ROWS, width, 6, dtype=torch.float64))
    assert len(_lines(caplog)) == times


def test_another_structure_and_another_course_are_proven_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    model, optimizer = _linear()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(batch: dict[str, torch.Tensor], update: bool) -> None:
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        if update:
            optimizer.step()

    x, y = _double()
    for batch, update, proofs in (
        ({"x": x}, True, 1),
        ({"x": x}, True, 1),
        ({"x": x}, False, 2),
        ({"x": x}, True, 2),
        ({"x": x, "y": y}, True, 3),
    ):
        step(batch, update)
        assert len(_lines(caplog)) == proofs


def test_a_bad_value_is_refused_at_the_decoration() -> None:
    with pytest.raises(TypeError, match="expected True, False, \"warn\" or None, got 'maybe'"):
        oomkit.auto_batch(lambda x: x, verify="maybe")


def _pairs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    one, two = model(x).chunk(2)
    return -F.logsigmoid(one - two).mean()


@pytest.mark.refusals
def test_what_couples_is_refused_before_the_update() -> None:
    model, optimizer = _linear()
    before = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        _pairs(model, x).backward()
        optimizer.step()

    x, _ = _double()
    with inject_oom(nth=2) as fault, pytest.raises(oomkit.SplitError) as caught:
        step(x)
    assert fault.fired == 1
    assert "weight of Linear" in str(caught.value) and "couples the samples" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state


def test_a_warning_in_its_place() -> None:
    model, optimizer = _linear()

    @oomkit.auto_batch(accumulation_steps=2, verify="warn")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        _pairs(model, x).backward()
        optimizer.step()

    with pytest.warns(oomkit.OomkitWarning, match="is split .verify=.*, but not exactly"):
        step(_double()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(_double()[0])  # said once
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("reduction", "declared", "advice"),
    [("mean", "sum", 'reduction="mean"'), ("sum", "mean", 'reduction="sum"')],
)
def test_what_was_declared_is_not_replaced(reduction: Any, declared: Any, advice: str) -> None:
    model, _ = _linear()

    @oomkit.auto_batch(accumulation_steps=2, reduction=declared)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y, reduction=reduction).backward()

    with pytest.raises(oomkit.SplitError) as caught:
        step(*_double())
    assert advice in str(caught.value)


def test_an_out_of_memory_error_inside_it_is_a_failure_like_any_other() -> None:
    """Each allocation of the proof and of the call behind it fails once."""
    for nth in places(4):
        model, optimizer = _linear()
        twin, other = _linear()

        @oomkit.auto_batch(accumulation_steps=2)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()  # noqa: B023
            F.cross_entropy(model(x), y).backward()  # noqa: B023
            optimizer.step()  # noqa: B023

        x, y = _double()
        with inject_oom(nth=nth, phase="forward") as fault:
            step(x, y)
        other.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        other.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        if not fault.fired:
            break
    assert nth > 10


def test_an_interrupt_inside_it_passes_and_takes_the_call_back() -> None:
    model, optimizer = _linear()
    runs: Seen[int] = Seen()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        runs.append(len(x))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if len(runs) == 2:
            raise KeyboardInterrupt
        loss.backward()
        optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        step(*_double())
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    assert model.training and "train" not in vars(model)
    step(*_double())
    assert len(optimizer.state) == 2


def test_modules_are_in_eval_for_it_alone() -> None:
    model = _model()
    modes: Seen[tuple[bool, ...]] = Seen()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.train()
        modes.append(tuple(m.training for m in model))
        F.cross_entropy(model(x), y).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oomkit.OomkitWarning)
        step(*_batch())
    quiet = (True, False, True, False, True)
    assert modes[:3] == [quiet] * 3 and modes[-2:] == [(True,) * 5] * 2
    assert all(m.training and "train" not in vars(m) for m in model)


def _masked(x: torch.Tensor, training: bool) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(*x.shape) > 0.5) if training else x


@pytest.mark.parametrize("by_numpy", [False, True])
def test_weights_are_found_where_a_step_begins_with_train_and_draws_by_itself(
    by_numpy: bool,
) -> None:
    """As attention does, outside of every dropout module. In eval mode nothing is drawn: that is
    needed where parts cannot be given the numbers."""
    model, _ = _linear()
    modes: Seen[bool] = Seen()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor, num_items_in_batch: int) -> None:
        model.train()
        modes.append(model.training)
        x = _masked(x, model.training) if by_numpy else F.dropout(x, 0.5, model.training)
        F.cross_entropy(model(x), y).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oomkit.OomkitWarning)
        step(*_double(), ROWS)  # a mean, whatever the argument says: else SplitError
    assert (False in modes) == by_numpy and modes[-2:] == [True, True]
    assert model.training and "train" not in vars(model)


def test_a_loss_that_cancels_to_rounding_is_nothing_to_compare() -> None:
    """As that of a policy which has generated its own text: the mean of advantages is 0."""
    torch.manual_seed(SEED)
    model = nn.Linear(6, 1)
    x = _batch()[0]
    gains = torch.tensor([0.7, -0.4, 0.1, -0.4, 0.3, -0.5, 0.9, -0.7]) + 1e-8

    @oomkit.auto_batch(accumulation_steps=2, verify=True)
    def loss(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        values = model(x).squeeze(1)
        return -((values - values.detach()).exp() * gains).mean()

    for seed in range(20):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        loss(x[order], gains[order]).backward()
    whole = -((model(x).squeeze(1) * gains).mean())
    (expected,) = torch.autograd.grad(whole, [model.weight])
    torch.testing.assert_close(model.weight.grad, 20 * expected, rtol=1e-4, atol=1e-6)


def test_a_batch_that_the_step_changes_in_place() -> None:
    model, _ = _linear()
    x = _double()[0]
    original = x.clone()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        x.div_(4)
        model(x).square().mean().backward()

    step(x)
    assert torch.equal(x, original / 4)
    whole = torch.autograd.grad(model(original / 4).square().mean(), list(model.parameters()))
    for p, g in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=1e-12)


class Count:
    """A counter of rows and the calls that added to it, as a metric of one's own."""

    def __init__(self) -> None:
        self.rows, self.calls, self.total = 0, [0], torch.zeros(())

    def add(self, x: torch.Tensor) -> None:
        self.rows += len(x)
        self.calls.append(len(x))
        self.total += len(x)


def test_it_counts_nothing() -> None:
    model, _ = _linear()
    count = Count()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        count.add(x)
        model(x).square().mean().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oomkit.OomkitWarning)  # it runs twice, of course
        step(_double()[0])
    assert (count.rows, count.calls, float(count.total)) == (ROWS, [0, 4, 4], ROWS)


def test_outputs_of_an_evaluation_are_compared() -> None:
    @oomkit.auto_batch(accumulation_steps=2)
    def centred(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    with torch.no_grad(), pytest.raises(oomkit.SplitError, match="result of the joined parts"):
        centred(_double()[0])


def test_a_time_in_the_result_is_not_compared() -> None:
    model, _ = _linear()
    clock = Seen([0.0])

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> dict[str, Any]:
        clock.append((clock[-1] ** 2 + 1.0) % 1e6)  # it runs often
        loss = model(x).square().mean()
        loss.backward()
        return {"loss": loss.detach(), "at": clock[-1] % 7.0}

    step(_double()[0])


def test_one_row_that_fits_alone_is_compared_without_a_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    model, _ = _linear()

    def step(x: torch.Tensor, coupled: bool) -> None:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = model(x)
        (F.cross_entropy(out @ out.T, torch.arange(len(x))) if coupled else out.mean()).backward()

    oomkit.auto_batch(step)(_double()[0], False)
    told = [r.getMessage() for r in caplog.records]
    assert sum("gradients were not compared" in text for text in told) == 1
    assert not _lines(caplog)
    with pytest.raises(
        oomkit.SplitError, match="not the weighted mean of the losses of its parts .2 rows"
    ):
        oomkit.auto_batch(step)(_double()[0], True)
