"""Gradients that accumulate in host memory: the same sums, bit for bit, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from helpers.sample import WHOLE, sampled
from helpers.seeds import seed_all
from torch.utils.checkpoint import checkpoint

import oomkit
from ladder.programs import allocated
from oomkit._ladder import host
from oomkit.testing import force_slices, inject_oom

WIDTH, ROWS = 128, 256
LAYER = WIDTH * WIDTH * 4  # bytes


class Deep(torch.nn.Module):
    """A few layers, most of what there is in a step is parameters and gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.kind == "shared" and i % 2:
                x = self.layers[0](x)
        if self.kind == "checkpoints":  # one leaf's gradient comes in several pieces
            for _ in range(3):
                x = checkpoint(lambda y: self.layers[0](y).tanh(), x, use_reentrant=True)
        return x


class Program:
    def __init__(self, kind: str = "plain", dtype: Any = torch.float32, **options: Any) -> None:
        seed_all(4)
        self.model = Deep(kind).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.dtype = dtype
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
        model, optimizer = self.model, self.optimizer
        self.flat: torch.Tensor | None = None

        @oomkit.auto_batch(label="deep", **options)
        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            out = model(x).to(torch.promote_types(dtype, torch.float32))
            loss = out.square().mean()
            if kind == "flat" and self.flat is not None:
                self.flat.zero_()
                if oomkit.current().index == 0:
                    model.layers[0].bias.grad = self.flat
            if kind == "twice":
                out.abs().mean().backward(retain_graph=True)
            loss.backward()
            if kind == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            return loss.item()

        self.step = step

    def picture(self) -> list[Any]:
        values = list(self.model.parameters())
        values += [p.grad for p in values if p.grad is not None]
        if self.dtype == torch.bfloat16:
            values = [v.detach().view(torch.int16) for v in values]
        return [v.detach().numpy().copy() for v in values]

    def one(self) -> None:
        self.step(self.x)

    @property
    def last(self) -> Any:
        return self.step.records[-1]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(numpy.array_equal, a, b))


@contextmanager
def room(layers: float, program: Program, **more: Any) -> Any:
    """Parameters are there; so many layers beside them, of gradients and all the rest."""
    gc.collect()
    size = torch.finfo(program.dtype).bits / 32
    with oomkit.limit_memory(allocated() + int(layers * LAYER * size), device="cpu"):
        yield


KINDS = ("plain", "shared", "checkpoints", "twice", "clipped")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
UPDATES = list(itertools.product(KINDS, DTYPES))
ENOUGH = 6.7  # six layers' gradients, their biases, a row: without room for a seventh


