"""Losses returned to a caller: autocast, scalers, threads, streams, participants, records."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import SEED

import oomkit
from deferred.test_returned import B, Net, close, grads, loss_of, plain, same, world
from oomkit.testing import force_slices, inject_oom


def test_autocast_has_begun_when_backward_comes() -> None:
    """The call had none: its replay has none either."""

    def run(nth: int) -> list[torch.Tensor | None]:
        torch.manual_seed(SEED)
        model = Net()
        x, y = torch.randn(B, 6), torch.randint(0, 3, (B,))
        step = oomkit.auto_batch(loss_of(model))
        if nth == 0:
            with force_slices([4, 4]):
                step(x, y).backward()
            return grads(model)
        loss = step(x, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with inject_oom(nth=nth, phase="backward") as armed:
                loss.backward()
        assert armed.fired == 1
        return grads(model)

    assert same(run(3), run(0))


def test_autocast_has_ended_when_backward_comes() -> None:
    def run(nth: int) -> list[torch.Tensor | None]:
        torch.manual_seed(SEED)
        model = Net()
        x, y = torch.randn(B, 6), torch.randint(0, 3, (B,))
        step = oomkit.auto_batch(loss_of(model))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if nth == 0:
                with force_slices([4, 4]):
                    loss = step(x, y)
            else:
                loss = step(x, y)
        with inject_oom(nth=nth or 10_000, phase="backward"):
            loss.backward()
        return grads(model)

    want = run(0)
    for nth in (2, 4, 7):
        assert same(run(nth), want)


def test_grad_scaler() -> None:
    for k in (1, 2):
        model, x, y = world()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
        other, _, _ = world()
        other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            loss = scaler.scale(step(x, y))
            with inject_oom(nth=2 + i, phase="backward"):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
            other_optimizer.zero_grad()
            loss_of(other)(x, y).backward()
            other_optimizer.step()
        assert scaler.get_scale() == 8 * 1024.0
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p - q).abs().max() <= 1e-12


@pytest.mark.parametrize("k", [1, 2])
def test_half_precision_is_never_scaled(k: int) -> None:
    """Eager gradients in fp16, computed with another gradient, are computed again."""

    def run(step: Any, scale: float) -> list[torch.Tensor | None]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = step(x, y)
        (loss * scale).backward()
        return grads(model)

    torch.manual_seed(SEED)
    model = Net()
    x, y = torch.randn(B, 6) * 1e-4, torch.randint(0, 3, (B,))
    scale = 2.0**14
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
    with force_slices([4, 4]):
        want = run(oomkit.auto_batch(loss_of(model)), scale)  # computed again, too
        for half in (slice(0, 4), slice(4, 8)):
            assert x[half].shape == (4, 6)
    whole = run(loss_of(model), scale)
    got = run(step, scale)
    assert same(got, want if k == 2 else whole)
    assert same(run(step, scale), got)  # guessed right: the very gradients, the same values
    for a, b in zip(got, whole, strict=True):
        assert a is not None and b is not None
        assert (a - b).abs().max() <= 4e-3 * b.abs().max()


def test_gradients_set_aside() -> None:
    """No copy of the gradients that were there: leaves that have everything keep it."""
    want = plain()
    for nth in range(2, 12):
        model, x, y = world()
        step = oomkit.auto_batch(loss_of(model), gradient_safety="off")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = step(x, y)
        with inject_oom(nth=nth, phase="backward"):
            loss.backward()
        assert close([g - 1 for g in grads(model) if g is not None], want), nth


def test_a_hook_on_the_loss() -> None:
    want = plain(lambda v: v * 6)
    for k in (1, 2):
        model, x, y = world()
        loss = oomkit.auto_batch(loss_of(model), accumulation_steps=k)(x, y)
        loss.register_hook(lambda g: g * 3)
        with inject_oom(nth=5, phase="backward"):
            loss.backward(torch.tensor(2.0, dtype=torch.float64))
        assert close(grads(model), want), k


class Count:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_what_the_call_did_to_participants_counts_once() -> None:
    model, x, y = world()
    rows, outside = Count(), Count()

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows.n += len(x)
        outside.n += len(x)
        return F.cross_entropy(model(x), y)

    loss = oomkit.auto_batch(compute, participants=[rows, outside])(x, y)
    outside.n += 100  # between the call and its backward
    with inject_oom(nth=4, phase="backward"):
        loss.backward()
    assert rows.n == B and outside.n == B + 100


def test_streams_and_buffers_that_others_use_meanwhile() -> None:
    """Others drew numbers and normalised between the call and its backward: that stays."""
    model, x, y = world(dropout=0.5, norm=True)
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    model(x + 1)
    torch.randn(7)
    state, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    with pytest.warns(oomkit.OomkitWarning, match="training mode"):
        with inject_oom(nth=6, phase="backward"):
            loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


class Drawing:
    """A participant whose state nothing but itself finds, and that draws when it goes back."""

    def __init__(self, broken_from: int = 1000) -> None:
        self.hidden, self.broken_from = ctypes.c_long(0), broken_from

    def add(self) -> None:
        setattr(self.hidden, "value", self.count() + 1)  # noqa: B010

    def count(self) -> int:
        return int(getattr(self.hidden, "value"))  # noqa: B009

    def save(self) -> int:
        return self.count()

    def restore(self, saved: int) -> None:
        if self.count() >= self.broken_from:
            raise RuntimeError("broken")
        torch.rand(1)
        setattr(self.hidden, "value", saved)  # noqa: B010


def _participant_of_a_replay(
    one: Drawing,
) -> tuple[torch.Tensor, list[torch.Tensor | None], nn.Module]:
    """Its loss; streams and buffers, which others have used since."""
    model, x, y = world(dropout=0.5, norm=True)

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one.add()
        return F.cross_entropy(model(x), y)

    loss = oomkit.auto_batch(compute, participants=[one])(x, y)
    model(x + 1)
    torch.randn(7)
    return loss, [torch.get_rng_state(), *(b.clone() for b in model.buffers())], model


def test_a_participant_goes_back_before_the_streams() -> None:
    one = Drawing()
    loss, stands, model = _participant_of_a_replay(one)
    with pytest.warns(oomkit.OomkitWarning, match="training mode"):
        with inject_oom(nth=6, phase="backward") as armed:
            loss.backward()
    assert armed.fired == 1 and one.count() == 1
    assert same([torch.get_rng_state(), *model.buffers()], stands)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_does_not_go_back_keeps_no_other_from_it() -> None:
    one = Drawing(broken_from=2)
    loss, stands, model = _participant_of_a_replay(one)
    with pytest.warns(oomkit.OomkitWarning, match="training mode"):
        with inject_oom(nth=6, phase="backward"), pytest.raises(RuntimeError, match="broken"):
            loss.backward()
    assert same([torch.get_rng_state(), *model.buffers()], stands)


def test_modes_that_the_call_has_left_stay_where_no_replay_fits() -> None:
    model, x, y = world()

    @oomkit.auto_batch(ladder=())
    def ends_in_eval(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.eval()
        return loss

    loss = ends_in_eval(x, y)
    with inject_oom(nth=4, times=None, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="micro-batch of 1 of 8 rows"):
            loss.backward()
    assert not any(module.training for module in model.modules())


def test_the_record_has_the_peak_of_the_backward() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    loss = step(x, y)
    first = step.records[-1].peak_allocated
    loss.backward()
    assert len(step.records) == 1
    assert first is not None and step.records[-1].peak_allocated is not None
    assert step.records[-1].peak_allocated > first


def test_backward_in_another_thread() -> None:
    import threading

    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    loss = step(x, y)

    def work() -> None:
        with inject_oom(nth=4, phase="backward"):
            loss.backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert close(grads(model), plain())


def test_threads_with_losses_of_their_own() -> None:
    import threading

    results: list[bool] = []
    want = plain()
    barrier = threading.Barrier(2)

    def work() -> None:
        for _ in range(10):
            barrier.wait()
            model, x, y = shared[threading.current_thread().name]
            model.zero_grad()
            step = oomkit.auto_batch(loss_of(model), accumulation_steps=2)
            step(x, y).backward()
            results.append(close(grads(model), want))

    shared = {"a": world(), "b": world()}
    threads = [threading.Thread(target=work, name=name) for name in shared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def test_nested_decorated_functions() -> None:
    model, x, y = world()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compute = oomkit.auto_batch(loss_of(model))

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        compute(x, y).backward()

    for nth in (2, 5, 9):
        with inject_oom(nth=nth):
            step(x, y)
        assert close(grads(model), plain())
    assert compute.records == ()


def test_retain_graph() -> None:
    want_model, x, y = world()
    loss = loss_of(want_model)(x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    for k in (1, 2):
        model, x, y = world()
        loss = oomkit.auto_batch(loss_of(model), accumulation_steps=k)(x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        assert close(grads(model), grads(want_model))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_fp16_beside_a_scaler_is_said_once(
    half: bool, returned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the whole batch's sum overflows, those of its parts may not: no way to be equal."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            return F.cross_entropy(model(x), y)

    def whole(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(compute(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

    part: Any = compute if returned else whole
    step = oomkit.auto_batch(
        part, accumulation_steps=2, model=model, optimizer=optimizer, participants=[scaler]
    )
    with caplog.at_level("WARNING", logger="oomkit"):
        for _ in range(2):
            loss = step(x, y)
            if loss is not None:
                scaler.scale(loss).backward()
    assert sum("overflows fp16" in r.getMessage() for r in caplog.records) == half
