"""Modules with buffers that no name of the step leads to: torch tells that they run."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

import oomkit
from oomkit.testing import inject_oom

from .unseen import Row, step_with

SEED = 11
STEPS = 4
ROWS = 8


class Counted(nn.Module):
    """Its buffers tell by what, and of how many rows, it was run."""

    def __init__(self, replaces: bool = False, size: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("total", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.replaces:
                self.total = self.total + x.sum()
                self.rows = self.rows + len(x)
            else:
                self.total += x.sum()
                self.rows += len(x)
        return x


HIDDEN: dict[str, nn.Module] = {}


class Far:
    """Its method reads a global, where no search of the step looks."""

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return HIDDEN[name](x)

    def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return HIDDEN[name](x)


class Program:
    """A known layer, and what only `far` leads to."""

    def __init__(self, hidden: nn.Module, around: bool) -> None:
        torch.manual_seed(SEED)
        self.layer = layer = nn.Linear(4, 4)
        self.optimizer = optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        HIDDEN["it"] = nn.Sequential(layer, hidden) if around else hidden
        far = Far()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            out = far.run("it", x) if around else layer(far.run("it", x))
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = far.run("it", x) if around else layer(far.run("it", x))
            return F.mse_loss(out, y)

        self.step, self.loss = step, loss

    def whole(self, call: Callable[..., Any], returned: bool = False, **fails: Any) -> None:
        generator = torch.Generator().manual_seed(SEED)
        at = fails.pop("at", None)
        for number in range(STEPS):
            x, y = torch.randn(2, ROWS, 4, generator=generator)
            if number != at:
                self.one(call, returned, x, y)
                continue
            with inject_oom(**fails):
                self.one(call, returned, x, y)

    def one(self, call: Callable[..., Any], returned: bool, *batch: torch.Tensor) -> None:
        if returned:
            self.optimizer.zero_grad()
            call(*batch).backward()
            self.optimizer.step()
        else:
            call(*batch)


def compare(kept: Counted, expected: Counted, program: Program, plain: Program) -> None:
    torch.testing.assert_close(kept.total, expected.total, rtol=1e-5, atol=1e-5)
    assert kept.rows == expected.rows == STEPS * ROWS
    torch.testing.assert_close(program.layer.weight, plain.layer.weight)


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    assert not any(m._forward_pre_hooks for it in HIDDEN.values() for m in it.modules())
    HIDDEN.clear()


@pytest.mark.sample(32)
@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("returned", [False, True], ids=["step", "returned"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("at", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("size", [(), (20000,)], ids=["small", "large"])
@pytest.mark.parametrize("replaces", [False, True], ids=["in-place", "replaced"])
@pytest.mark.parametrize("around", [False, True], ids=["beside", "around"])
def test_its_buffers_see_the_batch_once(
    around: bool, replaces: bool, size: tuple[int, ...], at: int, phase: str, returned: bool
) -> None:
    expected = Counted(replaces, size)
    plain = Program(expected, around)
    plain.whole(plain.loss if returned else plain.step, returned)
    counted = Counted(replaces, size)
    program = Program(counted, around)
    call = oomkit.auto_batch(program.loss if returned else program.step)
    program.whole(call, returned, at=at, nth=1, phase=phase)
    compare(counted, expected, program, plain)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_statistics_are_those_of_the_micro_batches_alone() -> None:
    """As with a model that the step names: each micro-batch moves them once."""
    statistics = []
    for hidden in (True, False):
        norm = nn.BatchNorm1d(4)
        program = Program(norm, around=False)
        call = (
            oomkit.auto_batch(program.step)
            if hidden
            else oomkit.auto_batch(program.step, participants=[norm])
        )
        program.whole(call, at=0, nth=1, phase="forward")
        statistics.append((norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for mine, known in zip(*statistics, strict=True):
        torch.testing.assert_close(mine, known, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_an_evaluation_leaves_them_as_one_batch_does() -> None:
    HIDDEN["it"] = counted = Counted()
    far = Far()

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return far.run("it", x) * 2

    x = torch.randn(ROWS, 4)
    with inject_oom(nth=3, phase="forward"):
        out = evaluate(x)
    torch.testing.assert_close(out, x * 2)
    assert counted.rows == ROWS


def test_a_module_that_the_step_makes_lives_no_longer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[Any] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        for _ in range(3):
            learner = copy.deepcopy(model)
            alive.append(weakref.ref(learner))
            loss = loss + learner(x).square().mean().detach()
            del learner
            assert [ref() for ref in alive] == [None] * len(alive)
        loss.backward()
        optimizer.step()

    step(torch.randn(ROWS, 4))
    assert len(alive) == 3


def swapped(kind: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The module runs with other buffers for a while."""
    other = {
        name: torch.full_like(buffer, 3)
        for name, buffer in itertools.chain(module.named_buffers(), module.named_parameters())
    }
    if kind == "functional_call":
        return torch.func.functional_call(module, other, (x,))
    if kind == "vmap":
        both = {name: torch.stack([value, value]) for name, value in other.items()}
        run = torch.func.vmap(lambda s: torch.func.functional_call(module, s, (x,)))
        return run(both).mean(0)
    if kind == "context":
        with stateless._reparametrize_module(module, other):
            return module(x)
    if kind == "export":
        torch.export.export(module, (x,))
        return x
    raise ValueError(kind)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("kind", ["functional_call", "vmap", "context", "export"])
