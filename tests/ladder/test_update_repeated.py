"""An update that ran out of memory is repeated so that nothing of it is done twice, and no smaller
micro-batch is tried where none helps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from helpers.sample import sampled

import oomkit
from ladder.test_host_state import PARAMS, Program, allocated, room, same
from ladder.test_update_parts import BATCHES
from oomkit.testing import inject_oom


class Decayed(torch.optim.Optimizer):
    """Adds the decay to the gradients themselves, as older optimizers do, and counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.5})
        self.updated = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.updated += 1
                state = self.state[p]
                p.grad.add_(p, alpha=group["decay"])
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad * 0.1)
                p.sub_(state["mean"] * group["lr"])


@pytest.fixture
def declared() -> Iterator[None]:
    oomkit.register_optimizer(Decayed)
    yield
    oomkit.register_optimizer(Decayed, independent=False)


class Small:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
        self.optimizer = Decayed(self.params)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        sum(((x @ p).square().mean() for p in self.params), torch.zeros(())).backward()
        self.optimizer.step()

    def picture(self) -> list[torch.Tensor]:
        state = [s["mean"] for s in self.optimizer.state.values()]
        grads = [p.grad for p in self.params if p.grad is not None]
        counted = torch.tensor(self.optimizer.updated)
        return [x.detach().clone() for x in (*self.params, *state, *grads, counted)]


def protected(program: Small, **options: Any) -> Any:
    return oomkit.auto_batch(optimizer=program.optimizer, batch="x", **options)(
        lambda x: program.step(x)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_one_that_writes_to_gradients(declared: None, calls: int, times: int) -> None:
    plain = Small()
    for x in BATCHES[: calls + 1]:
        plain.step(x)
    counting = Small()
    step = protected(counting, optimizer_safety="parts")
    for x in BATCHES[:calls]:
        step(x)
    with inject_oom(nth=10**9, phase="optimizer") as fault:
        step(BATCHES[calls])
    for nth in sampled(range(1, fault.seen + 1), 10):
        program = Small()
        step = protected(program, optimizer_safety="parts")
        for x in BATCHES[:calls]:
            step(x)
        with inject_oom(nth=nth, times=times, phase="optimizer") as fault:
            step(BATCHES[calls])
        assert fault.fired == times
        assert all(map(torch.equal, program.picture(), plain.picture())), nth


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls", [0, 1])
def test_one_that_never_fits_ends(declared: None, calls: int) -> None:
    program = Small()
    step = protected(program, optimizer_safety="parts")
    for x in BATCHES[:calls]:
        step(x)
    before = [p.detach().clone() for p in program.params]
    with inject_oom(nth=1, times=None, phase="optimizer"):
        with pytest.raises(oomkit.OutOfMemory):
            step(BATCHES[calls])
    assert all(map(torch.equal, program.params, before))
    step(BATCHES[calls])
    assert step.records[-1].ooms == 0


@pytest.mark.filterwarnings("ignore")
def test_one_whose_state_does_not_fit(declared: None) -> None:
    def training(budget: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(16)]  # 256 KiB
        optimizer = Decayed(params)
        rungs = []

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            for p in params:
                (x @ p).square().mean().backward()
            optimizer.step()

        gc.collect()
        with oomkit.limit_memory(allocated() + budget, device="cpu"):
            for i in range(4):
                step(torch.randn(4, 64, generator=torch.Generator().manual_seed(i)))
                rungs.append(step.records[-1].rung)
            assert rungs == ([0] * 4 if budget > 1 << 30 else [2] * 4)
        return [p.detach().clone() for p in params]

    expected = training(1 << 40)
    # Gradients take as much as parameters, and so does the state.
    assert all(map(torch.equal, training(400 << 10), expected))


@pytest.mark.filterwarnings("ignore")
def test_twice_in_a_call() -> None:
    class Twice(Small):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.AdamW(self.params)  # type: ignore[assignment]

        def step(self, x: torch.Tensor) -> None:
            super().step(x)
            self.optimizer.step()

        def picture(self) -> list[torch.Tensor]:
            return [p.detach().clone() for p in self.params]

    plain = Twice()
    plain.step(BATCHES[0])
    step = protected(Twice(), optimizer_safety="parts")
    with inject_oom(nth=10**9, phase="optimizer") as fault:
        step(BATCHES[0])
    for nth in sampled(range(1, fault.seen + 1), 12):
        program = Twice()
        step = protected(program, optimizer_safety="parts")
        with inject_oom(nth=nth, phase="optimizer"):
            step(BATCHES[0])
        assert all(map(torch.equal, program.picture(), plain.picture())), nth


@pytest.mark.filterwarnings("ignore")
def test_no_smaller_micro_batch_is_tried_and_none_is_remembered() -> None:
    program = Program("AdamW", ladder=())
    program.run(2)
    before = program.picture()
    with inject_oom(nth=1, times=None, phase="optimizer"):
        with pytest.raises(oomkit.OutOfMemory, match="smaller ones do not help") as caught:
            program.run(1)
    attempts = caught.value.report.attempts
    assert [a["micro_batch_size"] for a in attempts] == [8, 8, 4]
    assert same(program.picture(), before)
    program.run(1)
    assert program.step.records[-1].accumulation_steps == 1


@pytest.mark.filterwarnings("ignore")
def test_what_the_step_holds_beside_its_update_is_made_smaller() -> None:
    """Logits that are alive while the optimizer steps: there smaller micro-batches help."""
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 4096, bias=False)  # 1 MiB
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    @oomkit.auto_batch(ladder=())
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = model(x)
        logits.square().mean().backward()
        optimizer.step()
        del logits

    gc.collect()
    # Gradients, state and three temporaries: 6 MiB; logits of 256 rows: 4 MiB.
    with oomkit.limit_memory(allocated() + (15 << 19), device="cpu"):
        for _ in range(3):
            step(torch.randn(256, 64))
        step.records[-1]
    assert step.records[-1].accumulation_steps >= 2
    assert step.records[-1].ooms == 0


