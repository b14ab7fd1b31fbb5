"""A loss that is returned to a caller who runs backward: healthy, failing, split."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from zoo import SEED

import oomkit
from oomkit.testing import force_slices, inject_oom

B = 8


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(6, 12),
            torch.nn.BatchNorm1d(12) if norm else torch.nn.Identity(),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(12, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def world(dropout: float = 0.0, norm: bool = False) -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    model = Net(dropout, norm).double()
    return model, torch.randn(B, 6, dtype=torch.float64), torch.randint(0, 3, (B,))


def grads(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(
        (x is None and y is None)
        or (x is not None and y is not None and (x - y).abs().max().item() <= 1e-12)
        for x, y in zip(a, b, strict=True)
    )


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def loss_of(model: Net) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return compute


def plain(scale: Callable[[torch.Tensor], torch.Tensor] = lambda v: v) -> Any:
    model, x, y = world()
    scale(loss_of(model)(x, y)).backward()
    return grads(model)


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda v: v,
    "quarter": lambda v: v / 4,
    "square": lambda v: v**2,
    "log": lambda v: (v * 3).log(),
    "sum of two": lambda v: v + 2 * v.exp(),
    "in place": lambda v: v.div_(7),
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_healthy_call_is_the_undecorated_one(scale: str) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    loss = step(x, y)
    assert type(loss.grad_fn).__name__.startswith("NllLoss")
    SCALES[scale](loss).backward()
    assert same(grads(model), plain(SCALES[scale]))
    assert step.records[-1].ooms == 0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nth", range(1, 12))
def test_every_fault_of_the_callers_backward(scale: str, nth: int) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    loss = SCALES[scale](step(x, y))
    with inject_oom(nth=nth, phase="backward") as fault:
        loss.backward()
    assert close(grads(model), plain(SCALES[scale]))
    if fault.fired:
        assert step.records[-1].ooms == 1
        assert step.records[-1].micro_batch_size == B // 2
        assert step.records[-1].accumulation_steps == 2


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("k", [2, 3])
def test_a_call_that_is_split(scale: str, k: int) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
    whole = loss_of(model)(x, y).item()
    model.zero_grad()
    for _ in range(2):  # the second time the gradient is guessed right
        loss = step(x, y)
        assert abs(loss.item() - whole) <= 1e-12
        assert loss.requires_grad and not loss._is_view()
        assert all(p.grad is None for p in model.parameters())
        SCALES[scale](loss).backward()
        assert close(grads(model), plain(SCALES[scale]))
        model.zero_grad()


def _faulty(nth: int, phase: str) -> tuple[Any, Any, Any, bool, int]:
    model, x, y = world(dropout=0.5, norm=True)
    step = oomkit.auto_batch(loss_of(model))
    with inject_oom(nth=nth, phase=phase) as fault:
        step(x, y).backward()
    state = torch.get_rng_state()
    return grads(model), state, [*model.buffers()], fault.fired > 0, step.records[-1].ooms


def _undisturbed(slices: list[int]) -> tuple[Any, Any, Any]:
    model, x, y = world(dropout=0.5, norm=True)
    with force_slices(slices):
        oomkit.auto_batch(loss_of(model))(x, y).backward()
    return grads(model), torch.get_rng_state(), [*model.buffers()]


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_faults_equal_the_same_slices_bit_for_bit(phase: str) -> None:
    halves, whole = _undisturbed([4, 4]), _undisturbed([B])
    assert not same(halves[0], whole[0])
    nth = 1
    while True:
        got, state, buffers, fired, ooms = _faulty(nth, phase)
        if not fired:
            break
        # The few bytes of the root's own gradient are asked for once more: no replay.
        want = halves if ooms else whole
        assert same(got, want[0]), nth
        assert torch.equal(state, want[1]), nth
        assert all(torch.equal(a, b) for a, b in zip(buffers, want[2], strict=True)), nth
        nth += 1
    assert nth > 8


def test_the_users_own_accumulation() -> None:
    model, x, y = world()
    want_model, _, _ = world()
    for i in range(0, B, 2):
        (loss_of(want_model)(x[i : i + 2], y[i : i + 2]) / 4).backward()
    step = oomkit.auto_batch(loss_of(model))
    for i in range(0, B, 2):
        loss = step(x[i : i + 2], y[i : i + 2]) / 4
        with inject_oom(nth=4, phase="backward"):
            loss.backward()
    assert close(grads(model), grads(want_model))


def test_gradients_of_the_caller_stay_put_while_split() -> None:
    model, x, y = world()
    want = plain()
    seen = []
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    mine = [p.grad for p in model.parameters()]
    loss = step(x, y)
    seen = [p.grad is g for p, g in zip(model.parameters(), mine, strict=True)]
    assert all(seen) and all(torch.equal(g, torch.ones_like(g)) for g in mine if g is not None)
    loss.backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), mine, strict=True))
    assert close([g - 1 for g in mine if g is not None], want)


@pytest.mark.parametrize("k", [1, 2])
def test_zero_grad_between_call_and_backward(k: int) -> None:
    model, x, y = world()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loss = step(x, y)
    optimizer.zero_grad()
    with inject_oom(nth=3, phase="backward"):
        loss.backward()
    assert close(grads(model), plain())


def test_several_pending_losses() -> None:
    for k in (1, 2):
        for nth in (1, 3, 6, 9):
            model, x, y = world()
            step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
            a, b = step(x, y), step(x[:6], y[:6])
            total = a + 3 * b
            with inject_oom(nth=nth, phase="backward"):
                total.backward()
            want, _, _ = world()
            compute = loss_of(want)
            (compute(x, y) + 3 * compute(x[:6], y[:6])).backward()
            assert close(grads(model), grads(want)), (k, nth)


def test_the_first_of_two_losses_dropped() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    a, b = step(x, y), step(x, y)
    del a
    with inject_oom(nth=4, phase="backward"):
        b.backward()
    assert close(grads(model), plain())


@pytest.mark.parametrize("k", [1, 2])
def test_a_dropped_loss_frees_everything(k: int) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
    step(x, y).backward()
    model.zero_grad()
    alive = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        loss = step(x, y)
        del x
        if k == 2:
            assert alive() is not None  # its gradients may have to be computed again
        del loss
        assert alive() is None
    finally:
        gc.enable()


def test_a_row_per_sample() -> None:
    def compute(model: Net) -> Any:
        return lambda x, y: F.cross_entropy(model(x), y, reduction="none")

    weights = torch.linspace(0.1, 2, B, dtype=torch.float64)
    want_model, x, y = world()
    (compute(want_model)(x, y) * weights).mean().backward()
    for k in (1, 2, 3):
        for nth in (1, 2, 5, 8):
            model, x, y = world()
            step = oomkit.auto_batch(compute(model), accumulation_steps=k)
            losses = step(x, y)
            assert losses.shape == (B,)
            root = (losses * weights).mean()
            with inject_oom(nth=nth, phase="backward"):
                root.backward()
            assert close(grads(model), grads(want_model)), (k, nth)


def test_a_decorated_forward() -> None:
    """The result is the model's output; the caller computes the loss from it."""
    for k in (1, 2):
        model, x, y = world()
        forward = oomkit.auto_batch(model.forward, accumulation_steps=k)
        loss = F.cross_entropy(forward(x), y)
        with inject_oom(nth=6, phase="backward"):
            loss.backward()
        assert close(grads(model), plain())


