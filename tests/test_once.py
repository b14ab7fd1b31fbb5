"""Once or k times: what a split or replayed step must not do twice, and says if it would."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

XY = tuple[torch.Tensor, torch.Tensor]


def _world(lr: float = 0.1) -> tuple[MLP, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    model = MLP()
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return model, torch.optim.SGD(model.parameters(), lr=lr), x, y


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_zero_grad_between_two_backwards_is_refused() -> None:
    model, optimizer, x, y = _world()
    before = _values(model)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()
        F.cross_entropy(model(x * 2), y).backward()
        optimizer.step()

    with pytest.raises(oomkit.SplitError, match=r"zero_grad\(\) is called between"):
        step(x, y)
    assert _same(before, _values(model))
    assert all(p.grad is None for p in model.parameters())
    assert "zero_grad" not in vars(model) and "zero_grad" not in vars(optimizer)


def test_two_optimizers_in_turn_are_refused() -> None:
    """A GAN's step: the second forward would see the first network half way."""
    first, second = MLP(), MLP()
    opt1 = torch.optim.SGD(first.parameters(), lr=0.1)
    opt2 = torch.optim.SGD(second.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    before = _values(first) + _values(second)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        first(x).pow(2).mean().backward()
        opt1.step()
        (second(x) - first(x)).pow(2).mean().backward()
        opt2.step()

    with pytest.raises(oomkit.SplitError, match="an update is made between two backward"):
        step(x)
    assert _same(before, _values(first) + _values(second))


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

    with pytest.raises(oomkit.SplitError, match="set by hand|was changed"):
        step(x, y)
    if how == "grad":
        assert _same(before, _values(model))


def test_update_by_hand_is_seen_although_an_earlier_call_had_no_backward() -> None:
    model, _, x, y = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor, train: bool) -> torch.Tensor:
        out = model(x)
        if train:
            out.sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1)
        return out.detach() * 2

    step(x, False)
    with inject_oom(nth=2**60, phase="forward") as counted:
        step(x, True)
    with inject_oom(nth=counted.seen, phase="forward"):
        with pytest.raises(oomkit.OutOfMemory, match="outside an optimizer"):
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


class DataSGD(torch.optim.Optimizer):
    """As old optimizers are written: through .data, which bumps no version."""

    def __init__(self, params: Any, fail: list[int]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.fail = fail

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])
        if self.fail.pop() if self.fail else 0:
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 MiB")


def test_an_optimizer_that_writes_data_is_not_repeated() -> None:
    model, _, x, y = _world()
    fail: list[int] = []
    optimizer = DataSGD(model.parameters(), fail)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach() * 2

    fail[:] = [1]
    with pytest.raises(oomkit.PartialUpdate, match="DataSGD"):
        step(x, y)
    with inject_oom(nth=2**60, phase="forward") as counted:
        step(x, y)
    with inject_oom(nth=counted.seen, phase="forward"):
        with pytest.raises(oomkit.OutOfMemory) as caught:
            step(x, y)
    assert caught.value.committed


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

        @oomkit.auto_batch(accumulation_steps=1 if fault else 2)
        def step(x: torch.Tensor) -> None:
            linear(norm(x)).sum().backward()

        x = torch.randn(8, 6)
        if fault:
            small = oomkit.auto_batch(step.__wrapped__)
            small(x)
            norm.mean.zero_()
            norm.var.fill_(1.0)
            with inject_oom(nth=1, phase="backward"):
                small(x)
        else:
            step(x)
        return torch.cat([norm.mean, norm.var])

    assert torch.equal(run(False), run(True))


@pytest.mark.parametrize("where", ["list", "default", "late attribute", "model given"])
def test_a_scheduler_out_of_sight_steps_once(where: str) -> None:
    model, optimizer, x, y = _world()
    sched = LambdaLR(optimizer, lambda s: 1.0)  # the rate never changes: nothing shows
    hidden = [[[[sched]]]]

    class Trainer:
        sched: Any = None

    trainer = Trainer()

    def plain(x: torch.Tensor, y: torch.Tensor, late: Any = sched) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if where == "list":
            hidden[0][0][0][0].step()
        elif where == "default":
            late.step()
        elif trainer.sched is not None:
            trainer.sched.step()

    options: dict[str, Any] = {"model": model} if where == "model given" else {}
    step = oomkit.auto_batch(plain, **options)
    step(x, y)
    trainer.sched = sched
    before = sched.last_epoch
    with inject_oom(nth=2, phase="backward") as armed:
        step(x, y)
    assert armed.fired == 1
    assert sched.last_epoch == before + 1
    step(x, y)
    assert sched.last_epoch == before + 2


