"""Once or k times: optimizers, schedulers and scalers of a split or replayed step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.mlp_world import same as _same
from helpers.mlp_world import values as _values
from helpers.mlp_world import world as _world
from helpers.seen import Seen
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.hooks import RemovableHandle
from zoo import MLP

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted


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

    with pytest.raises(oomkit.SplitError, match="is called at .* after its update at"):
        step(x)
    assert _same(before, _values(first) + _values(second))


def test_forwards_after_an_update_are_watched_in_every_call() -> None:
    """Torch's hook is put where it was in the call before, and nothing of it stays."""
    model, optimizer, x, y = _world()
    late = False
    hooks = torch.nn.modules.module._global_forward_pre_hooks

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert len(hooks) == 1
        if late:
            model(x)

    made = []
    with force_slices([len(x) - 2, 2]):
        for _ in range(3):
            step(x, y)
            made.append(RemovableHandle.next_id)
            assert not hooks
        late = True
        with pytest.raises(oomkit.SplitError, match="is called at .* after its update at"):
            step(x, y)
    assert made[0] == made[2]
    assert not hooks


def test_forwards_after_an_update_are_watched_beside_another_thread() -> None:
    """Its step finds the hook in its place, and takes out its own alone."""
    model, optimizer, whole, labels = _world()
    other = MLP()
    inner_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    within: list[int] = []

    @oomkit.auto_batch(model=other, optimizer=inner_optimizer)
    def inner(x: torch.Tensor, y: torch.Tensor) -> None:
        inner_optimizer.zero_grad()
        F.cross_entropy(other(x), y).backward()
        inner_optimizer.step()
        within.append(len(hooks))

    @oomkit.auto_batch(model=model, optimizer=optimizer)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        thread = threading.Thread(target=inner, args=(whole, labels))
        thread.start()
        thread.join()
        model(x)

    with force_slices([len(whole) - 2, 2]):
        with pytest.raises(oomkit.SplitError, match="is called at .* after its update at"):
            step(whole, labels)
    assert within == [2, 2]
    assert not hooks


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


@pytest.mark.parametrize("where", ["list", "default", "late attribute", "model given"])
def test_a_scheduler_out_of_sight_steps_once(where: str) -> None:
    model, optimizer, x, y = _world()
    sched = LambdaLR(optimizer, lambda s: 1.0)  # the rate never changes: nothing shows
    hidden = [[[[sched]]]]

    class Trainer:
        sched: Any = None

    trainer = Trainer()
    default = sched if where == "default" else None  # the search looks into defaults

    def plain(x: torch.Tensor, y: torch.Tensor, late: Any = default) -> None:
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


@pytest.mark.parametrize("k", [1, 2])
def test_what_a_scheduler_put_around_the_optimizers_step_is_there_again(k: int) -> None:
    """Without it the scheduler warns that it is called before optimizer.step()."""
    model, optimizer, x, y = _world()
    sched = StepLR(optimizer, 1, 0.5)
    wrapper = vars(optimizer)["step"]

    @oomkit.auto_batch(accumulation_steps=k)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        sched.step()

    step(x, y)
    assert vars(optimizer)["step"] is wrapper