def test_a_checkpoint_that_is_loaded_leaves_nothing_on_the_host() -> None:
    with room(2.8):
        program = Program("AdamW")
        program.run(3)
        optimizer = program.optimizer
        hosted = oomkit._ladder.state.hosted_state(optimizer, None)
        assert isinstance(hosted, dict) and hosted
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        assert not hosted
        program.run(2)
        state = {id(v) for s in optimizer.state.values() for v in s.values()}
        assert set(hosted) <= state


def test_memory_that_somebody_else_sees_is_not_exchanged() -> None:
    with oomkit.limit_memory(allocated() + (64 << 20), device="cpu"):
        program = Program("AdamW")
        program.run(1)
        program.optimizer.zero_grad()
        state = next(iter(program.optimizer.state.values()))
        seen = state["exp_avg"].view(-1)
        with room(1.3):
            program.run(3)
            assert program.step.records[-1].rung >= 2
    numpy.testing.assert_array_equal(seen.numpy(), state["exp_avg"].detach().numpy().reshape(-1))


@pytest.mark.filterwarnings("ignore")
def test_a_hook_that_changes_the_groups_ends_in_no_half_update_that_is_not_told() -> None:
    program = Small()
    program.optimizer = torch.optim.AdamW(program.params, foreach=False)  # type: ignore[assignment]
    late = torch.nn.Parameter(torch.ones(3))
    late.grad = torch.ones(3)

    def add(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [late]})

    program.optimizer.register_step_pre_hook(add)
    step = protected(program, optimizer_safety="parts")
    with inject_oom(nth=12, phase="optimizer") as fault:
        with pytest.raises(oomkit.PartialUpdate, match="after a hook had changed its parameters"):
            step(BATCHES[0])
    assert fault.fired == 1


def test_with_much_room_somebody_elses_is_not_cut(declared: None) -> None:
    program = Small()
    step = protected(program)
    with oomkit.limit_memory(allocated() + (64 << 20), device="cpu"):
        for x in BATCHES:
            step(x)
    assert [r.rung for r in step.records] == [0] * 4
    assert PARAMS > 0


@pytest.mark.filterwarnings("ignore")
def test_after_half_an_update_the_next_ones_go_in_parts() -> None:
    """It was to fit and did not: so little is trusted for a while."""
    program = Program("AdamW")
    program.run(2)
    kept = [p.detach().clone() for p in program.model.parameters()]
    with inject_oom(nth=4, phase="optimizer"), pytest.raises(oomkit.PartialUpdate):
        program.run(1)
    with torch.no_grad():
        for p, value in zip(program.model.parameters(), kept, strict=True):
            p.copy_(value)
    with inject_oom(nth=4, phase="optimizer") as fault:
        program.run(1)
    assert fault.fired == 1
    program.run(12)
    assert [r.rung for r in program.step.records][:4] == [0, 0, 0, 1]
    assert program.step.records[-1].rung == 0