def test_a_scheduler_saved_in_the_step_is_the_plain_one() -> None:
    model, optimizer, x, y = _world()
    sched = StepLR(optimizer, 1, 0.5)
    plain = set(sched.state_dict())

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        sched.step()
        return {"keys": sorted(sched.state_dict())}

    assert set(step(x, y)["keys"]) == plain
    assert set(vars(sched)) & {"step", "state_dict"} == set()


def test_plateau_is_refused_while_split() -> None:
    model, optimizer, x, y = _world()
    sched = ReduceLROnPlateau(optimizer)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        sched.step(loss.detach())

    with pytest.raises(oomkit.SplitError, match="metric of one micro-batch"):
        step(x, y)


def test_learning_rates_are_rolled_back_and_changed_once() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        F.cross_entropy(model(x), y).backward()

    with inject_oom(nth=1, times=None, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="as if the step had not begun"):
            step(x, y)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(oomkit.SplitError, match="'lr' in the param_groups of SGD"):
        step(x, y)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_optimizer_in_a_gradient_hook_is_refused_while_split() -> None:
    model, optimizer, x, y = _world()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizer.step())

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    with pytest.raises(oomkit.SplitError, match="by a hook inside backward"):
        step(x, y)


def test_second_of_two_optimizers_out_of_memory_is_a_partial_update() -> None:
    one, two = MLP(), MLP()
    opt1 = torch.optim.SGD(one.parameters(), lr=0.1)
    opt2 = torch.optim.AdamW(two.parameters())

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        (one(x) + two(x)).sum().backward()
        opt1.step()
        opt2.step()

    with inject_oom(nth=1, times=None, phase="optimizer"):
        with pytest.raises(oomkit.PartialUpdate, match="after another's was applied"):
            step(torch.randn(8, 6))


def test_closure_none_by_keyword_is_no_closure() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step(closure=None)

    with inject_oom(nth=2, phase="backward") as armed:
        step(x, y)
    assert armed.fired == 1


def test_every_fault_of_a_cold_scaler() -> None:
    def run(n: int) -> tuple[list[torch.Tensor], Any]:
        model, optimizer, x, y = _world()
        scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0)

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

        with inject_oom(nth=n, phase="forward") as armed:
            try:
                step(x, y)
            except oomkit.OutOfMemory as error:
                assert error.committed
        return _values(model), armed

    expected, counted = run(2**60)
    for n in range(1, counted.seen + 1):
        got, armed = run(n)
        assert armed.fired == 1
        for a, b in zip(expected, got, strict=True):
            assert torch.allclose(a, b, atol=1e-6), n


def test_a_course_that_ends_early_after_the_update_says_so() -> None:
    model, optimizer, x, y = _world()
    sched = StepLR(optimizer, 1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if x[0, 0] == XS[0, 0]:
            sched.step()

    XS = x
    with pytest.raises(oomkit.SplitError, match="reached its end, the first one") as caught:
        step(x, y)
    assert any("it stands, do not repeat it" in note for note in caught.value.__notes__)


def test_gradients_come_back_when_a_parameter_was_changed() -> None:
    model, _, x, y = _world()
    F.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model.layers[0].bias.add_(1.0)

    with pytest.raises(oomkit.SplitError):
        step(x, y)
    assert _same(before, [p.grad for p in model.parameters()])


def test_python_random_is_rolled_back_with_a_model_given() -> None:
    drawn: list[float] = []
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

    @oomkit.auto_batch(accumulation_steps=2)
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
                assert "may hold a part of this batch" in str(error)
                refused += 1
                continue
        assert torch.allclose(expected, leaf.grad, rtol=1e-4), n
    assert refused < counted.seen
    for n in range(1, counted.seen + 1):
        leaf.grad = None
        with inject_oom(nth=n, phase="backward"):
            oomkit.auto_batch(plain, reduction="sum", participants=[leaf])(x)
        assert torch.allclose(expected, leaf.grad, rtol=1e-4), n