def test_learning_rates_are_rolled_back_and_changed_once() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with inject_oom(nth=1, times=None, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="as before the step"):
            step(x, y)
    assert optimizer.param_groups[0]["lr"] == 0.1
    before = _values(model)
    plain_model, plain_optimizer, _, _ = _world()
    F.cross_entropy(plain_model(x), y).backward()
    plain_optimizer.param_groups[0]["lr"] *= 0.5
    plain_optimizer.step()
    step(x, y)  # split from the start by now
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not _same(before, _values(model))
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("how", ["scaler", "outside", "returned", "after"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_learning_rate_changed_by_hand_changes_once(how: str, k: int) -> None:
    def run(decorate: Any, fails: bool = False) -> list[Any]:
        model, optimizer, x, y = _world()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        @decorate
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
            loss = F.cross_entropy(model(x), y)
            if how != "returned":
                (scaler.scale(loss) if how == "scaler" else loss).backward()
            if how == "after":
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            if how == "scaler":
                scaler.step(optimizer)
                scaler.update()
            return loss if how == "returned" else None

        for number in range(2):
            optimizer.zero_grad()
            with inject_oom(nth=2 if fails and number == 1 else 1000, phase="backward"):
                loss = step(x, y)
                if loss is not None:
                    loss.backward()
            if how in ("outside", "returned"):
                optimizer.step()
        return [optimizer.param_groups[0]["lr"], *_values(model)]

    plain = run(lambda f: f)
    found = run(lambda f: oomkit.auto_batch(f, accumulation_steps=k), fails=k == 1)
    assert found[0] == plain[0] == 0.025
    for a, b in zip(found[1:], plain[1:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", ["scaler", "outside"])
def test_a_learning_rate_of_a_counter_is_refused(how: str) -> None:
    model, optimizer, x, y = _world()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    calls: list[int] = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        calls.append(1)
        optimizer.param_groups[0]["lr"] = 0.1 / len(calls)
        if how == "scaler":
            scaler.step(optimizer)
            scaler.update()

    before = _values(model)
    with pytest.raises(oomkit.SplitError, match="'lr' in the param_groups of SGD"):
        step(x, y)
    assert optimizer.param_groups[0]["lr"] == 0.1 and _same(before, _values(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["before", "before, and it asks", "after", "between"])
def test_a_learning_rate_that_the_last_micro_batch_alone_changes_is_refused(where: str) -> None:
    """By its rows, for all that anybody knows; behind the update it is said that this stands."""
    model, optimizer, x, y = _world()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) if where == "between" else loss).backward()
        if where == "after":
            optimizer.step()
        if where == "between":
            scaler.step(optimizer)
        if loss.item() < last:
            optimizer.param_groups[0]["lr"] = 0.05
        if where == "before, and it asks":
            assert oomkit.current().count == 2  # what for is not known
        if where.startswith("before"):
            optimizer.step()
        if where == "between":
            other.step()
            scaler.update()

    half = len(x) // 2
    losses = [F.cross_entropy(model(x[s]), y[s]).item() for s in (slice(half), slice(half, None))]
    if losses[0] < losses[1]:
        x, y = x.flip(0), y.flip(0)
    last = sum(losses) / 2
    before = _values(model)
    with pytest.raises(
        oomkit.SplitError, match=r"'lr' in the param_groups of SGD.*2 of 2"
    ) as caught:
        step(x, y)
    applied = any("it stands" in note for note in getattr(caught.value, "__notes__", []))
    assert applied == (not where.startswith("before"))
    assert _same(before, _values(model)) != applied


class Counts(torch.optim.SGD):
    """Moves one of its own values."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] += 0.1
        return super().step(closure)


def _after(update: Callable[[], Any], group: dict[str, Any], scheduler: Any) -> None:
    update()
    if oomkit.current().is_last:
        group["lr"] *= 0.5


def _for_one_update(update: Callable[[], Any], group: dict[str, Any], scheduler: Any) -> None:
    group["lr"] *= 0.5
    update()
    group["lr"] *= 2


def _bounded(update: Callable[[], Any], group: dict[str, Any], scheduler: Any) -> None:
    """What the update itself moves."""
    update()
    group["weight_decay"] = min(group["weight_decay"], 0.15)


def _bounded_behind_a_scheduler(
    update: Callable[[], Any], group: dict[str, Any], scheduler: Any
) -> None:
    update()
    scheduler.step()
    group["lr"] = max(group["lr"], 0.04)


def _by_the_epoch(update: Callable[[], Any], group: dict[str, Any], scheduler: Any) -> None:
    update()
    scheduler.step()
    group["lr"] = 0.3 / (1 + scheduler.last_epoch)


@pytest.mark.parametrize(
    "how",
    [_after, _for_one_update, _bounded, _bounded_behind_a_scheduler, _by_the_epoch],
)
@pytest.mark.parametrize("k", [2, 3])
def test_a_learning_rate_that_the_last_micro_batch_may_change(how: Any, k: int) -> None:
    def run(decorate: Any) -> list[Any]:
        model, _, x, y = _world()
        optimizer = Counts(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1, 0.5)
        group = optimizer.param_groups[0]

        @decorate
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(model(x), y).backward()
            how(optimizer.step, group, scheduler)

        for _ in range(3):
            optimizer.zero_grad()
            step(x, y)
        return [group["lr"], group["weight_decay"], *_values(model)]

    plain = run(lambda f: f)
    found = run(lambda f: oomkit.auto_batch(f, accumulation_steps=k))
    assert found[:2] == plain[:2]
    for a, b in zip(found[2:], plain[2:], strict=True):
        torch.testing.assert_close(a, b)


def test_a_learning_rate_may_go_by_a_scale_that_has_fallen() -> None:
    def run(decorate: Any) -> float:
        model, optimizer, x, y = _world()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)

        @decorate
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            before = scaler.get_scale()
            scaler.scale(F.cross_entropy(model(x), y) * 1e30).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                optimizer.param_groups[0]["lr"] *= 0.5

        step(x, y)
        return float(optimizer.param_groups[0]["lr"])

    assert run(lambda f: f) == run(lambda f: oomkit.auto_batch(f, accumulation_steps=2)) == 0.05


def test_optimizer_in_a_gradient_hook_is_refused_while_split() -> None:
    model, optimizer, x, y = _world()
    for p in model.parameters():
        p.register_hook(lambda g: optimizer.step())

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    with pytest.raises(oomkit.SplitError, match="inside backward"):
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

    before = [p.detach().clone() for m in (one, two) for p in m.parameters()]
    with inject_oom(nth=1, times=None, phase="optimizer"):
        with pytest.raises(oomkit.OutOfMemory, match="nothing was updated"):
            step(torch.randn(8, 6))  # the first call can go back
    after = [p for m in (one, two) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    step(torch.randn(8, 6))
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


def test_a_scaler_that_had_unscaled_does_so_again() -> None:
    """It refuses a second unscale_() until its update(), which the failed attempt never met."""

    def run(k: int, fails: bool) -> list[torch.Tensor]:
        model, optimizer, x, y = _world()
        scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0)
        calls: Seen[int] = Seen()

        @oomkit.auto_batch(accumulation_steps=k)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            calls.append(len(x))
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            if fails and len(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            scaler.step(optimizer)
            scaler.update()

        step(x, y)
        return _values(model)

    expected, got = run(2, False), run(1, True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


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
    with pytest.raises(oomkit.SplitError, match="reached its end where the first one") as caught:
        step(x, y)
    assert any("it stands, do not repeat it" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("k", [2, 4])
def test_a_rate_that_is_set_in_the_step_is_no_change(k: int) -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=k)
    def step(x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step(x, y, 0.05)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("k", [2, 4])
def test_a_rate_that_decays_before_the_update_decays_once(k: int) -> None:
    model, optimizer, x, y = _world()
    (plain, _, _, _), before = _world(), _values(model)

    @oomkit.auto_batch(accumulation_steps=k)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step(x, y)
    F.cross_entropy(plain(x), y).backward()
    assert optimizer.param_groups[0]["lr"] == 0.05
    for p, q, was in zip(model.parameters(), plain.parameters(), before, strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.detach(), was - 0.05 * q.grad)


@pytest.mark.parametrize("k", [2, 4])
def test_a_rate_set_after_the_update_is_not_used_by_it(k: int) -> None:
    """Held back, the first update would have used the old rate: so does the only one."""
    model, optimizer, x, y = _world()
    (plain, _, _, _), before = _world(), _values(model)

    @oomkit.auto_batch(accumulation_steps=k)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.025

    step(x, y)
    F.cross_entropy(plain(x), y).backward()
    assert optimizer.param_groups[0]["lr"] == 0.025
    for p, q, was in zip(model.parameters(), plain.parameters(), before, strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.detach(), was - 0.1 * q.grad)


def test_a_tensor_rate_is_rolled_back_by_value() -> None:
    model, _, x, y = _world()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with inject_oom(nth=1, times=None, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory):
            step(x, y)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    step(x, y)  # split
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_equal_values_made_anew_are_no_change() -> None:
    model, _, x, y = _world()
    optimizer = torch.optim.AdamW(model.parameters())

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        group = optimizer.param_groups[0]
        group["betas"] = tuple([0.9, 0.95])
        group["note"] = "".join(["a", str(1)])
        group["lr"] = torch.tensor(0.01).item()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step(x, y)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_schedulers_step_kept_in_a_variable_is_refused() -> None:
    model, optimizer, x, y = _world()
    sched = LambdaLR(optimizer, lambda s: 1.0)
    move = sched.step

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        move()

    before = _values(model)
    with pytest.raises(oomkit.SplitError, match="could not delay it"):
        step(x, y)
    assert _same(before, _values(model))


def test_a_scaler_that_is_switched_off() -> None:
    model, optimizer, x, y = _world()
    scaler = torch.amp.GradScaler(device="cpu", enabled=False)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    step(x, y)
    with inject_oom(nth=2, phase="backward") as armed:
        step(x, y)
    assert armed.fired == 1
