"""What a split step changes besides: said once, from its code and from what was seen."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.effects_said import SAID
from helpers.effects_said import model as _model
from helpers.effects_said import said as _said
from torch import nn

import oomkit
from oomkit._code.bytecode import effects_of
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

counter = 0
stats = {"n": 0}


def _line(function: Callable[..., Any], offset: int) -> int:
    return function.__code__.co_firstlineno + offset


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Slotted:
    __slots__ = ("n", "unset")

    def __init__(self) -> None:
        self.n = 0


class Trainer:
    def __init__(self) -> None:
        self.model, self.optimizer = _model()
        self.global_step = 0
        self.loss: Any = None
        self.it = iter(range(1000))
        self.meter = Meter()
        self.history: list[float] = []
        self.shadow = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        global counter
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.global_step += 1  # line 6
        self.loss = loss.detach()
        counter += 1
        stats["n"] += 1
        next(self.it)  # line 10
        self.meter.update(loss.item())
        self.history.append(loss.item())
        for name, p in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()
        del stats["n"]
        stats["n"] = 5
        return loss.detach()

    step = oomkit.auto_batch(plain, accumulation_steps=2)
    late = oomkit.auto_batch(plain)


def test_the_code_and_what_was_seen_are_named_with_lines_once() -> None:
    trainer, x = Trainer(), torch.randn(8, 4)
    text = _said(trainer.step, x)
    assert text.startswith("oomkit: the batch of Trainer.plain is split")
    for offset, path in [
        (6, "self.global_step"),
        (7, "self.loss"),
        (8, "counter"),
        (9, "stats['n']"),
        (10, "next(self.it)"),
        (14, "self.shadow[...]"),
        (15, "del stats['n']"),
    ]:
        assert f"{path} (line {_line(Trainer.plain, offset)}" in text, (path, text)
    assert "0 -> 1" in text and "self.history (list of 0 -> 1)" in text
    assert "self.meter.count" in text or "more" in text
    assert "oomkit.current().is_last" in text
    assert _said(trainer.step, x) == "", "said once per site"


def test_it_is_said_when_an_oom_splits_and_not_before() -> None:
    trainer, x = Trainer(), torch.randn(8, 4)
    assert _said(trainer.late, x) == ""
    with inject_oom(nth=2, phase="backward") as armed:
        assert "self.global_step" in _said(trainer.late, x)
    assert armed.fired == 1
    assert _said(trainer.late, x) == ""


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.filterwarnings("error::oomkit.OomkitWarning")
def test_nothing_is_said_of_an_ordinary_step() -> None:
    model, optimizer = _model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    config = {"clip": 1.0, "names": ["a"]}
    lr = 0.05

    def helper(out: torch.Tensor) -> torch.Tensor:
        parts = {"mean": out.pow(2).mean()}
        parts["scaled"] = parts["mean"] * 1.0
        return parts["scaled"]

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, flag: bool = True) -> dict[str, Any]:
        model.training = True
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.param_groups[0]["lr"] = lr
        for p in model.parameters():
            p.grad = None
        loss = helper(model(x))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        model.requires_grad_(True)
        out = {}
        out["loss"] = loss.item()
        local = [loss.item()]
        local.append(1.0)
        it = iter(local)
        next(it)
        return out

    step(torch.randn(8, 4))


def test_nothing_is_said_where_the_step_asks_current() -> None:
    model, _ = _model()
    seen = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        global counter
        if oomkit.current().is_last:
            counter += 1
        seen.append(len(x))
        return model(x).detach()

    assert _said(step, torch.randn(8, 4)) == ""


def test_an_evaluation_that_counts_is_told_too() -> None:
    model, _ = _model()
    meter = Meter()

    @oomkit.auto_batch(accumulation_steps=2)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = model(x)
        meter.update(1.0)
        return out

    text = _said(evaluate, torch.randn(8, 4))
    assert f"self.count (update(), line {_line(Meter.update, 2)}" in text or "meter.count" in text


def test_a_tensor_of_the_closure_is_watched() -> None:
    """A running mean, and one in a helper."""
    model, _ = _model()
    centre, mean = torch.zeros(2), torch.zeros(2)

    def note(out: torch.Tensor) -> None:
        mean.lerp_(out.mean(0), 0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        out = model(x)
        out.sum().backward()
        note(out.detach())
        centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)

    text = _said(step, torch.randn(8, 4))
    assert "centre (tensor changed)" in text and "mean (tensor changed)" in text


class Decay:
    """A schedule of one's own, whose count is its class's until the first step."""

    n = 0

    def step(self) -> None:
        self.n += 1
        self._cached = self.n


def test_a_number_that_the_first_micro_batch_makes_is_watched() -> None:
    model, _ = _model()
    decay = Decay()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        decay.step()
        model.calls = getattr(model, "calls", 0) + 1

    text = _said(step, torch.randn(8, 4))
    assert "decay.n (1, made by it)" in text and "model.calls" in text
    assert "_cached" not in text


def test_containers_among_the_arguments_and_defaults_are_watched() -> None:
    model, _ = _model()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, stats: dict[str, int], kept: list[int] = []) -> None:  # noqa: B006
        stats["n"] += 1
        kept.append(1)
        model(x).sum().backward()

    own = {"n": 0}
    text = _said(step, torch.randn(8, 4), own)
    assert "stats['n'] (line" in text and "kept (list of 0 -> 1)" in text
    assert own["n"] == 2, "said, and run once per micro-batch"


def test_what_a_partial_binds_is_found_and_watched() -> None:
    trainer = Trainer()
    step = oomkit.auto_batch(functools.partial(Trainer.plain, trainer), accumulation_steps=2)
    assert "self.global_step" in _said(step, torch.randn(8, 4))
    step = oomkit.auto_batch(trainer.plain, accumulation_steps=2)
    assert "self.global_step" in _said(step, torch.randn(8, 4))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], None], str]] = {
    "list": (list, lambda o, x: o.append(1), "thing (list of 0 -> 1)"),
    "dict": (dict, lambda o, x: o.update(a=1), "thing (dict of 0 -> 1)"),
    "set": (set, lambda o, x: o.add(1), "thing (set of 0 -> 1)"),
    "deque": (deque, lambda o, x: o.append(1), "thing (deque of 0 -> 1)"),
    "value in a dict": (lambda: {"n": 1}, lambda o, x: o.update(n=2), "thing['n'] (1 -> 2)"),
    "value in a list": (lambda: [1], lambda o, x: o.__setitem__(0, 2), "thing[0] (1 -> 2)"),
    "slots": (Slotted, lambda o, x: setattr(o, "n", 3), "thing.n (0 -> 3)"),
    "list in a dict": (
        lambda: {"loss": []},
        lambda o, x: o["loss"].append(1),
        "thing['loss'] (list of 0 -> 1)",
    ),
    "objects in a list": (
        lambda: [Meter(), Meter()],
        lambda o, x: [meter.update(1.5) for meter in o],
        "thing[0].total (0.0 -> 1.5); thing[0].count (0 -> 1); thing[1].total (0.0 -> 1.5)",
    ),
    "objects in a tuple": (
        lambda: (Slotted(), Slotted()),
        lambda o, x: setattr(o[1], "n", 3),
        "thing[1].n (0 -> 3)",
    ),
    "tensor rebound": (
        lambda: {"w": torch.zeros(2)},
        lambda o, x: o.update(w=o["w"] + 1),
        "thing['w'] (tensor changed)",
    ),
    "tensor in place": (
        lambda: [torch.zeros(2)],
        lambda o, x: o[0].add_(1),
        "thing[0] (tensor changed)",
    ),
    "tensor data": (
        lambda: [torch.zeros(2)],
        lambda o, x: o[0].data.add_(1),
        "thing[0] (tensor changed)",
    ),
    "attribute of an attribute": (
        Trainer,
        lambda o, x: o.meter.update(1.5),
        "thing.meter.total (0.0 -> 1.5)",
    ),
    "attribute of a module": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        lambda o, x: setattr(o[0], "calls", getattr(o[0], "calls", 0) + 1) or setattr(o, "k", 1),
        "thing.0.calls (1, made by it)",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_that_the_names_lead_to_is_watched(name: str) -> None:
    make, change, expected = CHANGES[name]
    thing = make()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        change(thing, x)
        return x * 2

    text = _said(step, torch.randn(8, 4))
    assert expected in text


class Average:
    """Of the weights, as a callback has it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.table = {"calls": 0}
        self.still = [torch.ones(1)]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.table["calls"] += 1
        for mine, p in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(p, 0.1)


