"""Once or k times: what a split or replayed step must not do twice, and says if it would."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.mlp_world import same as _same
from helpers.mlp_world import values as _values
from helpers.mlp_world import world as _world
from helpers.own_process import run_program
from helpers.seen import Seen
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

XY = tuple[torch.Tensor, torch.Tensor]


def test_zero_grad_between_two_backwards_is_refused() -> None:
    model, optimizer, x, y = _world()
    before = _values(model)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()
        F.cross_entropy(model(x * 2), y).backward()
        optimizer.step()

    with pytest.raises(oomkit.SplitError, match=r"zero_grad\(\) is called at .* between"):
        step(x, y)
    assert _same(before, _values(model))
    assert all(p.grad is None for p in model.parameters())
    assert "zero_grad" not in vars(model) and "zero_grad" not in vars(optimizer)


class _OwnClearing(MLP):
    """Clears by itself, without the class's method."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            parameter.grad = None


@pytest.mark.parametrize("how", ["child", "own", "instance", "bound before", "from the class"])
def test_however_a_module_clears_between_two_backwards_it_is_refused(how: str) -> None:
    torch.manual_seed(SEED)
    model = _OwnClearing() if how == "own" else MLP()
    child = next(model.children())
    if how == "instance":
        clear = MLP.zero_grad.__get__(model)
        model.zero_grad = lambda *_: clear()  # type: ignore[method-assign, assignment]
    own = vars(model).get("zero_grad")

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        bound = model.zero_grad
        F.cross_entropy(model(x), y).backward()
        if how == "child":
            child.zero_grad()
        elif how == "bound before":
            bound()
        elif how == "from the class":
            nn.Module.zero_grad(model)
        else:
            model.zero_grad()
        F.cross_entropy(model(x * 2), y).backward()

    with pytest.raises(oomkit.SplitError, match=rf"zero_grad\(\) is called at {__file__}:"):
        step(torch.randn(8, 6), torch.randint(0, 3, (8,)))
    assert vars(model).get("zero_grad") is own
    assert all(p.grad is None for p in model.parameters())


_WHOLE_GRAPH = """
import torch
from torch import nn
import oomkit

model, other, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(8, 4)

@oomkit.auto_batch(accumulation_steps=2)
def step(x):
    model(x).pow(2).mean().backward()

step(x)

@torch.compile(backend="eager", fullgraph=True)
def compiled(x):
    other.zero_grad()
    other.eval()
    return other(x)

assert torch.equal(compiled(x), other(x))
assert not other.training
"""


def test_whole_graphs_may_clear_and_switch_a_module_after_a_split() -> None:
    """What stands in nn.Module from the first split on fits into no graph of torch.compile. In a
    process of its own: where something was compiled other rules hold for buffers."""
    done = run_program(_WHOLE_GRAPH)
    assert done.returncode == 0, done.stderr


def test_a_module_that_takes_no_part_may_be_cleared_between_two_backwards() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        MLP().zero_grad()
        F.cross_entropy(model(x * 2), y).backward()
        optimizer.step()

    before = _values(model)
    step(x, y)
    assert not _same(before, _values(model))


@pytest.mark.parametrize("how", ["grad", "parameter"])
def test_autograd_grad_applied_by_hand_is_refused(how: str) -> None:
    model, optimizer, x, y = _world()
    before = _values(model)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            if how == "grad":
                p.grad = g
            else:
                with torch.no_grad():
                    p.sub_(0.1 * g)
        if how == "grad":
            optimizer.step()

    with pytest.raises(oomkit.SplitError, match="by hand|was changed"):
        step(x, y)
    if how == "grad":
        assert _same(before, _values(model))


def test_update_by_hand_is_seen_although_an_earlier_call_had_no_backward() -> None:
    """By its version; where the code shows it, there are copies: test_written_parameters.py."""
    model, _, x, y = _world()
    subtract = getattr(torch.Tensor, "sub" + "_")

    @oomkit.auto_batch
    def step(x: torch.Tensor, train: bool) -> torch.Tensor:
        out = model(x)
        if train:
            out.sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    subtract(p, 0.1)
        return out.detach() * 2

    step(x, False)
    with inject_oom(nth=2**60, phase="forward") as counted:
        step(x, True)
    with inject_oom(nth=counted.seen, phase="forward"):
        with pytest.raises(oomkit.PartialUpdate, match="outside an optimizer"):
            step(x, True)


def test_parameter_check_stays_when_the_step_asks_current() -> None:
    model, _, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        oomkit.current()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model.layers[0].bias.mul_(0.5)

    with pytest.raises(oomkit.SplitError, match="layers.0.bias"):
        step(x, y)


