"""OOM inside optimizer.step() and after it: undone and retried, PartialUpdate, or .committed.

No other outcome: a sweep over every allocation from the first optimizer allocation to the
end of the call.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.sample import sampled
from helpers.seeds import seed_all
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from zoo import World, difference, make_world, same

import oomkit
from oomkit._ladder import host
from oomkit.testing import force_slices, inject_oom


def _step(
    world: World, ema: dict[str, torch.Tensor], sched: StepLR, options: dict[str, Any]
) -> Any:
    model, optimizer = world.model, world.optimizer

    @oomkit.auto_batch(**options)
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = world.loss(batch)
        loss.backward()
        optimizer.step()
        sched.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                ema[name] = 0.9 * ema[name] + 0.1 * p
        return loss.detach() * 2

    return step


def _make(kind: str, optimizer: str, warm: bool, **options: Any) -> tuple[World, Any, Any, StepLR]:
    world = make_world(kind, optimizer=optimizer)
    ema = {name: p.detach().clone() for name, p in world.model.named_parameters()}
    sched = StepLR(world.optimizer, 1, 0.5)
    step = _step(world, ema, sched, options)
    if warm:
        step(world.batches[0])
    return world, ema, step, sched


def _everything(world: World, ema: Any, sched: StepLR) -> dict[str, Any]:
    return {
        "parameters": [p.detach().clone() for p in world.model.parameters()],
        "state": [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
            for s in world.optimizer.state.values()
        ],
        "scheduler": {
            k: v for k, v in sched.state_dict().items() if k != "_get_lr_called_within_step"
        },
        "ema": dict(ema),
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "foreach", "sgd", "foreach sgd"])
def test_sweep_of_the_update(optimizer: str, warm: bool) -> None:
    world, ema, step, sched = _make("mlp", optimizer, warm)
    with inject_oom(nth=2**60, phase="optimizer") as counted:
        step(world.batches[1])
    undisturbed = _everything(world, ema, sched)
    outcomes: Counter[str] = Counter()
    for n in range(1, counted.seen + 1):
        world, ema, step, sched = _make("mlp", optimizer, warm)
        with inject_oom(nth=n, phase="optimizer") as armed:
            try:
                step(world.batches[1])
            except oomkit.PartialUpdate as error:
                outcomes["PartialUpdate"] += 1
                assert ("SGD" if "sgd" in optimizer else "AdamW") in str(error)
                assert not oomkit.is_oom_error(error)
            except oomkit.OutOfMemory as error:
                outcomes["committed" if error.committed else "rolled back"] += 1
            else:
                outcomes["undone and retried"] += 1
                got = _everything(world, ema, sched)
                assert same(undisturbed, got), (n, difference(undisturbed, got))
        assert armed.fired == 1
    print(f"{optimizer} warm={warm}: {counted.seen} faults in step(): {dict(outcomes)}")
    assert set(outcomes) <= {"PartialUpdate", "undone and retried"}
    assert sum(outcomes.values()) == counted.seen
    if optimizer in ("adamw", "foreach") and not warm:
        assert outcomes["undone and retried"] > 0 and outcomes["PartialUpdate"] > 0


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_sweep_after_the_update(optimizer: str) -> None:
    """EMA and metrics after step(): committed, and the update stands exactly once."""
    world, ema, step, sched = _make("mlp", optimizer, True)
    with inject_oom(nth=2**60, phase="forward") as counted:
        step(world.batches[1])
    after = [p.detach().clone() for p in world.model.parameters()]
    lr = sched.get_last_lr()
    committed = retried = 0
    for n in range(1, counted.seen + 1):
        world, ema, step, sched = _make("mlp", optimizer, True)
        with inject_oom(nth=n, phase="forward") as armed:
            try:
                step(world.batches[1])
            except oomkit.OutOfMemory as error:
                assert error.committed is True
                assert "do not repeat this batch" in str(error)
                committed += 1
                assert all(
                    torch.equal(a, b) for a, b in zip(after, world.model.parameters(), strict=True)
                )
                assert sched.get_last_lr() == lr
            else:
                retried += 1
                assert sched.get_last_lr() == lr
                for a, b in zip(after, world.model.parameters(), strict=True):
                    assert torch.allclose(a, b, atol=1e-6), n
        assert armed.fired == 1
    print(
        f"{optimizer}: {counted.seen} faults outside step(): {committed} committed, "
        f"{retried} retried"
    )
    assert committed > 4 and retried > 4


@pytest.mark.parametrize("phase", ["optimizer", "forward"])
@pytest.mark.parametrize("optimizer", ["adamw", "foreach", "fused", "sgd"])
@pytest.mark.parametrize("safety", ["copy", "parts"])
def test_an_update_that_can_go_back_makes_every_fault_retryable(
    safety: str, optimizer: str, phase: str
) -> None:
    """In the update, and (`forward`) in what stands before and after it."""
    world, ema, step, sched = _make("mlp", optimizer, True, optimizer_safety=safety)
    with inject_oom(nth=2**60, phase=phase) as counted:
        step(world.batches[1])

    def split_run() -> dict[str, Any]:
        world, ema, step, sched = _make("mlp", optimizer, True, optimizer_safety=safety)
        with force_slices([4, 4]):
            step(world.batches[1])
        return _everything(world, ema, sched)

    whole, split = _everything(world, ema, sched), split_run()
    for n in sampled(range(1, counted.seen + 1), 6):
        world, ema, step, sched = _make("mlp", optimizer, True, optimizer_safety=safety)
        with inject_oom(nth=n, phase=phase) as armed:
            step(world.batches[1])
        assert armed.fired == 1
        got = _everything(world, ema, sched)
        # The EMA of this step is plain code: it runs once per micro-batch while split.
        for state in (whole, split, got):
            state.pop("ema", None)
        assert same(got, whole) or same(got, split), (n, difference(split, got))


def test_scheduler_and_averaged_model_run_once_per_batch() -> None:
    world = make_world("mlp")
    sched = StepLR(world.optimizer, 1, 0.5)
    averaged = AveragedModel(world.model)

    @oomkit.auto_batch(accumulation_steps=4)
    def step(batch: dict[str, torch.Tensor]) -> None:
        world.optimizer.zero_grad()
        world.loss(batch).backward()
        world.optimizer.step()
        sched.step()
        averaged.update_parameters(world.model)

    model, optimizer = world.model, world.optimizer  # named by the step through `world`
    step(world.batches[0])
    assert sched.last_epoch == 1
    assert int(averaged.n_averaged) == 1
    assert all(s["step"] == 1 for s in optimizer.state.values())
    assert "step" not in vars(averaged)
    assert model is world.model


def test_the_first_step_that_cannot_fit_is_refused_before_anything_moves() -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    @oomkit.auto_batch(ladder=())
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    before = [p.detach().clone() for p in model.parameters()]
    base = oomkit.memory("cpu").allocated or 0
    with oomkit.limit_memory(base + 600_000, device="cpu"):
        with pytest.raises(
            oomkit.OutOfMemory, match=r'[KM]iB for its state and .* nothing was.*"update", "state"'
        ) as caught:
            step(torch.randn(4, 256))
    assert caught.value.committed is False
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"optimizer_safety": "copy"}], ids=["as it is", "copy"])
@pytest.mark.parametrize("bytes_", [2**30, 0], ids=["a host with room", "a host without"])
def test_one_that_cannot_fit_behind_another_update(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], bytes_: int
) -> None:
    """All of it is undone, or it is said that the first one stays: never that nothing moved."""
    monkeypatch.setattr(host, "_left", lambda: bytes_)
    seed_all(5)
    first, second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 256)
    small, large = (torch.optim.AdamW(m.parameters()) for m in (first, second))
    parameters = [*first.parameters(), *second.parameters()]

    @oomkit.auto_batch(ladder=(), **options)
    def step(x: torch.Tensor) -> None:
        second(first(x)).sum().backward()
        small.step()
        large.step()

    before = [p.detach().clone() for p in parameters]
    gc.collect()  # what tests before it have left counts in the base
    base = oomkit.memory("cpu").allocated or 0
    with (
        oomkit.limit_memory(base + 800_000, device="cpu"),
        pytest.raises(oomkit.OomkitError) as caught,
    ):
        step(torch.randn(4, 64))
    cause = "for its state and .* nothing was updated"
    if bytes_ == 0 and not options:
        assert isinstance(caught.value, oomkit.PartialUpdate)
        assert re.search(cause, str(caught.value.__cause__))
        assert len(small.state) == 2
        return
    assert isinstance(caught.value, oomkit.OutOfMemory)
    assert re.search(cause, str(caught.value))
    assert caught.value.committed is False
    assert not small.state
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_a_fused_update_under_a_scaler_goes_in_parts() -> None:
    """It divides the gradients where they lie: a part that fails is not repeated by itself."""
    drawn = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 256, generator=drawn) for _ in range(3)]

    def run(budget: int | None) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        with contextlib.ExitStack() as stack:
            if budget is not None:
                gc.collect()
                base = oomkit.memory("cpu").allocated or 0
                stack.enter_context(oomkit.limit_memory(base + budget, device="cpu"))
            for x in batches:
                step(x)
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.parameters(), *states], step

    plain, _ = run(None)
    values, step = run(1_700_000)  # gradients and state are 2.3 MB
    assert step.records[-1].rung == 2
    for a, b in zip(plain, values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("ladder", ["auto", ()], ids=str)
def test_a_ladder_that_cannot_help_is_not_advised(ladder: Any) -> None:
    """A parameter that is in a group twice has two updates: they are not made in parts."""
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW([*model.parameters(), model.weight])

    @oomkit.auto_batch(ladder=ladder)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    base = oomkit.memory("cpu").allocated or 0
    with oomkit.limit_memory(base + 600_000, device="cpu"):
        with pytest.raises(oomkit.OutOfMemory, match="whose update can be made in parts") as caught:
            step(torch.randn(4, 256))
    assert "ladder=" not in str(caught.value).partition("\n")[0]


@pytest.mark.parametrize("earlier", [0, 1], ids=["first call", "later call"])
def test_between_two_optimizers_that_were_not_found(earlier: int) -> None:
    """Lightning's manual optimization: one of two optimizers has stepped, the other has not."""

    class Trainer:
        optimizers: list[torch.optim.Optimizer]

    class Adversaries(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
            self.trainer = Trainer()
            self.trainer.optimizers = [
                torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)
            ]
            self.fails = False

        @oomkit.auto_batch
        def training_step(self, x: torch.Tensor) -> None:
            for net, optimizer in zip((self.one, self.two), self.trainer.optimizers, strict=True):
                optimizer.zero_grad()
                second = net is self.two
                with inject_oom() if self.fails and second else contextlib.nullcontext():
                    loss = net(x).pow(2).mean()
                loss.backward()
                optimizer.step()

    module = Adversaries()
    for _ in range(earlier):
        module.training_step(torch.randn(4, 3))
    before = [net.weight.detach().clone() for net in (module.one, module.two)]
    module.fails = True
    with pytest.raises(oomkit.PartialUpdate):
        module.training_step(torch.randn(4, 3))
    assert not torch.equal(before[0], module.one.weight)
    assert torch.equal(before[1], module.two.weight)


def test_parameters_without_a_gradient_are_not_counted_as_state() -> None:
    with_one, without = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([with_one, without])
    with_one.grad = torch.ones(8)
    assert oomkit.optim.state_bytes(optimizer) == 2 * 8 * 4
    without.grad = torch.ones(1000)
    assert oomkit.optim.state_bytes(optimizer) == 2 * 1008 * 4