class Copied(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.copied = copy.deepcopy(model)
        self.calls = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.calls += 1
        for mine, p in zip(self.copied.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.1)


class Callback:
    def __init__(self, average: Any) -> None:
        self.average = average

    def end(self, model: nn.Module) -> None:
        self.average.update(model)


class Handler:
    def __init__(self, callback: Callback) -> None:
        self.callbacks = [callback]

    def call(self, what: str, model: nn.Module) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(model)


class Calling:
    def __init__(self, average: Callable[[nn.Module], Any], guarded: bool = False) -> None:
        self.model, self.optimizer = _model()
        self.handler, self.guarded = Handler(Callback(average(self.model))), guarded

    def plain(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        if not self.guarded or oomkit.current().is_last:
            self.handler.call("end", self.model)


teacher: Any = None


class Teaching:
    def __init__(self, trainer: Calling) -> None:
        self.model = trainer.model

    def target(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return teacher(x).sum(1, keepdim=True)

    def plain(self, x: torch.Tensor) -> None:
        (self.model(x) - self.target(x)).pow(2).mean().backward()


def test_what_a_callback_far_away_changes_is_told() -> None:
    trainer, x = Calling(Average), torch.randn(8, 4)
    text = _said(oomkit.auto_batch(Calling.plain, accumulation_steps=2), trainer, x)
    for part in ("shadow[0] (tensor changed)", "shadow[1] (", "table['calls'] (0 -> 1)"):
        assert f"Average.{part}" in text
    assert "still" not in text and "\0" not in text


def test_what_a_weak_reference_leads_to_is_told() -> None:
    kept = []

    def weak(model: nn.Module) -> Any:
        kept.append(Copied(model))
        return weakref.proxy(kept[0])

    trainer, x = Calling(weak), torch.randn(8, 4)
    other = weakref.ref(kept[0])
    trainer.handler.callbacks[0].end = lambda model: other().update(model)  # type: ignore[union-attr, method-assign]
    text = _said(oomkit.auto_batch(Calling.plain, accumulation_steps=2), trainer, x)
    assert "Copied.calls (0 -> 1)" in text
    assert "Linear.weight (tensor changed)" in text and "Linear.bias (" in text


def test_what_a_method_changes_in_a_model_that_it_alone_names_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Calling(Average)
    monkeypatch.setattr(sys.modules[__name__], "teacher", nn.BatchNorm1d(4))
    step = oomkit.auto_batch(Teaching(trainer).plain, accumulation_steps=2)
    text = _said(step, torch.randn(8, 4))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert f"BatchNorm1d.{name} (tensor changed)" in text


def test_a_callback_that_is_guarded_is_not_told() -> None:
    trainer = Calling(Average, guarded=True)
    step = oomkit.auto_batch(Calling.plain, accumulation_steps=2)
    assert _said(step, trainer, torch.randn(8, 4)) == ""
    assert trainer.handler.callbacks[0].average.table == {"calls": 1}


def test_a_counter_in_the_forward_of_a_module_is_told() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    model = nn.Sequential(Counting())

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    assert "model.0.calls (0 -> 1)" in _said(step, torch.randn(8, 4))


def test_properties_are_not_evaluated_and_nothing_is_kept() -> None:
    class Odd:
        evaluated = 0

        def __init__(self) -> None:
            self.big = torch.zeros(100_000)
            self.n = 0

        @property
        def costly(self) -> int:
            type(self).evaluated += 1
            return 1

        def __getattr__(self, name: str) -> int:
            type(self).evaluated += 1
            return 1

    died: list[bool] = []
    holder = [Odd()]
    odd = holder[0]

    def plain(x: torch.Tensor) -> torch.Tensor:
        old = weakref.ref(odd.big)
        odd.big = torch.ones(100_000)
        died.append(old() is None)
        return x * 2

    step = oomkit.auto_batch(plain, accumulation_steps=2)
    assert "odd.big" in _said(step, torch.randn(8, 4))
    assert Odd.evaluated == 0
    assert died == [True, True], "a tensor of the step was kept alive"
    gone = weakref.ref(holder.pop())
    plain.__closure__[[*plain.__code__.co_freevars].index("odd")].cell_contents = None
    gc.collect()
    assert gone() is None


def test_a_failure_to_look_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import oomkit._code.side_effects as module

    def broken(*_: object) -> None:
        raise ValueError("planted")

    for where in ("_functions", "_difference"):
        with monkeypatch.context() as patch, caplog.at_level("DEBUG", "oomkit"):
            patch.setattr(module, where, broken)
            caplog.clear()
            trainer = Trainer()
            step = oomkit.auto_batch(Trainer.plain, accumulation_steps=2)
            assert _said(step, trainer, torch.randn(8, 4)) == ""
        assert "could not be looked at" in caplog.text
        assert len(trainer.history) == 2
        assert not trainer.model._forward_hooks


def test_the_warning_as_an_error_takes_everything_back() -> None:
    model, optimizer = _model()
    before = [p.detach().clone() for p in model.parameters()]
    seen = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        seen.append(1)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(oomkit.OomkitWarning, match=SAID):
            step(torch.randn(8, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def _code(function: Any, **given: Any) -> list[str]:
    return [effect.what for effect in effects_of(function, given)]


def test_the_code_is_read_through_conditions_and_aliases() -> None:
    outer = 0
    table: dict[str, Any] = {}

    def step(self: Any, x: Any, source: Any) -> None:
        nonlocal outer
        self.a = x if x else None
        self.b += 1 if x else 2
        state = self.state
        state["k"], state["l"] = x, 3
        outer = outer + 1
        table["deep"][0] = x
        self.c.d = [v for v in x]
        self.flag = True
        self.e, local = x, 5
        del self.f
        del table["k"]
        try:
            self.g = x
        finally:
            self.h = x

        def inner() -> None:
            nonlocal local
            local += 1
            self.i = local

        y = next(source)
        y = next(iter(y), next(table["it"]))
        x = y
        x.attribute = 1 + local

    assert _code(step) == [
        "self.a",
        "self.b",
        "self.state['k']",
        "outer",
        "table['deep'][0]",
        "self.c.d",
        "self.e",
        "del self.f",
        "del table['k']",
        "self.g",
        "self.h",
        "next(source)",
        "next(table['it'])",
        "self.i",
    ]


class Base:
    def __init__(self) -> None:
        self.model, self.optimizer = _model()
        self.n = self.m = self.other = 0

    def count(self) -> None:
        self.n += 1

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        return x * 2


class Derived(Base):
    def count(self) -> None:
        self.m += 1

    def never(self) -> None:
        self.other += 1

    @oomkit.auto_batch(accumulation_steps=2)
    def step(self, x: torch.Tensor) -> torch.Tensor:
        super().count()
        return x * 2

    @oomkit.auto_batch(accumulation_steps=2)
    def explicit(self, x: torch.Tensor) -> torch.Tensor:
        super(Derived, self).count()  # noqa: UP008
        return x * 2

    both = oomkit.auto_batch(Base.plain, accumulation_steps=2)


@pytest.mark.parametrize("name", ["step", "explicit"])
def test_super_is_the_next_class_and_not_the_override(name: str) -> None:
    text = _said(getattr(Derived(), name), torch.randn(8, 4))
    assert f"self.n (count(), line {_line(Base.count, 1)}" in text
    assert "self.m" not in text and str(_line(Derived.count, 1)) not in text


def test_a_method_of_self_is_the_override() -> None:
    text = _said(Derived().both, torch.randn(8, 4))
    assert f"self.m (count(), line {_line(Derived.count, 1)}" in text
    assert "self.n" not in text
