"""Losses returned to a caller: what happens between the call and its backward, and shapes."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import oomkit
from deferred.test_returned import B, Net, close, grads, loss_of, plain, world
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


@pytest.mark.parametrize("clear", ["optimizer", "to zeros", "by hand"])
@pytest.mark.parametrize("nth", [3, 5, 8])
def test_gradients_that_came_after_the_call_cleared_them(clear: str, nth: int) -> None:
    """The call's own zero_grad() ran when it was made; a replay must not run it again."""

    def run(model: Net, decorate: Any, nth: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if clear == "by hand":
                for p in model.parameters():
                    p.grad = None
            else:
                optimizer.zero_grad(set_to_none=clear == "optimizer")
            return F.cross_entropy(model(x), y)

        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = decorate(compute)(x, y)
        model(x).pow(2).mean().backward()
        with inject_oom(nth=nth, phase="backward") as fault:
            loss.backward()
        assert fault.fired == (nth < 100)

    want, x, y = world()
    run(want, lambda f: f, 1000)
    model, _, _ = world()
    run(model, oomkit.auto_batch, nth)
    assert close(grads(model), grads(want))


@pytest.mark.parametrize("returned", [False, True])
def test_a_shared_leaf_of_which_a_part_has_come(returned: bool) -> None:
    """A backward inside the failed one (reentrant checkpoint) breaks the leaf's atomicity."""
    layer = torch.nn.Linear(6, 6).double()
    x = torch.randn(B, 6, dtype=torch.float64)

    def compute(x: torch.Tensor) -> torch.Tensor | None:
        h = x.detach().requires_grad_()
        for _ in range(3):
            h = checkpoint(lambda t: torch.tanh(layer(t)), h, use_reentrant=True)
        if returned:
            return h.pow(2).mean()
        h.pow(2).mean().backward()
        return None

    def run(step: Any) -> None:
        loss = step(x)
        if loss is not None:
            loss.backward()

    run(compute)
    want = grads(layer)
    refused = equal = nth = 0
    while True:
        nth += 1
        layer.zero_grad(set_to_none=False)
        step = oomkit.auto_batch(compute, gradient_safety="off")
        with inject_oom(nth=nth, phase="backward") as fault:
            try:
                run(step)
                equal += 1
                assert close(grads(layer), want), nth
            except oomkit.OutOfMemory as error:
                refused += 1
                assert "cannot be restored" in str(error)
        if not fault.fired:
            break
    assert refused > 0 and equal > 1


def test_half_precision_inside_the_step() -> None:
    """The caller's scale is not known at the first split call: what underflowed comes back."""
    torch.manual_seed(1)
    model = Net()
    x, y = torch.randn(B, 6) * 1e-3, torch.randint(0, 3, (B,))

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.cross_entropy(model(x), y) * 1e-3

    (compute(x, y) * 2.0**16).backward()
    want = grads(model)
    step = oomkit.auto_batch(compute, accumulation_steps=2)
    for scale in (2.0**16, 2.0**16, 2.0**15):
        model.zero_grad()
        (step(x, y) * scale).backward()
        for got, whole in zip(grads(model), want, strict=True):
            assert got is not None and whole is not None
            assert (got * (2.0**16 / scale) - whole).abs().max() <= 4e-3 * whole.abs().max()


@pytest.mark.parametrize("rows", [2, 3])
def test_a_loss_of_one_element_in_a_dimension(rows: int) -> None:
    want, x, y = world()
    x, y = x[:rows], y[:rows]
    loss_of(want)(x, y).backward()
    model, _, _ = world()
    step = oomkit.auto_batch(lambda x, y: loss_of(model)(x, y).view(1))
    for nth in (4, 1000):  # the second call is split from the start
        model.zero_grad()
        with inject_oom(nth=nth, phase="backward"):
            loss = step(x, y)
            loss.backward()
        assert loss.shape == (1,)
        assert close(grads(model), grads(want))


def test_a_batch_that_requires_grad_is_replayed() -> None:
    want, z, y = world()
    z.requires_grad_()
    loss_of(want)(z, y).backward()
    for nth in range(1, 9):
        model, x, _ = world()
        x.requires_grad_()
        loss = oomkit.auto_batch(loss_of(model))(x, y)
        with inject_oom(nth=nth, phase="backward"):
            loss.backward()
        assert close([x.grad], [z.grad]) and close(grads(model), grads(want))
    model, x, _ = world()
    x.requires_grad_()
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    with inject_oom(nth=4, times=None, phase="backward"), pytest.raises(oomkit.OutOfMemory):
        loss.backward()
    assert x.grad is None and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("k", [1, 2])
def test_a_row_per_sample_of_a_batch_that_requires_grad(k: int) -> None:
    def run(model: Net, x: torch.Tensor, decorate: Any) -> None:
        losses = decorate(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))(x, y)
        losses.mean().backward()

    want, z, y = world()
    model, x, _ = world()
    for leaf in (z, x):
        leaf.requires_grad_()
    run(want, z, lambda f: f)
    with inject_oom(nth=5 if k == 1 else 1000, phase="backward"):
        run(model, x, lambda f: oomkit.auto_batch(f, accumulation_steps=k))
    assert close([x.grad], [z.grad]) and close(grads(model), grads(want))