class Trainer:
    def __init__(self, model: Net) -> None:
        self.model = model
        self.loss: torch.Tensor | None = None

    @oomkit.auto_batch
    def training_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.loss = loss
        return {"loss": loss, "double": (2 * loss).detach()}


def test_a_method_whose_object_keeps_the_loss() -> None:
    model, x, y = world()
    trainer = Trainer(model)
    for _ in range(2):
        model.zero_grad()
        with inject_oom(nth=4, phase="backward"):
            trainer.training_step({"x": x, "y": y})["loss"].backward()
        assert close(grads(model), plain())
    gone = weakref.ref(trainer)
    gc.collect()
    del trainer
    gc.collect()
    assert gone() is None


def test_the_record_has_the_rows_that_were_found() -> None:
    """Images in a list: before they are split, their channels are taken for the rows."""
    torch.manual_seed(SEED)
    model = torch.nn.Conv2d(3, 2, 3).double()

    @oomkit.auto_batch(verify=False)
    def compute(images: list[torch.Tensor], masks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        assert len(images) == len(masks)
        return torch.stack([model(image).mean() for image in images]).mean()

    images = [torch.randn(3, 4, 4 + i, dtype=torch.float64) for i in range(5)]
    loss = compute(images, [{"mask": torch.ones(1 + i)} for i in range(5)])
    with inject_oom(phase="backward"):
        loss.backward()

    (record,) = compute.records
    assert (record.batch_size, record.micro_batch_size, record.accumulation_steps) == (5, 3, 2)