def test_statistics_of_a_norm_of_ones_own_are_rolled_back() -> None:
    """F.batch_norm bumps no version of the buffers that it writes."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, self.mean, self.var, training=True)

    def run(fault: bool) -> torch.Tensor:
        torch.manual_seed(SEED)
        norm, linear = Norm(), nn.Linear(6, 3)

        @oomkit.auto_batch(accumulation_steps=1 if fault else 2, verify=False)  # it couples rows
        def step(x: torch.Tensor) -> None:
            linear(norm(x)).sum().backward()

        x = torch.randn(8, 6)
        if fault:
            small = oomkit.auto_batch(step.__wrapped__, verify=False)
            small(x)
            norm.mean.zero_()
            norm.var.fill_(1.0)
            with inject_oom(nth=1, phase="backward"):
                small(x)
        else:
            step(x)
        return torch.cat([norm.mean, norm.var])

    assert torch.equal(run(False), run(True))


def test_a_buffer_that_was_replaced_is_in_its_place_again() -> None:
    """`self.mean = ...` puts another tensor there: the old one has its value still."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
            return x - self.mean

    def run(k: int, fails: bool) -> torch.Tensor:
        torch.manual_seed(SEED)
        norm, linear = Mean(), nn.Linear(6, 3)
        calls: Seen[int] = Seen()

        @oomkit.auto_batch(accumulation_steps=k, verify=False)  # it couples rows
        def step(x: torch.Tensor) -> None:
            calls.append(len(x))
            out = linear(norm(x))
            if fails and len(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            out.sum().backward()

        step(torch.randn(8, 6))
        return norm.mean

    assert torch.equal(run(2, False), run(1, True))


def test_gradients_come_back_when_a_parameter_was_changed() -> None:
    model, _, x, y = _world()
    F.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model.layers[0].bias.add_(x.mean())

    with pytest.raises(oomkit.SplitError):
        step(x, y)
    assert _same(before, [p.grad for p in model.parameters()])


def test_python_random_is_rolled_back_with_a_model_given() -> None:
    drawn: Seen[float] = Seen()
    model = nn.Linear(3, 3)

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append(random.random())
        return model(x)

    x = torch.zeros(4, 3)
    with torch.no_grad(), inject_oom(nth=1):
        step(x)
    assert drawn[0] == drawn[1]


def test_evaluation_with_weights_is_replayed_from_the_start() -> None:
    class Meter:
        rows = 0

        def save(self) -> int:
            return self.rows

        def restore(self, saved: int) -> None:
            self.rows = saved

    meter = Meter()

    @oomkit.auto_batch(participants=[meter], weight=len, accumulation_steps=2)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        meter.rows += len(x)
        return x + 1

    x = torch.zeros(8, 1)
    with inject_oom(nth=2**60) as counted:
        evaluate(x)
    meter.rows = 0
    with inject_oom(nth=counted.seen // 2 + 1):
        evaluate(x)
    assert meter.rows == 8


def test_current_between_attempts_is_that_of_a_whole_batch() -> None:
    seen: list[Any] = []
    step = oomkit.auto_batch(
        lambda x: x + 1, on_retry=lambda record: seen.append(tuple(oomkit.current()))
    )
    x = torch.zeros(4)
    with inject_oom(nth=1):
        step(x)
    assert seen == [(0, 1, True, 1.0)]


def test_one_step_in_several_threads() -> None:
    """Buffers, interceptors and marks of one call are not another's."""
    norm = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    barrier = threading.Barrier(3)
    errors: list[BaseException] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        barrier.wait(timeout=30)
        with torch.no_grad():
            norm(x)
        assert optimizer.param_groups

    def work() -> None:
        try:
            for _ in range(20):
                step(torch.randn(8, 4))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert "step" not in vars(optimizer)


def test_a_weak_reference_of_ours_may_outlive_the_step() -> None:
    kept = [MLP()]

    def plain(model: MLP, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    step = oomkit.auto_batch(plain)
    step(kept[0], torch.zeros(2, 6))
    ours = weakref.getweakrefs(kept[0])
    assert ours
    del step
    gc.collect()
    kept.clear()
    gc.collect()
    assert all(ref() is None for ref in ours)


def test_data_writes_in_a_micro_batch_are_seen() -> None:
    model, _, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2, verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        model.layers[2].weight.data.mul_(0.9)

    with pytest.raises(oomkit.SplitError, match="layers.2.weight"):
        step(x, y)


def test_an_unknown_leaf_with_a_gradient_is_refused_and_a_known_one_is_not() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    nest = [[[[leaf]]]]
    x = torch.randn(8, 3)

    def plain(x: torch.Tensor) -> None:
        inner = x.clone().requires_grad_()  # of the step itself: dies with it
        ((inner + nest[0][0][0][0]).pow(2).sum(1) * inner.sum(1)).sum().backward()

    with inject_oom(nth=2**60, phase="backward") as counted:
        oomkit.auto_batch(plain, reduction="sum")(x)
    expected, leaf.grad = leaf.grad.clone(), None
    refused = 0
    for n in range(1, counted.seen + 1):
        leaf.grad = None
        with inject_oom(nth=n, phase="backward"):
            try:
                oomkit.auto_batch(plain, reduction="sum")(x)
            except oomkit.OutOfMemory as error:
                assert "may contain a part of this batch" in str(error)
                refused += 1
                continue
        assert torch.allclose(expected, leaf.grad, rtol=1e-4), n
    assert refused < counted.seen
    for n in range(1, counted.seen + 1):
        leaf.grad = None
        with inject_oom(nth=n, phase="backward"):
            oomkit.auto_batch(plain, reduction="sum", participants=[leaf])(x)
        assert torch.allclose(expected, leaf.grad, rtol=1e-4), n


def test_gradients_cleared_by_hand_between_two_backwards_are_refused() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = None
        F.cross_entropy(model(x * 2), y).backward()
        optimizer.step()

    before = _values(model)
    with pytest.raises(oomkit.SplitError, match="cleared or changed between two backward"):
        step(x, y)
    assert _same(before, _values(model))


def test_buffers_that_cannot_be_written_or_are_not_there_yet(tmp_path: Any) -> None:
    table = np.memmap(tmp_path / "table", dtype="float32", mode="w+", shape=(4,))
    table.flush()
    readonly = np.memmap(tmp_path / "table", dtype="float32", mode="r", shape=(4,))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyBatchNorm1d()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch: the array is not writable
                self.register_buffer("table", torch.from_numpy(readonly))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lazy(x) + self.table

    odd = Odd()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return odd(x)

    x = torch.randn(8, 4)
    step(x)
    with inject_oom(nth=1) as armed:
        step(x)
    assert armed.fired == 1
