"""Schedulers, averaged models and scalers in a split step: stepped once, as by the whole batch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oomkit
from oomkit.testing import inject_oom

pytestmark = [  # runs of steps are counted; warnings are torch's own, of calls that are meant
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Seems like .optimizer.step... has been overridden"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step"),
]

SEED = 11
STEPS = 5


class DoubleMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _data(rows: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(SEED)
    return [
        (
            torch.randn(rows, 6, generator=g, dtype=torch.float64),
            torch.randn(rows, 3, generator=g, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def _run(
    k: int, build: Callable[[Any], Any], advance: Callable[[Any, Any, int], None], **options: Any
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Learning rates after each step, parameters at the end, and the scheduler."""
    torch.manual_seed(SEED)
    model = DoubleMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = build(optimizer)
    number = [0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        advance(scheduler, loss.detach(), number[0])
        return loss.detach()

    call: Any = step if k == 0 else oomkit.auto_batch(step, accumulation_steps=k, **options)
    rates = []
    for x, y in _data():
        call(x, y)
        number[0] += 1
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, [p.detach().clone() for p in model.parameters()], scheduler


def _close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all((x - y).abs().max() <= 1e-12 for x, y in zip(a, b, strict=True))


class Half(sched.LambdaLR):
    """A subclass, as people write them."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda n: 0.5**n)


@dataclass
class Box:
    inner: Any


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "chained": lambda o: sched.ChainedScheduler(
        [sched.ConstantLR(o, 0.5, 2), sched.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.1, 1.0, 2), sched.CosineAnnealingLR(o, 6)], milestones=[2]
    ),
    "lambda subclass": Half,
    "one cycle": lambda o: sched.OneCycleLR(o, max_lr=0.3, total_steps=8),
}


def _plain(scheduler: Any, loss: Any, number: int) -> None:
    scheduler.step()


@pytest.mark.parametrize("name", BUILDERS)
def test_schedulers_step_once(name: str) -> None:
    rates, params, _ = _run(0, BUILDERS[name], _plain)
    got_rates, got, _ = _run(3, BUILDERS[name], _plain)
    assert got_rates == rates and len(set(rates)) > 1
    assert _close(params, got)


class InPlace(sched.LRScheduler):
    """Its step() leaves the list of rates where it is."""

    def get_lr(self) -> list[Any]:
        return [0.5 * group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        if not hasattr(self, "_last_lr"):
            sched.LRScheduler.step(self)
            return
        self.last_epoch += 1
        for i, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self._last_lr[i] = self.get_lr()[i]


class Rewritten(sched.StepLR):
    """Stands for a class of torch that somebody has given another step()."""

    __module__ = sched.__name__
    step = InPlace.step  # type: ignore[assignment]
    get_lr = InPlace.get_lr


class Wrapped(sched.StepLR):
    """The same with what functools.wraps() makes, whose module is said to be torch's."""

    __module__ = sched.__name__

    @functools.wraps(sched.StepLR.step)
    def step(self, *args: Any) -> None:  # type: ignore[override]
        sched.StepLR.step(self, *args)


def _patched(optimizer: Any) -> Any:
    scheduler = sched.StepLR(optimizer, 1, 0.5)
    step = scheduler.step
    scheduler.step = lambda: step()  # type: ignore[method-assign]
    return scheduler


WHOLE: dict[str, Callable[[Any], Any]] = {
    **BUILDERS,
    "step": lambda o: sched.StepLR(o, 1, 0.5),
    "lambda": lambda o: sched.LambdaLR(o, lambda n: 0.5**n),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=0),
    "warm restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3),
    "with a step of its own": _patched,
    "wrapped": lambda o: Wrapped(o, 1, 0.5),
    "sequence of others": lambda o: sched.SequentialLR(o, [InPlace(o), InPlace(o)], [50]),
    "rewritten": lambda o: Rewritten(o, 1),
}
PLAIN = {"one cycle", "step", "plateau", "warm restarts"}
"""Whatever these have done can be taken back."""