def test_buffers_that_others_replace_for_a_while_are_left_alone(kind: str) -> None:
    """What stands in the module while it runs is not what it had when the step began."""
    norm = nn.BatchNorm1d(4).eval()
    program = Program(norm, around=False)
    layer, optimizer = program.layer, program.optimizer

    class Swapping(Far):
        def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
            return swapped(kind, HIDDEN[name], x)

    far = Swapping()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(layer(far.run("it", x)), y).backward()
        optimizer.step()

    own = dict(norm.named_buffers())
    x, y = torch.randn(2, ROWS, 4)
    with inject_oom(nth=1, phase="backward"):
        step(x, y)
    for name, buffer in norm.named_buffers():
        assert buffer is own[name]
        assert buffer.eq(1 if name == "running_var" else 0).all()


class Around(Counted):
    """It moves its buffers, and then lets another module run."""

    def __init__(self, far: Far) -> None:
        super().__init__()
        self.far = far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far.run("second", super().forward(x))


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("at", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("known", [True, False])
def test_a_buffer_of_two_modules_goes_back_to_where_it_was(known: bool, at: int) -> None:
    far = Far()
    first, second = Around(far), Counted()
    second._buffers.update(first._buffers)
    HIDDEN.update({"first": first, "second": second})
    options: dict[str, Any] = {"participants": [first]} if known else {}
    step = step_with(partial(far.run, "first"), nn.Linear(4, 4), **options)
    for _ in range(at):
        step(torch.ones(ROWS, 4))
    with inject_oom(nth=1, phase="backward"):
        step(torch.ones(ROWS, 4))
    assert first.rows == 2 * ROWS * (at + 1)


class Preparing(Far):
    """It writes to the module before it lets it run."""

    def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            HIDDEN[name].rows += 1
        return HIDDEN[name](x)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_one_that_was_written_to_before_it_ran_is_refused() -> None:
    """What it had at entry is not known; from the second call on it is."""
    counted = Counted()
    program = Program(counted, around=False)
    far = Preparing()
    step = step_with(lambda x: far.run("it", x), program.layer, verify=False)
    with (
        inject_oom(nth=1, phase="backward"),
        pytest.raises(oomkit.SplitError, match=r"a Counted runs in it .* pass model="),
    ):
        step(torch.ones(ROWS, 4))


class NoCopies(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            raise RuntimeError("no copies")
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_copy_that_cannot_be_made_is_no_error_of_the_step() -> None:
    counted = Counted(size=(20000,))
    program = Program(counted, around=False)
    layer, optimizer, far = program.layer, program.optimizer, Far()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with NoCopies():
            out = far.run("it", x)
        layer(out).square().mean().backward()
        optimizer.step()

    with (
        inject_oom(nth=1, phase="backward"),
        pytest.raises(oomkit.SplitError, match=r"a Counted runs in it .* pass model="),
    ):
        step(torch.ones(ROWS, 4))
    assert counted.rows == ROWS  # as the failed attempt has left it, of which the error tells


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("kind", ["meta", "expanded", "saved"])
def test_what_has_not_moved_is_not_written_to(kind: str) -> None:
    """Nor copied where it has no values."""
    scaled = Scaled()
    if kind == "meta":
        scaled.register_buffer("other", torch.empty(3, device="meta"))
    elif kind == "expanded":
        scaled.scale = torch.full((1,), 0.5).expand(4)
    else:
        scaled.scale = torch.full((4,), 0.5)
    program = Program(scaled, around=False)
    weight = torch.ones(4, requires_grad=True)
    pending = (weight * scaled.scale).sum()
    x, y = torch.randn(2, ROWS, 4)
    with inject_oom(nth=1, phase="backward"):
        oomkit.auto_batch(program.step)(x, y)
    pending.backward()
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("kind", ["lazy", "forward"])
def test_one_that_was_not_marked_in_time_is_refused(kind: str) -> None:
    """Its statistics were made, or moved, before they could be marked."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.norm.forward(x))

    program = Program(nn.LazyBatchNorm1d() if kind == "lazy" else Twice(), around=False)
    x, y = torch.randn(2, ROWS, 4)
    with inject_oom(nth=1, phase="backward"), pytest.raises(oomkit.OomkitError, match="model="):
        oomkit.auto_batch(program.step)(x, y)


class Ready(nn.Module):
    """It makes its buffers ready when it first runs, or when it gets more rows than before."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(4))
        self.ready, self.grows, self.most = False, grows, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grows and len(x) > self.most:
            self.most = len(x)
            self.scale = torch.full((4,), 1.0 if len(x) < 3 else 0.5)
        elif not self.grows and not self.ready:
            self.ready = True
            with torch.no_grad():
                self.scale.fill_(2)
        return x * self.scale


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("returned", [False, True], ids=["step", "returned"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_it_notes_of_its_buffers_goes_back_with_them(at: int, returned: bool) -> None:
    expected, ready = Ready(False), Ready(False)
    plain = Program(expected, around=False)
    plain.whole(plain.loss if returned else plain.step, returned)
    program = Program(ready, around=False)
    call = oomkit.auto_batch(program.loss if returned else program.step)
    program.whole(call, returned, at=at, nth=1, phase="backward")
    assert ready.ready
    assert torch.equal(ready.scale, expected.scale)
    torch.testing.assert_close(program.layer.weight, plain.layer.weight)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_what_a_failed_call_noted_of_its_buffers_goes_back_with_them() -> None:
    """In a later call, which gets more rows than any before and runs out of memory."""
    weights = []
    for fails in (False, True):
        torch.manual_seed(SEED)
        ready, layer = Ready(grows=True), nn.Linear(4, 4)
        step = step_with(Row(ready), layer)
        step(torch.ones(2, 4))
        with inject_oom(nth=1, phase="backward") if fails else contextlib.nullcontext():
            step(torch.ones(ROWS, 4))
        assert ready.scale.eq(0.5).all()
        weights.append(layer.weight)
    torch.testing.assert_close(*weights)


class Listed(nn.Module):
    """It makes its buffer ready where a list or a dictionary of its own is empty."""

    def __init__(self, notes: list[int] | dict[int, int]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(4))
        self._notes = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._notes:
            with torch.no_grad():
                self.scale.fill_(2)
            if isinstance(self._notes, list):
                self._notes.append(1)
            else:
                self._notes[1] = 1
        return x * self.scale


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("notes", [[], {}], ids=["list", "dict"])
@pytest.mark.parametrize("at", [0, 1])
def test_what_it_notes_in_a_list_goes_back_too(notes: Any, at: int) -> None:
    weights = []
    for fails in (False, True):
        torch.manual_seed(SEED)
        listed, layer = Listed(copy.copy(notes)), nn.Linear(4, 4)
        step = step_with(Row(listed), layer)
        for number in range(2):
            if fails and number == at:
                with inject_oom(nth=1, phase="backward"):
                    step(torch.ones(ROWS, 4))
            else:
                step(torch.ones(ROWS, 4))
        assert listed.scale.eq(2).all()
        assert len(listed._notes) == 1
        weights.append(layer.weight)
    torch.testing.assert_close(*weights)


class Sometimes(Far):
    """The module has other buffers in its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = HIDDEN[name]
        if self.calls == 0:
            own = {key: value.clone() for key, value in module.named_buffers()}
            return torch.func.functional_call(module, own, (x,))
        return module(x)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_one_that_has_run_takes_part_from_the_next_call_on() -> None:
    counted = Counted()
    program, far = Program(counted, around=False), Sometimes()
    step = step_with(partial(far.run, "it"), program.layer)
    step(torch.ones(ROWS, 4))
    far.calls = 1
    with inject_oom(nth=1, phase="backward"):
        step(torch.ones(ROWS, 4))
    assert counted.rows == ROWS


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("raises", [False, True])
def test_a_large_buffer_is_copied_until_a_call_has_ended_well(raises: bool) -> None:
    """Of a module that the step names, too."""
    counted, layer = Counted(size=(20000,)), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor, fails: bool) -> None:
        optimizer.zero_grad()
        if fails:
            raise ValueError("of the user")
        layer(counted(x)).square().mean().backward()
        optimizer.step()

    if raises:
        with pytest.raises(ValueError, match="of the user"):
            step(torch.ones(ROWS, 4), True)
    with inject_oom(nth=1, phase="backward"):
        step(torch.ones(ROWS, 4), False)
    assert counted.total.eq(4 * ROWS).all()


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("then", ["zeroed", "run", "nothing"])
def test_what_happens_before_the_backward_of_a_returned_loss_stays(then: str) -> None:
    counted = Counted()
    program = Program(counted, around=False)
    loss = oomkit.auto_batch(program.loss)(torch.ones(ROWS, 4), torch.zeros(ROWS, 4))
    if then == "zeroed":
        counted.rows.zero_()
    elif then == "run":
        counted(torch.ones(100, 4))
    with inject_oom(nth=1, phase="backward"):
        loss.backward()
    assert counted.rows == {"zeroed": 0, "run": 100 + ROWS, "nothing": ROWS}[then]


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_key_of_somebody_elses_hook_is_not_taken() -> None:
    """As a module has it that another process has saved."""
    counted = Counted()
    program = Program(counted, around=False)
    for key in range(200):
        counted._forward_pre_hooks[key] = lambda module, args: None
    oomkit.auto_batch(program.step)(torch.ones(ROWS, 4), torch.zeros(ROWS, 4))
    assert len(counted._forward_pre_hooks) == 200
    counted._forward_pre_hooks.clear()


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_each_model_that_a_step_is_given_is_watched() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)

    @oomkit.auto_batch
    def step(layer: nn.Module, far: Far, x: torch.Tensor) -> None:
        layer(far.run("it", x)).square().mean().backward()
        optimizer.step()
        layer.zero_grad()

    for _ in range(3):
        HIDDEN["it"] = counted = Counted()
        with inject_oom(nth=1, phase="backward"):
            step(nn.Linear(4, 4), Far(), torch.ones(ROWS, 4))
        assert counted.rows == ROWS


class Scaled(nn.Module):
    """Its buffer rests."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def late_program(hidden: nn.Module) -> Callable[[bool], None]:
    program = Program(hidden, around=False)
    layer, optimizer, far = program.layer, program.optimizer, Far()

    @oomkit.auto_batch
    def step(x: torch.Tensor, more: bool) -> None:
        optimizer.zero_grad()
        loss = layer(far.run("it", x) if more else x).square().mean()
        loss.backward()
        optimizer.step()

    return lambda more: step(torch.ones(ROWS, 4), more)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("training", [True, False])
def test_one_that_begins_to_run_in_a_call_that_fails_is_refused(training: bool) -> None:
    counted = Counted().train(training)
    step = late_program(counted)
    step(False)
    with (
        inject_oom(nth=1, phase="backward"),
        pytest.raises(oomkit.SplitError, match=r"a Counted runs in it .* pass model="),
    ):
        step(True)
    counted.rows.zero_()
    with inject_oom(nth=1, phase="backward"):  # it is looked for again
        step(True)
    assert counted.rows == ROWS


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_one_whose_buffers_rest_is_not_refused() -> None:
    step = late_program(Scaled())
    step(False)
    with inject_oom(nth=1, phase="backward"):
        step(True)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_copy_that_the_step_makes_is_not_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        learner = copy.deepcopy(model)
        (model(x) + learner(x).detach()).square().mean().backward()
        optimizer.step()

    step(torch.randn(ROWS, 4))
    step(torch.randn(ROWS, 4))
    with inject_oom(nth=1, phase="backward"):
        step(torch.randn(ROWS, 4))


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_after_a_call_that_ended_with_an_error_it_is_looked_for_again() -> None:
    counted = Counted()
    program = Program(counted, around=False)
    layer, optimizer, far = program.layer, program.optimizer, Far()

    @oomkit.auto_batch
    def step(x: torch.Tensor, fails: bool) -> None:
        optimizer.zero_grad()
        if fails:
            raise ValueError("of the user")
        layer(far.run("it", x)).square().mean().backward()
        optimizer.step()

    with pytest.raises(ValueError, match="of the user"):
        step(torch.ones(ROWS, 4), True)
    with inject_oom(nth=1, phase="backward"):
        step(torch.ones(ROWS, 4), False)
    assert counted.rows == ROWS


def seen_hooks(calls: int) -> list[int]:
    """How many are there in each call, with three modules that have buffers, one of them known."""
    known = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    program = Program(nn.Sequential(Counted(), nn.Flatten(), Counted()), around=False)
    optimizer, far = program.optimizer, Far()
    modules = deque([*known.modules(), *HIDDEN["it"].modules()])  # where no search looks
    seen: list[int] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        program.layer(known(far.run("it", x))).square().mean().backward()
        seen.append(sum(len(m._forward_pre_hooks) for m in modules))
        optimizer.step()

    for _ in range(calls):
        step(torch.ones(ROWS, 4))
    return seen


def test_modules_are_asked_in_the_first_call_alone() -> None:
    assert seen_hooks(4) == [2, 0, 0, 0]


def test_where_anything_is_compiled_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as dynamo

    monkeypatch.setitem(dynamo.counters, "frames", {"total": 1})
    assert seen_hooks(2) == [0, 0]


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_threads_see_their_own() -> None:
    """Both watch all that are hidden."""
    HIDDEN.update({"a": Counted(), "b": Counted()})
    turn = threading.Barrier(2)
    errors: list[BaseException] = []

    def train(name: str, fails: bool) -> None:
        layer, far = nn.Linear(4, 4), Far()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        told = Seen()

        def once(what: str) -> bool:
            told.append(what)
            return list(told).count(what) == 1

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            out = far.run(name, x)
            if once("begun"):
                turn.wait(60)  # both are inside a first call, with what they have seen
                if fails:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
                turn.wait(60)
            layer(out).square().mean().backward()
            optimizer.step()
            if fails and once("ended"):
                turn.wait(60)

        try:
            step(torch.ones(ROWS, 4))
        except BaseException as error:
            errors.append(error)
            turn.abort()

    threads = [
        threading.Thread(target=train, args=("a", True)),
        threading.Thread(target=train, args=("b", False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [HIDDEN[name].rows for name in "ab"] == [ROWS, ROWS]


class Within:
    """What happens inside a step, where no search looks."""

    def __init__(self, train: Callable[[Any], None] | None) -> None:
        self.train = train

    def __call__(self) -> None:
        self.run()

    def run(self) -> None:
        if self.train is not None:
            train, self.train = self.train, None
            thread = threading.Thread(target=train, args=(Within(None),))
            thread.start()
            thread.join()
            assert HIDDEN["it"].rows == ROWS
            assert len(HIDDEN["it"]._forward_pre_hooks) == 1


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_what_another_thread_watched_is_watched_still() -> None:
    """Its first call begins and ends inside this one, and takes out its own hook alone."""
    HIDDEN.update({"it": Counted()})

    def train(within: Within) -> None:
        layer, far = nn.Linear(4, 4), Far()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            within.run()
            layer(far.run("it", x)).square().mean().backward()
            optimizer.step()

        step(torch.ones(ROWS, 4))

    train(Within(train))
    assert HIDDEN["it"].rows == 2 * ROWS
