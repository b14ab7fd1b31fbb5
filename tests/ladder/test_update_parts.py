"""An update in parts is the whole update, to the last bit, wherever memory runs out in it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from helpers.messages import message_of
from helpers.sample import sampled
from torch.optim.lr_scheduler import StepLR

import oomkit
from ladder.optimizers import CONFIGS, Config, Program, same
from oomkit.testing import inject_oom

SEED = 11
BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(SEED + i)) for i in range(4)]
ids = [str(c) for c in CONFIGS]


def protected(program: Program | WithTable, **options: Any) -> Any:
    return oomkit.auto_batch(**{"optimizer": program.optimizer, "batch": "x", **options})(
        lambda x: program.step(x)
    )


def values(picture: dict[str, Any]) -> dict[str, Any]:
    """What two programs can have in common."""
    return {key: value for key, value in picture.items() if key != "lists"}


def plain(config: Config, steps: int = 4) -> tuple[Program, list[Any]]:
    program = Program(config)
    pictures = [program.picture()]
    for x in BATCHES[:steps]:
        program.step(x)
        pictures.append(program.picture())
    return program, pictures


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_it_is_independent(config: Config, most: int) -> None:
    """oomkit has no part in this: torch's update of some parameters after others is the whole."""
    _, pictures = plain(config)
    program = Program(config)
    lists = [list(g["params"]) for g in program.optimizer.param_groups]
    for x, picture in zip(BATCHES, pictures[1:], strict=True):
        program.backward(x)
        for group, params in zip(program.optimizer.param_groups, lists, strict=True):
            for other in program.optimizer.param_groups:
                other["params"] = []
            for at in range(0, len(params), most):
                group["params"] = params[at : at + most]
                type(program.optimizer).step.__wrapped__(program.optimizer)  # type: ignore[attr-defined]
        for group, params in zip(program.optimizer.param_groups, lists, strict=True):
            group["params"] = params
        assert same(values(program.picture()), values(picture))


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_it_is_bitwise_the_whole_update(config: Config) -> None:
    _, pictures = plain(config)
    program = Program(config)
    step = protected(program, optimizer_safety="parts")
    lists = [g["params"] for g in program.optimizer.param_groups]
    for x, picture in zip(BATCHES, pictures[1:], strict=True):
        step(x)
        after = program.picture()
        assert same(after["state"], picture["state"])
        assert same(after["params"], picture["params"])
        assert same(after["groups"], picture["groups"])
    assert all(a is g["params"] for a, g in zip(lists, program.optimizer.param_groups, strict=True))
    assert [r.rung for r in step.records] == [1] * 4


def allocations(config: Config, calls: int) -> int:
    """How many the update makes in call number `calls`, counted from 0."""
    program = Program(config)
    step = protected(program, optimizer_safety="parts")
    for x in BATCHES[:calls]:
        step(x)
    with inject_oom(nth=10**9, phase="optimizer") as fault:
        step(BATCHES[calls])
    return fault.seen


