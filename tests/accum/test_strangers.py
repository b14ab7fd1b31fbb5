"""Leaves that no search finds are found in the graph of the first split backward."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


def _deep(value: Any) -> Any:
    """Where no search looks."""
    return {"a": {"b": {"c": deque([value])}}}


def _x() -> torch.Tensor:
    torch.manual_seed(SEED)
    return torch.randn(8, 6, dtype=torch.float64)


def _whole(plain: Any, leaves: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    plain(x)
    grads = [p.grad.clone() for p in leaves]
    for p in leaves:
        p.grad = None
    return grads


def _close(a: list[torch.Tensor], leaves: list[torch.Tensor]) -> bool:
    return all((x - p.grad).abs().max() <= 1e-12 for x, p in zip(a, leaves, strict=True))


@pytest.mark.parametrize("how", ["split", "forward", "backward"])
@pytest.mark.parametrize("kind", ["model", "leaf", "both"])
def test_found_in_the_graph(kind: str, how: str) -> None:
    model = MLP().double()
    leaf = torch.ones(6, dtype=torch.float64, requires_grad=True)
    registry = _deep((model, leaf))
    forwards: Seen[Any] = Seen()

    def step(x: torch.Tensor) -> None:
        m, p = registry["a"]["b"]["c"][0]
        forwards.append(len(x))
        x = x * p if kind != "model" else x
        loss = m(x).pow(2).mean() if kind != "leaf" else x.pow(2).mean()
        loss.backward()

    leaves = [*(model.parameters() if kind != "leaf" else ()), *([leaf] if kind != "model" else ())]
    x = _x()
    expected = _whole(step, leaves, x)
    decorated = oomkit.auto_batch(step, accumulation_steps=2 if how == "split" else 1)
    forwards.clear()
    if how == "split":
        decorated(x)
        assert forwards == [4, 4, 4]  # the first one twice
    else:
        with inject_oom(nth=1, phase=None if how == "forward" else "backward") as armed:
            decorated(x)
        assert armed.fired == 1
    assert _close(expected, leaves)
    forwards.clear()
    for p in leaves:
        p.grad = None
    decorated(x)  # known from now on
    assert forwards == [4, 4]
    assert _close(expected, leaves)


def test_every_place_of_an_oom_is_exact_or_refused_by_name() -> None:
    model = MLP().double()
    registry = _deep(model)

    def step(x: torch.Tensor) -> None:
        registry["a"]["b"]["c"][0](x).pow(2).mean().backward()

    x, leaves = _x(), list(model.parameters())
    expected = _whole(step, leaves, x)
    with inject_oom(nth=2**60) as counted:
        oomkit.auto_batch(step)(x)
    refused = 0
    for n in range(1, counted.seen + 1, 3):
        for p in leaves:
            p.grad = None
        with inject_oom(nth=n):
            try:
                oomkit.auto_batch(step)(x)
            except oomkit.OutOfMemory as error:
                assert "did not find has a gradient" in str(error)
                refused += 1
                continue
        assert _close(expected, leaves), n
    assert refused > 0
    assert refused < counted.seen / 3


def test_a_gradient_from_before_a_failed_backward_is_refused() -> None:
    """An earlier backward of the failed attempt may have added to it: nobody marked it."""
    first, second = MLP().double(), MLP().double()
    registry = _deep(second)

    @oomkit.auto_batch(model=first)
    def step(x: torch.Tensor) -> None:
        registry["a"]["b"]["c"][0](x).pow(2).mean().backward()
        first(x).pow(2).mean().backward()

    x = _x()
    with inject_oom(nth=2**60, phase="backward") as counted:
        step(x)
    first.zero_grad()
    second.zero_grad()
    with inject_oom(nth=counted.seen, phase="backward"):
        with pytest.raises(
            oomkit.SplitError, match="has a gradient that may contain a part"
        ) as caught:
            step(x)
    assert "pass model=" in str(caught.value)
    assert all(p.grad is None for p in first.parameters())


def test_found_in_the_second_backward() -> None:
    first, second = MLP().double(), MLP().double()
    registry = _deep(second)

    def step(x: torch.Tensor) -> None:
        first(x).pow(2).mean().backward()
        registry["a"]["b"]["c"][0](x).pow(2).mean().backward()

    leaves = [*first.parameters(), *second.parameters()]
    x = _x()
    expected = _whole(step, leaves, x)
    oomkit.auto_batch(step, model=first, accumulation_steps=4)(x)
    assert _close(expected, leaves)


def test_leaves_made_in_the_step_are_left_alone() -> None:
    model = MLP().double().eval()
    forwards: Seen[int] = Seen()

    class Attack:
        loss: torch.Tensor | None = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            forwards.append(len(x))
            x = x.clone().requires_grad_()
            loss = model(x).pow(2).mean()
            self.loss = loss  # keeps the graph, and through it the leaf
            loss.backward()
            return x.grad.sign()

    attack = Attack()
    leaves, x = list(model.parameters()), _x()
    expected = _whole(attack.step, leaves, x)
    forwards.clear()
    decorated = oomkit.auto_batch(attack.step, accumulation_steps=2)
    for _ in range(2):
        for p in leaves:
            p.grad = None
        decorated(x)
        assert _close(expected, leaves)
    assert forwards == [4, 4, 4, 4, 4]  # only the very first one was begun again


def test_a_leaf_that_is_made_anew_and_kept_is_refused() -> None:
    class Kept:
        delta: torch.Tensor

        def step(self, x: torch.Tensor) -> None:
            self.delta = torch.zeros_like(x, requires_grad=True)
            (x + self.delta).pow(2).mean().backward()

    kept = Kept()
    with pytest.raises(oomkit.SplitError, match="created again in each micro-batch, and is kept"):
        oomkit.auto_batch(kept.step, accumulation_steps=2)(_x())
    assert "delta" not in vars(kept), "the attempt is undone"
    oomkit.auto_batch(kept.step)(_x())
    assert kept.delta.grad is not None


def test_a_batch_that_requires_grad_takes_part() -> None:
    x = _x().requires_grad_()

    def step(x: torch.Tensor) -> None:
        x.pow(3).mean().backward()

    expected = _whole(step, [x], x)
    oomkit.auto_batch(step, accumulation_steps=2)(x)
    assert _close(expected, [x])
    x.grad = None
    split = oomkit.auto_batch(step, accumulation_steps=2)
    split(x)
    x.grad = None
    with inject_oom(nth=2**60, phase="backward") as counted:
        split(x)
    for n in range(1, counted.seen + 1, 4):
        x.grad = None
        split = oomkit.auto_batch(step, accumulation_steps=2)
        with inject_oom(nth=n, phase="backward"):
            split(x)
        assert _close(expected, [x]), n


def test_what_was_found_is_not_kept_alive() -> None:
    model, leaf = MLP().double(), torch.ones(6, dtype=torch.float64, requires_grad=True)
    registry = _deep([model, leaf])

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        m, p = registry["a"]["b"]["c"][0]
        m(x * p).pow(2).mean().backward()

    step(_x())
    refs = [weakref.ref(model), weakref.ref(model.layers[0].weight), weakref.ref(leaf)]
    del model, leaf
    gc.collect()
    assert all(ref() is not None for ref in refs)
    registry.clear()
    gc.collect()
    assert all(ref() is None for ref in refs)


def _with_statistics() -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    registry = _deep(model)

    def step(x: torch.Tensor) -> None:
        registry["a"]["b"]["c"][0](x).pow(2).mean().backward()

    return model, step


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_model_with_buffers_in_training_mode_is_taken_in() -> None:
    """Its statistics are those of the micro-batches, as where the step names it."""
    states = []
    for hidden in (True, False):
        model, step = _with_statistics()
        options: dict[str, Any] = {} if hidden else {"model": model}
        oomkit.auto_batch(step, accumulation_steps=2, verify=False, **options)(_x())
        states.append([*model.buffers(), *(p.grad for p in model.parameters())])
    for mine, known in zip(*states, strict=True):
        assert torch.equal(mine, known)


def test_one_that_torch_was_not_asked_about_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where anything is compiled: its statistics have moved in the attempt that was given up,
    and nobody marked them."""
    import torch._dynamo.utils as dynamo

    monkeypatch.setitem(dynamo.counters, "frames", {"total": 1})
    model, step = _with_statistics()
    with pytest.raises(oomkit.SplitError, match="in training mode and has buffers") as caught:
        oomkit.auto_batch(step, accumulation_steps=2)(_x())
    assert "pass model=" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    expected = _whole(step, list(model.parameters()), _x())
    oomkit.auto_batch(step, accumulation_steps=2)(_x())
    assert _close(expected, list(model.parameters()))


def test_a_step_that_catches_everything_begins_again_all_the_same() -> None:
    model = MLP().double()
    registry = _deep(model)

    def step(x: torch.Tensor) -> None:
        try:
            registry["a"]["b"]["c"][0](x).pow(2).mean().backward()
        except Exception:
            caught.append(1)

    caught: Seen[int] = Seen()
    leaves, x = list(model.parameters()), _x()
    expected = _whole(step, leaves, x)
    oomkit.auto_batch(step, accumulation_steps=2)(x)
    assert caught == [1]
    assert _close(expected, leaves)


def test_gradients_of_earlier_calls_are_added_to() -> None:
    model = MLP().double()
    registry = _deep(model)

    def step(x: torch.Tensor) -> None:
        registry["a"]["b"]["c"][0](x).pow(2).mean().backward()

    leaves, x = list(model.parameters()), _x()
    step(x)
    expected = [2 * p.grad for p in leaves]
    oomkit.auto_batch(step, accumulation_steps=2)(x)
    assert _close(expected, leaves)