def _values(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_a_scheduler_that_has_stepped_is_stepped_once(name: str, fails: bool) -> None:
    """In the caller's own try only those are intercepted that could not be taken back."""
    torch.manual_seed(SEED)
    model = DoubleMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    scheduler, plain = WHOLE[name](optimizer), WHOLE[name](other)
    intercepted: Seen[bool] = Seen()

    def advance(one: Any) -> None:
        one.step(1.0) if name == "plateau" else one.step()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        intercepted.append(type(vars(scheduler).get("step", 0)).__name__ == "_Interceptor")
        advance(scheduler)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, (x, y) in enumerate(_data()[:3]):
        advance(plain)
        if fails and number == 2:
            oom = inject_oom(phase="backward")
            ends = nullcontext() if name in PLAIN else pytest.raises(oomkit.PartialUpdate)
            with oom, ends:
                step(x, y)
            assert oom.fired
        else:
            step(x, y)
        assert _values(optimizer) == _values(other)
        assert scheduler.state_dict().get("last_epoch") == plain.state_dict().get("last_epoch")
    assert intercepted[:3] == [name not in {*PLAIN, "lambda"}] * 3


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("how", ["asked", "after an error", "each fails"])
def test_runs_that_prove_a_split_step_no_scheduler(name: str, how: str) -> None:
    torch.manual_seed(SEED)
    model = DoubleMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler, plain = WHOLE[name](optimizer), WHOLE[name](other)

    def advance(one: Any) -> None:
        one.step(1.0) if name == "plateau" else one.step()

    @oomkit.auto_batch(accumulation_steps=2 if how == "asked" else 1)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(scheduler)

    for number, (x, y) in enumerate(_data()):
        with warnings.catch_warnings():  # the plain one has no optimizer that steps
            warnings.simplefilter("ignore")
            advance(plain)
        if how == "each fails" or (how == "after an error" and number == 1):
            with inject_oom(phase="backward"):
                step(x, y)
        else:
            step(x, y)
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        assert scheduler.state_dict().get("last_epoch") == plain.state_dict().get("last_epoch")


class Counts:
    """A function that gives another factor each time that it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, _: int) -> float:
        self.asked += 1
        return 0.5**self.asked


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", ["lambda", "cyclic"])
def test_a_function_that_counts_is_not_asked_again_for_the_same_epoch(kind: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    counts = Counts()
    scheduler: Any = (
        sched.LambdaLR(optimizer, counts)
        if kind == "lambda"
        else sched.CyclicLR(optimizer, 0.1, 0.2, scale_fn=counts, cycle_momentum=False)
    )

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        scheduler.step(0)
        (x @ optimizer.param_groups[0]["params"][0]).mean().backward()
        optimizer.step()

    step(torch.ones(4, 3))
    asked = counts.asked
    with inject_oom(phase="backward") as oom, pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(4, 3))
    assert oom.fired
    assert counts.asked == asked + 1


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_method_of_a_scheduler_that_somebody_has_replaced_is_not_called_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is torch's, and so is its step(): what that calls may count all the same."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler = sched.StepLR(optimizer, 1, 0.5)
    counts = Counts()

    def get_lr(_: Any = None) -> list[float]:
        return [counts(0) for _ in optimizer.param_groups]

    monkeypatch.setattr(scheduler if where == "instance" else sched.StepLR, "get_lr", get_lr)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        scheduler.step()
        (x @ optimizer.param_groups[0]["params"][0]).mean().backward()
        optimizer.step()

    step(torch.ones(4, 3))
    with inject_oom(phase="backward") as oom, pytest.raises(oomkit.PartialUpdate):
        step(torch.ones(4, 3))
    assert oom.fired
    assert counts.asked == 2
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("how", ["loaded", "set"])
def test_rates_that_no_scheduler_has_moved_do_not_end_the_call(how: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler = sched.StepLR(optimizer, 1, 0.5)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if how == "loaded":
            scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        else:
            scheduler._last_lr = [0.1]
        (x @ optimizer.param_groups[0]["params"][0]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    with inject_oom(phase="backward") as oom:
        step(torch.ones(4, 3))
    assert oom.fired
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.05)


@pytest.mark.parametrize("where", ["list", "dict", "dataclass", "nested"])
def test_schedulers_in_containers_step_once(where: str) -> None:
    def build(o: Any) -> Any:
        s = Half(o)
        return {"list": [s], "dict": {"s": s}, "dataclass": Box(s), "nested": Box([{"s": [s]}])}[
            where
        ]

    def advance(kept: Any, loss: Any, number: int) -> None:
        if where == "list":
            kept[0].step()
        elif where == "dict":
            kept["s"].step()
        elif where == "dataclass":
            kept.inner.step()
        else:
            kept.inner[0]["s"][0].step()

    rates, params, _ = _run(0, build, advance)
    got_rates, got, _ = _run(3, build, advance)
    assert got_rates == rates and len(set(rates)) > 1
    assert _close(params, got)


def test_warm_restarts_with_a_fraction_of_an_epoch() -> None:
    def build(o: Any) -> Any:
        return sched.CosineAnnealingWarmRestarts(o, 3)

    def advance(s: Any, loss: Any, number: int) -> None:
        s.step(number + number / 7)

    rates, params, _ = _run(0, build, advance)
    got_rates, got, _ = _run(3, build, advance)
    assert got_rates == rates and _close(params, got)


def test_an_epoch_counted_in_the_step_is_refused() -> None:
    count = [0]

    def advance(s: Any, loss: Any, number: int) -> None:
        count[0] += 1
        s.step(count[0])

    with pytest.raises(
        oomkit.SplitError, match="a different argument in each micro-batch"
    ) as caught:
        _run(2, lambda o: sched.CosineAnnealingWarmRestarts(o, 3), advance)
    assert any("had been applied" in note for note in caught.value.__notes__)


class Watching(sched.ReduceLROnPlateau):
    """Keeps what it is given."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, patience=0, factor=0.5)
        self.seen: list[Any] = []

    def step(self, metrics: Any, epoch: Any = None) -> None:
        self.seen.append(metrics)
        super().step(metrics, epoch)


METRICS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "float": lambda loss: loss.item(),
    "one element": lambda loss: loss.reshape(1),
    "numpy": lambda loss: loss.numpy(),
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("named", [False, True])
def test_plateau_gets_the_metric_of_the_whole_batch(kind: str, named: bool) -> None:
    def advance(s: Any, loss: Any, number: int) -> None:
        metric = METRICS[kind](loss)
        s.step(metrics=metric) if named else s.step(metric)

    rates, params, whole = _run(0, Watching, advance)
    got_rates, got, split = _run(3, Watching, advance)
    assert got_rates == rates and _close(params, got)
    assert len(whole.seen) == len(split.seen) == STEPS
    for a, b in zip(whole.seen, split.seen, strict=True):
        assert abs(float(a) - float(b)) <= 1e-12
    assert (whole.num_bad_epochs, whole.last_epoch) == (split.num_bad_epochs, split.last_epoch)
    if kind in ("tensor", "float", "one element"):
        assert type(split.seen[0]) is type(whole.seen[0])
    if kind == "one element":
        assert split.seen[0].shape == (1,)


def test_an_equal_metric_is_the_very_value() -> None:
    metric = 0.1 + 0.2  # three times a third of it is another number
    tensor = torch.tensor(0.7)

    def advance(s: Any, loss: Any, number: int) -> None:
        s.step(metric if number else tensor, epoch=number)

    _, _, split = _run(3, Watching, advance)
    assert split.seen[0] is tensor and split.seen[1] is metric


def test_a_metric_is_weighted_as_the_loss_is() -> None:
    weights = {3: 1.0, 2: 4.0}
    seen: list[float] = []

    def advance(s: Any, loss: Any, number: int) -> None:
        seen.append(loss.item())
        s.step(loss)

    _, _, split = _run(3, Watching, advance, weight=lambda batch: weights[len(batch[0])])
    total = 1.0 + 4.0 + 4.0
    expected = (seen[0] * 1.0 + seen[1] * 4.0 + seen[2] * 4.0) / total
    assert abs(float(split.seen[0]) - expected) <= 1e-12


@pytest.mark.parametrize(
    ("options", "metric", "match"),
    [
        ({"reduction": "sum"}, lambda loss: loss, "cannot be computed"),
        ({}, lambda loss: int(loss > 0), "is an integer"),
        ({}, lambda loss: (loss > 0).sum(), "is an integer"),
    ],
)
def test_a_metric_that_is_no_mean_is_refused_before_the_update(
    options: dict[str, Any], metric: Any, match: str
) -> None:
    kept: list[Any] = []

    def build(o: Any) -> Any:
        kept.append([p.detach().clone() for p in o.param_groups[0]["params"]])
        kept.append(o)
        return Watching(o)

    with pytest.raises(oomkit.SplitError, match=match):
        _run(2, build, lambda s, loss, number: s.step(metric(loss)), **options)
    now = [p.detach() for p in kept[1].param_groups[0]["params"]]
    assert all(torch.equal(a, b) for a, b in zip(kept[0], now, strict=True))


def test_a_plateau_in_the_last_micro_batch_alone_sees_what_it_is_given() -> None:
    def advance(s: Any, loss: Any, number: int) -> None:
        if oomkit.current().is_last:
            s.step(123)

    _, _, split = _run(3, Watching, advance)
    assert split.seen == [123] * STEPS


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_plateau_is_rolled_back_and_stepped_once_after_an_oom(phase: str) -> None:
    def run(fault: bool) -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(SEED)
        model = DoubleMLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = Watching(optimizer)

        @oomkit.auto_batch(optimizer_safety="copy")
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            scheduler.step(loss.detach())
            optimizer.step()

        x, y = _data()[0]
        if fault:
            with inject_oom(nth=1, times=2, phase=phase) as armed:
                step(x, y)
            assert armed.fired == 2
        else:
            step(x, y)
        state = {k: v for k, v in scheduler.state_dict().items() if k != "seen"}
        return state, [float(scheduler.best)]

    whole, whole_best = run(False)
    split, split_best = run(True)
    assert split.pop("best") == pytest.approx(whole.pop("best"), abs=1e-12)
    assert split == whole and split_best == pytest.approx(whole_best, abs=1e-12)


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_models_are_updated_once(kind: str) -> None:
    def run(k: int) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
        model.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"use_buffers": True}
        if kind == "ema":
            options["multi_avg_fn"] = get_ema_multi_avg_fn(0.9)
        averaged = AveragedModel(model, **options)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            averaged.update_parameters(model)

        call: Any = step if k == 0 else oomkit.auto_batch(step, accumulation_steps=k)
        for x, y in _data():
            call(x, y)
        assert int(averaged.n_averaged) == STEPS
        return [t.detach().clone() for t in averaged.state_dict().values()]

    assert _close([t.double() for t in run(0)], [t.double() for t in run(3)])