@pytest.mark.parametrize(("kind", "dtype"), sampled(UPDATES, 2, "updates"), ids=str)
def test_updates_are_bitwise_those_of_the_same_slices(kind: str, dtype: Any) -> None:
    program = Program(kind, dtype)
    with room(ENOUGH, program):
        program.one()
        assert program.last.rung == 5
        program.one()
        lengths = [(r.micro_batch_size, r.accumulation_steps) for r in program.step.records]
    plain = Program(kind, dtype, ladder=())
    for size, count in lengths:
        assert count > 1
        slices = [ROWS // count + (i < ROWS % count) for i in range(count)]
        assert max(slices) == size
        with force_slices(slices):
            plain.one()
    assert same(program.picture(), plain.picture())


def test_less_is_needed_than_without() -> None:
    program = Program(ladder=("update", "state", "activations", "recompute"))
    with room(ENOUGH, program), pytest.raises(oomkit.OutOfMemory):
        program.one()


def test_where_the_rungs_below_are_enough_it_is_not_climbed() -> None:
    program = Program()
    with room(ENOUGH + 1.5, program):
        program.one()
        program.one()
    assert program.last.rung < 5
    assert program.last.accumulation_steps > 1


def test_where_the_host_has_no_room_it_is_not_climbed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 600 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    program = Program()
    with room(ENOUGH, program), pytest.raises(oomkit.OutOfMemory):
        program.one()


def test_it_is_said_once_and_remembered(caplog: pytest.LogCaptureFixture) -> None:
    program = Program()
    with room(ENOUGH, program):
        program.one()
        program.one()
        sizes = program.step.state_dict()
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert sum("rung=gradients, gradients accumulate in host memory" in x for x in lines) == 1
    again = Program()
    again.step.load_state_dict(sizes)
    with room(ENOUGH, again):
        again.one()
    assert again.last.rung == 5
    assert again.last.ooms == 0


def test_it_is_climbed_down_when_there_is_room() -> None:
    program = Program()
    with room(ENOUGH, program):
        program.one()
    with room(40, program):
        program.one()
    assert program.last.rung == 0


def test_a_table_with_sparse_gradients_keeps_them() -> None:
    def make(**options: Any) -> tuple[Any, list[Any]]:
        seed_all(2)
        table = torch.nn.Embedding(400, WIDTH, sparse=True)
        body = Deep("plain")
        optimizer = torch.optim.SGD([*table.parameters(), *body.parameters()], lr=0.1)
        x = torch.randint(400, (ROWS,))

        @oomkit.auto_batch(**options)
        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = body(table(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return (lambda: step(x), step), [
            *table.parameters(), *body.parameters(),
        ]  # fmt: skip

    (run, step), values = make()
    gc.collect()
    with oomkit.limit_memory(allocated() + int((ENOUGH + 2.2) * LAYER), device="cpu"):
        run()
    record = step.records[-1]
    assert record.rung == 5
    (plain, _), expected = make(ladder=())
    count = record.accumulation_steps
    with force_slices([ROWS // count + (i < ROWS % count) for i in range(count)]):
        plain()
    for a, b in zip(values, expected, strict=True):
        assert torch.equal(a, b)
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.layout == b.grad.layout
        assert torch.equal(a.grad.to_dense(), b.grad.to_dense())


def test_no_hook_stays() -> None:
    program = Program()
    with room(ENOUGH, program):
        program.one()
        assert program.last.rung == 5
    assert all(p._post_accumulate_grad_hooks is None for p in program.model.parameters())
    seen = []
    handle = program.model.layers[0].weight.register_post_accumulate_grad_hook(seen.append)
    program.model(program.x).sum().backward()
    assert len(seen) == 1
    handle.remove()
    assert all(p.grad is not None for p in program.model.parameters())


@pytest.mark.no_proof
@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_hook_that_somebody_keeps_does_nothing_behind_its_backward() -> None:
    program = Program()
    kept: list[Any] = []
    weight = program.model.layers[0].weight
    handle = weight.register_hook(
        lambda _: kept.extend((weight._post_accumulate_grad_hooks or {}).values())
    )
    with room(ENOUGH, program):
        program.one()
        assert program.last.rung == 5
    handle.remove()
    before = program.picture()
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        kept[-1](weight)
    assert same(program.picture(), before)


@pytest.mark.no_proof
def test_no_hook_stays_where_a_backward_is_refused() -> None:
    """It is refused after the hooks were set, before the engine runs."""
    program = Program("flat")
    with room(ENOUGH, program):
        program.one()
        assert program.last.rung == 5
        program.flat = torch.zeros(WIDTH)
        with pytest.raises(oomkit.SplitError, match=r"changed in place before the backward\(\)"):
            program.one()
    assert all(p._post_accumulate_grad_hooks is None for p in program.model.parameters())


def test_an_error_of_the_step_leaves_what_was_there() -> None:
    program = Program()
    calls: deque[int] = deque()

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4 and armed:
            raise ValueError("of the step's own")

    armed = False
    handle = program.model.register_forward_pre_hook(fails)
    with room(ENOUGH, program):
        program.one()
        program.one()
        before = [p.detach().numpy().copy() for p in program.model.parameters()]
        calls.clear()
        armed = True
        with pytest.raises(ValueError, match="own"):
            program.one()
        handle.remove()
        assert same([p.detach().numpy() for p in program.model.parameters()], before)
        assert all(p.grad is None for p in program.model.parameters())
        program.one()
        assert program.last.rung == 5


def test_a_loss_that_is_nan_is_the_programs_own() -> None:
    program = Program()
    with room(ENOUGH, program):
        program.one()
        program.x[0, 0] = float("nan")
        assert program.step(program.x) != program.step(program.x)
        assert program.last.rung == 5


def _counted(make: Callable[[], Program], phase: str) -> int:
    program = make()
    with room(ENOUGH, program):
        program.one()
        with inject_oom(nth=10**9, phase=phase) as fault:
            program.one()
    return fault.seen


@pytest.fixture
def proven_in_part() -> Iterator[None]:
    """Of all failures none is in a proof, which makes thousands that are alike; of a sample some
    are."""
    oomkit._C._prove(not WHOLE)
    yield
    oomkit._C._prove(True)


@pytest.mark.parametrize("phase", ["forward", "backward", "recovery"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("proven_in_part")
def test_a_failure_anywhere_is_undone_and_repeated(phase: str) -> None:
    plain = Program(ladder=())
    plain.one()
    plain.one()
    expected = plain.picture()
    for nth in sampled(range(1, _counted(Program, phase) + 1), 2, phase):
        program = Program()
        with room(ENOUGH, program):
            program.one()
            with inject_oom(nth=nth, phase=phase) as fault:
                program.one()
        assert fault.fired == 1
        for a, b in zip(program.picture(), expected, strict=True):
            numpy.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7, err_msg=str(nth))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("proven_in_part")
def test_for_good_it_is_out_of_memory_with_the_state_of_the_entry() -> None:
    for nth in sampled(range(1, _counted(Program, "backward") + 1), 2):
        program = Program()
        with room(ENOUGH, program):
            program.one()
            before = [p.detach().numpy().copy() for p in program.model.parameters()]
            with inject_oom(nth=nth, times=None, phase="backward") as fault:
                try:
                    program.one()
                except oomkit.OutOfMemory as error:
                    assert not error.committed
                else:
                    assert not fault.fired  # runs of a proof differ by some allocations
                    continue
        now = list(program.model.parameters())
        assert same([p.detach().numpy() for p in now], before)
        assert all(p.grad is None for p in now)
        assert all(p._post_accumulate_grad_hooks is None for p in now)


def test_a_thousand_calls_hold_nothing_more() -> None:
    program = Program()
    with room(ENOUGH, program):
        for _ in range(10):
            program.one()
        gc.collect()
        counted, objects = allocated(), len(gc.get_objects())
        for _ in range(1000 if WHOLE else 40):
            program.one()
        gc.collect()
        assert program.last.rung == 5
        assert allocated() == counted
        assert abs(len(gc.get_objects()) - objects) < 50
