"""Whole steps as people write them: every one equal, split or recovered, to the whole batch."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

Step = Callable[..., Any]


def _data(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _zero_first(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        o.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        o.step()
        return loss.item()

    return step


def _zero_last(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        o.zero_grad(set_to_none=True)
        return loss

    return step


def _zero_in_place(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        o.step()
        o.zero_grad(set_to_none=False)
        return {"loss": loss.detach(), "rows": len(x)}

    return step


def _scheduler(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    sched = LambdaLR(o, lambda s: 1.0 / (1 + s))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        o.step()
        sched.step()

    extra["last_epoch"] = lambda: sched.last_epoch
    return step


def _scaler(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        o.zero_grad()
        loss = F.cross_entropy(m(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(o)
        clip_grad_norm_(m.parameters(), 0.5)
        scaler.step(o)
        scaler.update()
        return loss.item()

    extra["scale"] = scaler.get_scale
    extra["tracker"] = scaler._get_growth_tracker
    return step


def _autocast(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        o.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(m(x), y)
        loss.backward()
        o.step()
        return loss.item()

    return step


def _checkpoint(reentrant: bool) -> Callable[..., Step]:
    def make(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            o.zero_grad()
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(checkpoint(m, x, use_reentrant=reentrant), y)
            loss.backward()
            o.step()
            return loss.item()

        return step

    return make


def _two_backwards(m: nn.Module, o: torch.optim.Optimizer, extra: Any) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        o.zero_grad()
        out = m(x)
        first = F.cross_entropy(out, y)
        second = out.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        o.step()
        return first.item() + second.item()

    return step


STEPS: dict[str, Callable[..., Step]] = {
    "zero_first": _zero_first,
    "zero_last": _zero_last,
    "zero_in_place": _zero_in_place,
    "scheduler": _scheduler,
    "scaler": _scaler,
    "autocast": _autocast,
    "checkpoint_reentrant": _checkpoint(True),
    "checkpoint": _checkpoint(False),
    "two_backwards": _two_backwards,
}


def _run(
    name: str, fault: dict[str, Any] | None, decorate: bool = True, **options: Any
) -> tuple[nn.Module, list[Any], dict[str, Any], Any]:
    x, y = _data()
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra: dict[str, Any] = {}
    step = STEPS[name](model, optimizer, extra)
    if decorate:
        step = oomkit.auto_batch(step, **options)
    armed = None
    results = []
    for i in range(3):
        if fault is not None and i == 1:
            with inject_oom(**fault) as armed:
                results.append(step(x, y))
        else:
            results.append(step(x, y))
    return model, results, {k: v() for k, v in extra.items()}, armed


def _numbers(result: Any) -> list[float]:
    if result is None:
        return []
    if isinstance(result, dict):
        return [float(v) for v in result.values()]
    return [result.item() if isinstance(result, torch.Tensor) else result]


def _tolerance(name: str) -> float:
    return 2e-2 if name == "autocast" else 1e-5


@pytest.mark.parametrize("name", list(STEPS))
def test_split_is_the_whole_batch(name: str) -> None:
    whole = _run(name, None, decorate=False)
    split = _run(name, None, accumulation_steps=2)
    for a, b in zip(whole[0].parameters(), split[0].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=_tolerance(name), atol=_tolerance(name))
    for a, b in zip(whole[1], split[1], strict=True):
        assert type(a) is type(b)
        assert _numbers(a) == pytest.approx(_numbers(b), rel=_tolerance(name))
    assert whole[2] == split[2]


@pytest.mark.parametrize("name", list(STEPS))
def test_recovered_is_the_whole_batch(name: str) -> None:
    """A fault in the second step, at five places of each phase, before anything is applied."""
    whole = _run(name, None, decorate=False)
    for phase in ("forward", "backward"):
        armed = _run(name, {"nth": 2**60, "phase": phase})[3]
        for n in sorted({1 + i * (armed.seen - 1) // 4 for i in range(5)}):
            try:
                got = _run(name, {"nth": n, "phase": phase})
            except oomkit.OutOfMemory as error:
                assert error.committed, (phase, n)
                continue
            assert got[3].fired == 1
            for a, b in zip(whole[0].parameters(), got[0].parameters(), strict=True):
                assert torch.allclose(a, b, rtol=_tolerance(name), atol=_tolerance(name)), (
                    phase,
                    n,
                )
            assert whole[2] == got[2]


@pytest.mark.parametrize("name", list(STEPS))
def test_decorated_without_oom_is_bitwise_plain(name: str) -> None:
    plain = _run(name, None, decorate=False)
    decorated = _run(name, None)
    for a, b in zip(plain[0].parameters(), decorated[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert [_numbers(r) for r in plain[1]] == [_numbers(r) for r in decorated[1]]


def test_healthy_call_returns_the_very_object() -> None:
    kept: list[Any] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> Any:
        kept.append((x, {"out": x * 2}))
        return kept[-1][1]

    x = torch.ones(4)
    assert step(x) is kept[0][1]
    assert kept[0][0] is x


def test_evaluation_keeps_finished_parts() -> None:
    seen: Seen[int] = Seen()

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * 2 + 1

    x = torch.arange(16.0).reshape(16, 1)
    with torch.no_grad():
        with inject_oom(nth=1):
            first = evaluate(x)
        assert seen == [16, 8, 8]
        with inject_oom(nth=2**60) as counted:
            evaluate(x)
        del seen[3:]
        with inject_oom(nth=counted.seen // 2 + 1):  # the second half's first allocation
            second = evaluate(x)
    assert seen[3:] == [8, 8, 4, 4]
    assert torch.equal(first, x * 2 + 1) and torch.equal(second, x * 2 + 1)


def test_an_evaluation_that_draws_numbers_keeps_no_part() -> None:
    """A roll-back takes the stream to the entry: the rest would draw what a part had drawn."""

    def run(nth: int, k: int) -> tuple[torch.Tensor, int, list[int]]:
        seen: Seen[int] = Seen()

        @oomkit.auto_batch(accumulation_steps=k)
        def evaluate(x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return x + torch.rand(len(x), 1)

        torch.manual_seed(0)
        with torch.no_grad(), inject_oom(nth=nth) as armed:
            out = evaluate(torch.zeros(16, 1))
        return out, armed.seen, seen

    expected, _, slices = run(2**60, 4)
    assert slices == [4, 4, 4, 4]
    _, allocations, _ = run(2**60, 2)
    got, _, seen = run(allocations // 2 + 1, 2)  # the first of the second part
    assert seen == [8, 8, *slices]
    assert torch.equal(expected, got) and len(set(got.flatten().tolist())) == 16


def test_python_and_numpy_streams_are_rolled_back() -> None:
    drawn: Seen[tuple[float, float]] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append((random.random(), float(np.random.rand())))
        return x + 1

    random.seed(1)
    np.random.seed(1)
    x = torch.zeros(4, 1)
    with torch.no_grad(), inject_oom(nth=1):
        step(x)
    assert drawn[0] == drawn[1] != drawn[2]


def test_generator_among_the_globals_is_rolled_back() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn: Seen[torch.Tensor] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand((), generator=generator))
        return x + 1

    x = torch.zeros(4, 1)
    with torch.no_grad(), inject_oom(nth=2):
        step(x)
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("base", [object, nn.Module], ids=["trainer", "agent"])
def test_methods_find_the_model_on_self(base: type) -> None:
    class Trainer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = MLP()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.calls = 0

        @oomkit.auto_batch
        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            """Train once."""
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

    torch.manual_seed(0)
    trainer = Trainer()
    x, y = _data()
    with inject_oom(nth=2, phase="backward") as armed:
        trainer.step(x, y)
    assert armed.fired == 1
    assert Trainer.step.records[0].accumulation_steps == 2
    assert Trainer.step.__doc__ == "Train once."
    assert Trainer.step.__name__ == "step"
    assert all(p.grad is not None for p in trainer.model.parameters())


def test_a_deleted_model_is_freed() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    holder = {"model": model, "optimizer": optimizer}

    @oomkit.auto_batch
    def step(m: nn.Module, o: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        o.step()

    x, y = _data()
    step(holder["model"], holder["optimizer"], x, y)
    with inject_oom(nth=2, phase="backward"):
        step(holder["model"], holder["optimizer"], x, y)
    dead = [weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(optimizer)]
    before = oomkit.memory("cpu").allocated
    del model, optimizer
    holder.clear()
    gc.collect()
    assert [ref() for ref in dead] == [None, None, None]
    assert oomkit.memory("cpu").allocated < before


def test_nested_steps_are_one_transaction() -> None:
    sizes: Seen[int] = Seen()
    outer_sizes: Seen[int] = Seen()

    @oomkit.auto_batch
    def inner(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x + 1

    @oomkit.auto_batch
    def outer(x: torch.Tensor) -> torch.Tensor:
        outer_sizes.append(len(x))
        return inner(x)

    x = torch.zeros(4, 1)
    with torch.no_grad(), inject_oom(nth=1):
        out = outer(x)
    assert sizes == outer_sizes == [4, 2, 2]
    assert not inner.records
    assert torch.equal(out, torch.ones(4, 1))


def test_replay_sees_nothing_of_the_failed_attempt() -> None:
    """Bytes alive when the replay starts equal those at entry, with the collector off."""
    model = MLP()
    seen: Seen[int] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append(oomkit.memory("cpu").allocated or 0)
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()

    x, y = _data()
    step(x, y)
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with inject_oom(nth=3, phase="backward") as armed:
            step(x, y)
    finally:
        gc.enable()
    assert armed.fired == 1
    assert seen[2] == seen[1]