def test_nested_decorated_functions() -> None:
    """The outer call answers for all: the models of the inner functions are its own."""
    model, x, y = world()
    inner = oomkit.auto_batch(loss_of(model))
    outer = oomkit.auto_batch(lambda x, y: inner(x, y) * 2)
    with inject_oom(nth=4, phase="backward"):
        outer(x, y).backward()
    assert close(grads(model), plain(lambda v: v * 2))


class _Frame:
    """A result with code of its own, as a table of another library."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError(f"no column {name}")

    def __len__(self) -> int:
        return 0

    @property
    def loss(self) -> Any:
        raise RuntimeError("not fitted")


def test_results_that_raise_when_asked_for_a_loss() -> None:
    frame = _Frame()
    assert oomkit.auto_batch(lambda x: frame)(torch.ones(2)) is frame
    table: defaultdict[str, list[int]] = defaultdict(list)
    assert oomkit.auto_batch(lambda x: table)(torch.ones(2)) is table
    assert not table


class _Batch:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y
        self.loss: torch.Tensor | None = None


def _keeping(model: Net) -> Any:
    def compute(batch: dict[str, Any] | _Batch, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if isinstance(batch, _Batch):
            batch.loss = loss
        else:
            batch["loss"] = loss
        return loss

    return compute


@pytest.mark.parametrize("kind", ["dict", "object", "nested"])
def test_an_argument_that_keeps_its_loss_is_freed(kind: str) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(_keeping(model))
    compute = _keeping(model)
    if kind == "nested":
        step = oomkit.auto_batch(lambda pair, x, y: compute(pair[0], x, y))
    alive = []
    for _ in range(3):
        mine = x.clone()
        alive.append(weakref.ref(mine))
        batch: Any = _Batch(mine, y) if kind == "object" else {"x": mine}
        step((batch, 1) if kind == "nested" else batch, mine, y)
        del batch, mine
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_an_argument_that_keeps_its_loss_is_replayed(kind: str) -> None:
    model, x, y = world()
    step = oomkit.auto_batch(_keeping(model))
    batch: Any = _Batch(x, y) if kind == "object" else {"x": x}
    loss = step(batch, x, y)
    if kind == "dict":
        batch.clear()  # a dictionary is the one of the call
    with inject_oom(nth=4, phase="backward"):
        loss.backward()
    assert close(grads(model), plain())


@pytest.mark.parametrize("verify", [True, "warn"])
def test_what_the_step_reads_has_changed(verify: bool | str) -> None:
    """Nothing tells of a global that moved but the loss: the replay makes another one."""
    model, x, y = world()
    factor = {"value": 1.0}
    said = "omething that the step reads has changed"

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model)(x, y) * factor["value"]

    loss = oomkit.auto_batch(compute, verify=verify)(x, y)
    factor["value"] = 2.0
    with inject_oom(nth=4, phase="backward"):
        if verify == "warn":
            with pytest.warns(oomkit.OomkitWarning, match=said):
                loss.backward()
        else:
            with pytest.raises(oomkit.OutOfMemory, match=said):
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    loss = oomkit.auto_batch(compute, verify="warn")(x, y)
    factor["value"] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        with inject_oom(nth=4, phase="backward"), pytest.raises(oomkit.OomkitWarning):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_couples_the_samples_is_refused_in_its_replay() -> None:
    model, x, _ = world()

    def contrast(x: torch.Tensor) -> torch.Tensor:
        h = model(x)
        return F.cross_entropy(h @ h.T, torch.arange(len(x)))

    loss = oomkit.auto_batch(contrast)(x)
    with (
        inject_oom(nth=4, phase="backward"),
        pytest.raises(oomkit.OutOfMemory, match="the loss couples the samples"),
    ):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    loss = oomkit.auto_batch(contrast, verify=False)(x)
    with inject_oom(nth=4, phase="backward"):
        loss.backward()


@pytest.mark.parametrize("watch", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_caller_who_looks_at_another_gradient(watch: str, k: int) -> None:
    model, x, y = world()

    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        h = model(x)
        return F.cross_entropy(h, y), {"h": h}

    loss, rest = oomkit.auto_batch(compute, accumulation_steps=k)(x, y)
    getattr(rest["h"], watch)(*([lambda g: g / 2] if watch == "register_hook" else []))
    with inject_oom(nth=4, phase="backward"):
        with pytest.raises(oomkit.OomkitError, match="register_hook.. or retain_grad"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("k", [1, 2])
def test_backward_in_inference_mode(k: int) -> None:
    model, x, y = world()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    step = oomkit.auto_batch(loss_of(model), accumulation_steps=k)
    for _ in range(2):
        loss = step(x, y) / 2
        with torch.inference_mode(), inject_oom(nth=6, phase="backward"):
            loss.backward()
    got = grads(model)
    assert not any(g is None or g.is_inference() for g in got)
    assert close([None if g is None else g - 1 for g in got], plain())
