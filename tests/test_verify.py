"""verify=: a micro-batch beside its own halves, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seen import Seen
from torch import nn
from zoo import MLP, SEED, difference, make_world, same, whole_step

import oomkit
from oomkit.testing import force_slices, inject_oom

ROWS = 8


@pytest.fixture(autouse=True)
def _said_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        warnings.filterwarnings("ignore", message=".* runs once per micro-batch")
        yield


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    caplog.set_level(logging.DEBUG, logger="oomkit")
    return lambda level: [
        r.getMessage() for r in caplog.records if r.levelno == level and "verif" in r.getMessage()
    ]


def _batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED + rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _model(*more: nn.Module) -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(MLP(), *more)


def _clip(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Every row against every other: in-batch negatives."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = F.normalize(model(x), dim=1)
        b = F.normalize(model(x.flip(1)), dim=1)
        return F.cross_entropy(a @ b.T * 5, torch.arange(len(a)))

    return loss


def _mean(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def _sum(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="sum")


def _whole(loss: Callable[..., torch.Tensor]) -> Callable[..., None]:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss(x, y).backward()

    return step


@pytest.mark.parametrize("style", ["backward", "step"])
@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (_mean, {}, None),
        (_sum, {"reduction": "sum"}, None),
        (_sum, {}, r'looks like a sum over samples: pass reduction="sum"'),
        (_mean, {"reduction": "sum"}, r'looks like a mean over samples: pass reduction="mean"'),
        (_clip, {}, r"couples the samples of a batch \(contrastive.*pass weight="),
    ],
    ids=["mean", "sum", "forgotten-sum", "wrong-sum", "contrastive"],
)
@pytest.mark.parametrize("slices", [[4, 4], [3, 3, 2]], ids=str)
def test_the_verdict(
    make: Callable[..., Any],
    options: dict[str, Any],
    said: str | None,
    style: str,
    slices: list[int],
    lines: Callable[[int], list[str]],
) -> None:
    model = _model()
    if style == "backward":  # on by itself
        step = oomkit.auto_batch(make(model), backward=True, model=model, **options)
    else:
        step = oomkit.auto_batch(_whole(make(model)), verify=True, model=model, **options)
    with force_slices(slices):
        if said is None:
            step(*_batch())
            assert len(lines(logging.INFO)) == 1
        else:
            with pytest.warns(oomkit.OomkitWarning, match=said) as caught:
                step(*_batch())
            assert len(caught) == 1
            assert "relative difference" in str(caught[0].message)
        step(*_batch())  # once
    assert len(lines(logging.INFO)) == (said is None)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 2),
        ({"verify": True}, 5),
        ({"verify": False, "backward": True}, 2),
        ({"backward": True}, 5),
        ({"backward": True, "verify": None}, 5),
        ({"backward": True, "weight": lambda batch: 1}, 2),
        ({"backward": True, "weight": lambda batch: len(batch[0]), "verify": True}, 5),
        ({"backward": True, "rng": "none"}, 2),
    ],
)
def test_when_it_runs(options: dict[str, Any], calls: int) -> None:
    model = _model()
    sizes: Seen[int] = Seen()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        value = F.cross_entropy(model(x), y)
        if "backward" not in options:
            value.backward()
        return value

    step = oomkit.auto_batch(loss, model=model, **options)
    step(*_batch())
    assert sizes == [8]  # never while whole
    sizes.clear()
    with force_slices([5, 3]):
        step(*_batch())
    assert sizes == [5, 3, 5, 3, 2][:calls]
    sizes.clear()
    with force_slices([5, 3]):
        step(*_batch())
    assert sizes == [5, 3]


@pytest.mark.parametrize("given", [1, "yes"])
def test_verify_must_be_a_switch(given: object) -> None:
    with pytest.raises(TypeError, match=r"auto_batch\(verify=...\) expected True, False or None"):
        oomkit.auto_batch(verify=given)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_it_leaves_the_state_as_it_was(kind: str, optimizer: str) -> None:
    """Parameters, buffers, gradients, random streams and updates: bit for bit."""
    states = []
    for verify in (False, True):
        world = make_world(kind, optimizer=optimizer, steps=2)
        step = oomkit.auto_batch(whole_step(world), verify=verify)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oomkit.OomkitWarning)  # BatchNorm
            for batch in world.batches:
                with force_slices([4, 4]):
                    world.losses.append(step(batch))
        world.gradients = [[p.grad for p in world.model.parameters()]]
        states.append(world.state())
    assert same(*states), difference(*states)


def test_gradients_random_streams_and_participants_are_put_back() -> None:
    """The function clears, clips and scales gradients, draws, and updates a metric."""

    class Meter:
        def __init__(self) -> None:
            self.values: list[int] = []

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    outcome = []
    for verify in (False, True):
        model = _model(nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        meter = Meter()
        random.seed(SEED)
        torch.manual_seed(SEED)

        @oomkit.auto_batch(verify=verify, participants=meter, backward=None)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)  # noqa: B023
            loss = F.cross_entropy(model(x), y) * (1 + random.random())  # noqa: B023
            meter.values.append(len(x))  # noqa: B023
            scaler.scale(loss).backward()  # noqa: B023
            scaler.unscale_(optimizer)  # noqa: B023
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: B023
            scaler.step(optimizer)  # noqa: B023
            scaler.update()  # noqa: B023
            scheduler.step()  # noqa: B023

        x, y = torch.ones(ROWS, 6), torch.zeros(ROWS, dtype=torch.int64)
        F.cross_entropy(model(x), y).backward()
        with force_slices([4, 4]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*compared coarsely")
            step(x, y)
        outcome.append(
            {
                "parameters": [p.detach().clone() for p in model.parameters()],
                "gradients": [p.grad.clone() for p in model.parameters() if p.grad is not None],
                "rng": torch.get_rng_state(),
                "random": random.random(),
                "meter": meter.values,
                "lr": scheduler.get_last_lr(),
                "epoch": scheduler.last_epoch,
                "scale": scaler.get_scale(),
                "step": "step" in vars(optimizer) and type(vars(optimizer)["step"]).__name__,
            }
        )
    assert same(*outcome), difference(*outcome)
    assert outcome[1]["meter"] == [4, 4]


def test_noise_makes_it_coarse(lines: Callable[[int], list[str]]) -> None:
    model = _model(nn.Dropout(0.1))
    step = oomkit.auto_batch(_mean(model), backward=True, model=model)
    with force_slices([4, 4]):
        step(*_batch())
    (line,) = lines(logging.INFO)
    assert "compared coarsely, since random numbers are drawn" in line


def test_a_sum_is_seen_through_noise() -> None:
    model = _model(nn.Dropout(0.1), nn.BatchNorm1d(3))
    step = oomkit.auto_batch(_sum(model), backward=True, model=model)
    with force_slices([4, 4]), pytest.warns(oomkit.OomkitWarning) as said:
        step(*_batch())
    (text,) = [str(w.message) for w in said if "training mode" not in str(w.message)]
    assert "random numbers are drawn and batch statistics are in use" in text
    assert 'pass reduction="sum"' in text


@pytest.mark.parametrize("coupled", [False, True])
def test_outputs_of_an_evaluation_row_by_row(
    coupled: bool, lines: Callable[[int], list[str]]
) -> None:
    model = _model()

    @torch.no_grad()
    def predict(x: torch.Tensor) -> dict[str, Any]:
        y = model(x)
        return {"logits": y - y.mean(0) if coupled else y, "classes": y.argmax(1), "name": "a"}

    step = oomkit.auto_batch(predict, model=model, verify=True)
    with force_slices([4, 4]):
        if coupled:
            match = r"result\['logits'\] depends on the other rows"
            with pytest.warns(oomkit.OomkitWarning, match=match):
                step(_batch()[0])
        else:
            step(_batch()[0])
            assert len(lines(logging.INFO)) == 1


def test_a_loss_that_is_mostly_rounding_is_not_judged(lines: Callable[[int], list[str]]) -> None:
    """Normalised advantages: their mean is zero but for rounding."""
    weight = nn.Parameter(torch.ones(()))

    @oomkit.auto_batch(backward=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        return weight * (1e-9 * len(x) ** 2 + 0 * x.sum())

    with force_slices([4, 4]):
        loss(torch.ones(ROWS))
    assert not lines(logging.INFO)


def test_weights_are_asked_for_the_halves(lines: Callable[[int], list[str]]) -> None:
    model = _model()
    x, y = _batch()
    y[:3] = -100

    @oomkit.auto_batch(weight=lambda batch: ((batch[1] != -100).sum(), 1), verify=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        model(x).pow(2).mean().backward()

    with force_slices([4, 4]):
        step(x, y)
    assert len(lines(logging.INFO)) == 1


@pytest.mark.parametrize("slices", [[1] * 8, [8]], ids=str)
def test_one_row_or_no_split_is_not_verified(
    slices: list[int], lines: Callable[[int], list[str]]
) -> None:
    model = _model()
    step = oomkit.auto_batch(_clip(model), backward=True, model=model)
    with force_slices(slices):
        step(*_batch())
    assert not lines(logging.INFO)


def test_halves_keep_to_multiple_of() -> None:
    model = _model()
    sizes: Seen[int] = Seen()

    @oomkit.auto_batch(verify=True, multiple_of=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()

    with force_slices([6, 2]):
        step(*_batch())
    assert sizes == [6, 2, 6, 4, 2]


@pytest.mark.parametrize("run", [0, 1, 2])
@pytest.mark.parametrize("error", ["oom", "value"])
def test_an_error_inside_is_passed_over(
    run: int, error: str, lines: Callable[[int], list[str]]
) -> None:
    """At each of the three runs; the gradients are those of the step."""
    model = _model()
    calls: Seen[int] = Seen()

    @oomkit.auto_batch(verify=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        calls.append(1)
        loss = F.cross_entropy(model(x), y)
        torch.rand(3)
        if len(calls) == 3 + run:
            raise torch.OutOfMemoryError("here") if error == "oom" else ValueError("here")
        loss.backward()
        return loss.item()

    with force_slices([4, 4]):
        torch.manual_seed(SEED)
        assert step(*_batch()) > 0
    assert len(calls) == 3 + run
    assert ["here" in line for line in lines(logging.DEBUG)] == [True]
    assert all(p.grad is not None for p in model.parameters())
    state = torch.get_rng_state()
    torch.manual_seed(SEED + ROWS)
    torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,)), torch.rand(3), torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())


def test_every_allocation_of_it_may_fail(lines: Callable[[int], list[str]]) -> None:
    expected = None
    n = 0
    while True:
        model = _model()
        step = oomkit.auto_batch(_whole(_mean(model)), verify=True, model=model)
        with force_slices([4, 4]), inject_oom(nth=n or 2**60, phase="recovery") as armed:
            try:
                step(*_batch())
            except oomkit.OutOfMemory:
                assert armed.fired == 1  # before the step had begun
        if step.records[-1].ooms == 0 and step.records[-1].outcome == "finished":
            gradients = [p.grad for p in model.parameters()]
            expected = expected or gradients
            assert same(expected, gradients), n
        if n == 0:
            last = armed.seen
        if n == last:
            break
        n += 1
    assert last > 10
    assert len(lines(logging.DEBUG)) > 10  # those that struck the verification itself


def test_keyboard_interrupt_passes() -> None:
    model = _model()
    calls = 0

    @oomkit.auto_batch(verify=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        F.cross_entropy(model(x), y).backward()

    with force_slices([4, 4]), pytest.raises(KeyboardInterrupt):
        step(*_batch())
    assert all(p.grad is not None for p in model.parameters())
    step(*_batch())  # works again


def test_a_batch_changed_in_place_is_not_run_again(lines: Callable[[int], list[str]]) -> None:
    model = _model()

    @oomkit.auto_batch(verify=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.div_(2)
        F.cross_entropy(model(x), y).backward()

    x, y = _batch()
    half = x / 2
    with force_slices([4, 4]):
        step(x, y)
    assert torch.equal(x, half)
    assert not lines(logging.INFO)


def test_current_is_not_the_last_during_it() -> None:
    model = _model()
    last: list[bool] = []

    @oomkit.auto_batch(verify=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        last.append(oomkit.current().is_last)
        F.cross_entropy(model(x), y).backward()

    with force_slices([4, 4]):
        step(*_batch())
    assert last == [False, True, False, False, False]


def test_it_runs_after_a_real_recovery(lines: Callable[[int], list[str]]) -> None:
    model = _model()
    step = oomkit.auto_batch(_mean(model), backward=True, model=model)
    batch = _batch()
    with inject_oom(nth=2) as armed:
        step(*batch)
    assert armed.fired == 1
    assert step.records[0].accumulation_steps == 2
    assert len(lines(logging.INFO)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_nothing_alive(fails: bool) -> None:
    model = _model()
    batch = _batch()
    calls = 0

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = F.cross_entropy(model(x), y)
        if fails and calls % 4 == 0:
            raise ValueError(value)
        return value

    def verified(count: int) -> tuple[int, int]:
        for _ in range(count):
            step = oomkit.auto_batch(loss, backward=True, model=model)
            with force_slices([4, 4]):
                step(*batch)
            nonlocal calls
            assert calls == (4 if fails else 5)
            calls = 0
        gc.collect()
        return oomkit.memory("cpu").allocated or 0, len(gc.get_objects())

    logging.getLogger("oomkit").setLevel(logging.ERROR)  # pytest keeps every record
    try:
        verified(20)
        assert verified(100) == verified(100)
    finally:
        logging.getLogger("oomkit").setLevel(logging.NOTSET)


def test_the_largest_slice_may_be_any(lines: Callable[[int], list[str]]) -> None:
    """Updates are held back wherever it stands."""
    outcome = []
    for verify in (False, True):
        world = make_world("mlp")
        step = oomkit.auto_batch(whole_step(world), verify=verify)
        with force_slices([2, 5, 1]):
            world.losses.append(step(world.batches[0]))
        outcome.append(world.state())
    assert same(*outcome), difference(*outcome)
    assert len(lines(logging.INFO)) == 1


def test_copies_of_buffers_that_stay_are_freed() -> None:
    model = _model()
    model.register_buffer("table", torch.zeros(1 << 16))
    step = oomkit.auto_batch(_whole(_mean(model)), verify=True, model=model)
    with force_slices([4, 4]):
        step(*_batch())
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.ndim == 1]
    assert sum(len(tensor) == 1 << 16 for tensor in tensors) == 1