@pytest.mark.parametrize("inf_at", [None, 2])
def test_a_cpu_scaler_with_unscale_and_clip(inf_at: int | None) -> None:
    """`if scaler.get_scale() >= before` leaves the scheduler out when the update was skipped."""

    def run(k: int) -> tuple[list[torch.Tensor], float, list[float]]:
        torch.manual_seed(SEED)
        model = DoubleMLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = Half(optimizer)
        averaged = AveragedModel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        rates = []

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            averaged.update_parameters(model)

        call: Any = step if k == 0 else oomkit.auto_batch(step, accumulation_steps=k)
        for number, (x, y) in enumerate(_data()):
            if number == inf_at:
                x = x.clone()
                x[-1] = float("inf")
            call(x, y)
            rates.append(optimizer.param_groups[0]["lr"])
        params = [p.detach().clone() for p in model.parameters()]
        return params, scaler.get_scale(), rates

    params, scale, rates = run(0)
    got, got_scale, got_rates = run(3)
    assert _close(params, got) and (scale, rates) == (got_scale, got_rates)
    assert len(set(rates)) == (STEPS if inf_at is None else STEPS - 1)


def test_copies_made_inside_a_split_step_are_ordinary() -> None:
    import pickle

    torch.manual_seed(SEED)
    model = DoubleMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Half(optimizer)
    copies: list[Any] = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if oomkit.current().is_last:
            copies.append(copy.deepcopy(model))
            copies.append(copy.deepcopy((optimizer, scheduler)))
            copies.append(pickle.loads(pickle.dumps(model)))
            copies[0].zero_grad()
        scheduler.step()

    step(*_data()[0])
    copied, (opt, sch), loaded = copies
    assert "zero_grad" not in vars(copied) and "zero_grad" not in vars(model)
    assert "step" not in vars(sch) and "state_dict" not in vars(sch)
    for clone in (copied, loaded):
        assert type(clone.zero_grad).__name__ == "method" and clone.zero_grad.__self__ is clone
        before = [p.grad for p in model.parameters()]
        clone(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
        assert all(p.grad is not None for p in clone.parameters())
        clone.zero_grad()
        assert all(p.grad is None for p in clone.parameters())
        assert [p.grad for p in model.parameters()] == before or all(
            a is b for a, b in zip(before, [p.grad for p in model.parameters()], strict=True)
        )
    epoch = scheduler.last_epoch
    opt.step()
    sch.step()
    assert scheduler.last_epoch == epoch
    copy.deepcopy(copied), copy.deepcopy(sch)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("name", ["lambda", "multiplicative", "sequence"])
def test_an_error_before_the_update_does_not_say_that_it_was_made(
    name: str, fails_at: int, phase: str
) -> None:
    torch.manual_seed(SEED)
    model = DoubleMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = {
        "lambda": lambda o: sched.LambdaLR(o, lambda n: 0.9**n),
        "multiplicative": lambda o: sched.MultiplicativeLR(o, lambda n: 0.9),
        "sequence": lambda o: sched.SequentialLR(o, [sched.StepLR(o, 1), sched.StepLR(o, 1)], [9]),
    }[name](optimizer)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        scheduler.step()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for x, y in _data()[:fails_at]:
        step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = _data()[fails_at]
    with (
        inject_oom(nth=2, phase=phase),
        pytest.raises(oomkit.PartialUpdate, match="stepped and before the update: the scheduler"),
    ):
        step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scheduler.last_epoch == fails_at + 1
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_warm_restarts_by_fractions_of_an_epoch(k: int) -> None:
    def build(optimizer: Any) -> Any:
        return sched.CosineAnnealingWarmRestarts(optimizer, 2)

    def advance(scheduler: Any, loss: torch.Tensor, number: int) -> None:
        scheduler.step(number / 4)

    expected, found = _run(0, build, advance), _run(k, build, advance)
    assert found[0] == expected[0]
    assert _close(found[1], expected[1])
    assert found[2].T_cur == expected[2].T_cur


def test_what_is_returned_of_warm_restarts_is_what_the_scheduler_has() -> None:
    found = []
    for k in (1, 3):
        torch.manual_seed(SEED)
        model = DoubleMLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = sched.CosineAnnealingWarmRestarts(optimizer, 2)

        @oomkit.auto_batch(accumulation_steps=k)
        def step(x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
            optimizer.zero_grad()  # noqa: B023
            F.mse_loss(model(x), y).backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            scheduler.step((number + 1) / 4)  # noqa: B023
            return scheduler.T_cur  # noqa: B023

        found.append([step(x, y, number) for number, (x, y) in enumerate(_data())])
    assert found[1] == found[0]