@pytest.mark.parametrize("calls", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.filterwarnings("ignore")
def test_a_failure_anywhere_in_it_is_undone_and_it_is_made(config: Config, calls: int) -> None:
    _, pictures = plain(config, calls + 1)
    count = allocations(config, calls)
    for nth in sampled(range(1, count + 1), 3):
        program = Program(config)
        step = protected(program, optimizer_safety="parts")
        for x in BATCHES[:calls]:
            step(x)
        with inject_oom(nth=nth, phase="optimizer") as fault:
            step(BATCHES[calls])
        assert fault.fired == 1, nth
        after = program.picture()
        for what in ("params", "state", "grads", "groups"):
            assert same(after[what], pictures[-1][what]), (nth, what)
        assert step.records[-1].accumulation_steps == 1, nth
        assert step.records[-1].ooms == 1, nth


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.filterwarnings("ignore")
def test_for_good_it_is_out_of_memory_with_the_state_of_the_entry(config: Config) -> None:
    count = allocations(config, 1)
    for nth in sampled(range(1, count + 1), 2):
        program = Program(config)
        step = protected(program, optimizer_safety="parts", ladder=())
        step(BATCHES[0])
        before = program.picture()
        with inject_oom(nth=nth, times=None, phase="optimizer"):
            with pytest.raises(oomkit.OutOfMemory) as caught:
                step(BATCHES[1])
        assert not caught.value.committed
        after = program.picture()
        for what in ("params", "state", "groups", "lists"):
            assert same(after[what], before[what]), (nth, what)


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.filterwarnings("ignore")
def test_copies_that_cannot_be_had_leave_the_state_of_the_entry(config: Config) -> None:
    """The host's memory may be gone, too: what oomkit takes for itself fails."""
    if allocations(config, 1) == 0:
        return  # such an update allocates nothing: it cannot run out of memory
    program = Program(config)
    step = protected(program, optimizer_safety="parts", ladder=())
    step(BATCHES[0])
    before = program.picture()
    with inject_oom(nth=1, phase="optimizer", then=inject_oom(times=None, phase="recovery")):
        with pytest.raises((oomkit.OutOfMemory, torch.OutOfMemoryError, oomkit.OomkitError)):
            step(BATCHES[1])
    after = program.picture()
    for what in ("params", "state", "lists"):
        assert same(after[what], before[what]), what


ADAMW = Config("AdamW", {"foreach": False})


def test_hooks_marks_and_counts_are_those_of_one_step() -> None:
    seen: list[str] = []

    def run(options: dict[str, Any]) -> tuple[list[str], Any, int]:
        seen.clear()
        program = Program(ADAMW)
        program.optimizer.register_step_pre_hook(lambda *a: seen.append("before"))
        program.optimizer.register_step_post_hook(lambda *a: seen.append("after"))
        scheduler = StepLR(program.optimizer, 1, 0.5)
        step = protected(program, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for x in BATCHES:
                step(x)
                scheduler.step()
        marks = sum(e.name == "Optimizer.step#AdamW.step" for e in profile.events())
        return list(seen), program.picture(), marks

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns where it sees no step()
        hooks, picture, marks = run({"ladder": ()})
        in_parts = run({"optimizer_safety": "parts"})
    assert in_parts[0] == hooks == ["before", "after"] * 4
    assert same(values(in_parts[1]), values(picture))
    assert in_parts[2] == marks == 4


def test_a_step_of_somebodys_own_on_the_instance_is_never_cut() -> None:
    program = Program(ADAMW)
    calls: list[int] = []
    original = program.optimizer.step

    def mine(closure: Any = None) -> Any:
        calls.append(1)
        return original(closure)

    program.optimizer.step = mine  # type: ignore[method-assign]
    step = protected(program, optimizer_safety="parts")
    step(BATCHES[0])
    assert calls == [1]
    assert step.records[-1].rung == 0


def test_a_scaled_fused_update() -> None:
    config = Config("AdamW", {"fused": True})

    def run(options: dict[str, Any]) -> Any:
        program = Program(config)

        def scaled(x: torch.Tensor) -> None:
            program.optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            program.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            program.step(x)
            del program.optimizer.grad_scale, program.optimizer.found_inf  # type: ignore[attr-defined]

        step = oomkit.auto_batch(optimizer=program.optimizer, batch="x", **options)(scaled)
        for x in BATCHES[1:]:
            step(x)
        return program.picture()

    assert same(values(run({"optimizer_safety": "parts"})), values(run({"ladder": ()})))


def test_a_hook_that_adds_parameters_has_one_update_of_all() -> None:
    program = Program(ADAMW)
    late = torch.nn.Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    added = []

    def add(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if not added:
            added.append(1)
            optimizer.add_param_group({"params": [late]})

    program.optimizer.register_step_pre_hook(add)
    protected(program, optimizer_safety="parts")(BATCHES[0])
    assert not torch.equal(late, torch.ones(3))


class TestRegistered:
    class Own(torch.optim.SGD):
        pass

    def test_a_subclass_is_not_known(self) -> None:
        optimizer = self.Own([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        assert not oomkit.optim.is_independent(optimizer)

    def test_one_that_was_declared_is_and_can_be_taken_back(self) -> None:
        optimizer = self.Own([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        oomkit.register_optimizer(self.Own)
        try:
            assert oomkit.optim.is_independent(optimizer)
        finally:
            oomkit.register_optimizer(self.Own, independent=False)
        assert not oomkit.optim.is_independent(optimizer)

    @pytest.mark.parametrize("given", [3, "AdamW", object()])
    def test_what_is_no_class_is_refused(self, given: object) -> None:
        with pytest.raises(TypeError, match="expected an optimizer class, got"):
            oomkit.register_optimizer(given)  # type: ignore[arg-type]

    def test_lbfgs_is_not_independent(self) -> None:
        assert not oomkit.optim.is_independent(
            torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))])
        )


@pytest.mark.parametrize("given", ["all", ("updates",), 3, None, ("update", 1)])
def test_a_ladder_that_names_no_rung_is_refused(given: object) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        oomkit.auto_batch(ladder=given)(lambda x: x)  # type: ignore[call-overload]
    assert message_of(caught.value) == (
        'ladder= expected "auto" or a tuple of "update", "state", "activations", "recompute", '
        f'"gradients", got {given!r}'
    )


# --- updates that are never cut, because a part of them could not be taken back ---


class WithTable:
    def __init__(self, sparse: bool = False) -> None:
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(40, 8, sparse=sparse)
        self.params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
        self.optimizer = torch.optim.Adagrad([*self.params, self.table.weight], lr=0.1)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        rows = self.table((x[:, 0].abs() * 10).long() % 40)
        sum((((x + rows) @ p).square().mean() for p in self.params), torch.zeros(())).backward()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in (*self.params, self.table.weight)]


def test_a_parameter_twice_in_a_group() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.Adam([p, p])
    assert not oomkit.optim.is_independent(optimizer)


def test_a_part_of_a_fused_update_that_unscales_gradients_is_not_repeated() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], fused=True)
    assert oomkit.optim.update_needs(optimizer)[0] == 2
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    assert oomkit.optim.update_needs(optimizer)[0] == 1


@pytest.mark.filterwarnings("ignore")
def test_a_sparse_gradient_never_ends_in_half_an_update() -> None:
    plain = WithTable(sparse=True)
    before = plain.values()
    plain.step(BATCHES[0])
    after = plain.values()
    for nth in sampled(range(1, 40), 12):
        program = WithTable(sparse=True)
        step = protected(program, optimizer_safety="parts")
        with inject_oom(nth=nth, times=None, phase="optimizer"):
            try:
                step(BATCHES[0])
            except oomkit.OutOfMemory:
                expected = before
            else:
                expected = after
        assert all(map(torch.equal, program.values(), expected)), nth


def test_what_runs_the_parts_cannot_be_called_when_they_are_done() -> None:
    """A traceback of a hook's error keeps it, and a debugger may call it."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    def hook(*_: Any) -> None:
        frame = sys._getframe()
        while "whole" not in frame.f_locals:
            frame = frame.f_back  # type: ignore[assignment]
        kept.append(frame.f_locals["whole"])

    optimizer.register_step_pre_hook(hook)

    @oomkit.auto_batch(optimizer_safety="parts")
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    step(torch.ones(4, 3))
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        kept[0].__wrapped__(optimizer)
