"""A parameter too large for its update: some rows at a time, the same numbers bit for bit."""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from helpers.sample import sampled
from ladder.programs import allocated

import oomkit
from oomkit._ladder.rows import ELEMENTWISE, rows_possible, update_rows
from oomkit._ladder.update import _below
from oomkit.testing import inject_oom

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": torch.tensor(0.1)}),
    ("NAdam", {}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("ASGD", {"t0": 2}),
]


def pictures(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[Any]:
    state = optimizer.state.get(p, {})
    assert len(optimizer.state) <= 1
    return [p.detach().numpy().copy(), list(state)] + [
        v.numpy().copy() if isinstance(v, torch.Tensor) else v for v in state.values()
    ]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        numpy.array_equal(x, y) if isinstance(x, numpy.ndarray) else x == y
        for x, y in zip(a, b, strict=True)
    )


def test_every_class_that_is_known_is_compared() -> None:
    assert {name for name, _ in SETTINGS} == ELEMENTWISE


SHAPES = [(101, 97), (513,), (40, 6, 5)]
CASES = [
    (*setting, *case)
    for setting in SETTINGS
    for case in itertools.product(SHAPES, [torch.float32, torch.float64], [False, True])
]


@pytest.mark.parametrize(
    ("name", "options", "shape", "dtype", "foreach"),
    sampled(CASES, len(CASES) // 3, "rows"),
    ids=str,
)
def test_rows_are_updated_as_in_the_whole(
    name: str, options: dict[str, Any], shape: tuple[int, ...], dtype: Any, foreach: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    options = {"lr": 0.1, "foreach": foreach, **options}
    if foreach and isinstance(options["lr"], torch.Tensor):
        options["lr"] = 0.1
    start = torch.randn(*shape, generator=generator, dtype=dtype)
    plain, cut = (torch.nn.Parameter(start.clone()) for _ in range(2))
    one, other = (getattr(torch.optim, name)([p], **options) for p in (plain, cut))
    for rows in (1, 7, 16, shape[0]):
        grad = torch.randn(*shape, generator=generator, dtype=dtype)
        plain.grad, cut.grad = grad.clone(), grad.clone()
        one.step()
        hosted: dict[int, torch.Tensor] = {}
        identity = {k: id(v) for k, v in other.state.get(cut, {}).items()}
        assert rows_possible(other, cut)
        update_rows(
            other,
            _below(type(other).step),
            (other,),
            {},
            cut,
            rows,
            hosted,
            lambda t: t.detach().clone(),
        )
        other.param_groups[0]["params"] = [cut]
        assert same(pictures(other, cut), pictures(one, plain))
        assert torch.equal(cut.grad, grad)
        now = other.state.get(cut, {})
        if identity:
            assert all(id(now[k]) == i for k, i in identity.items() if torch.is_tensor(now[k]))
        else:
            assert {id(v) for v in hosted.values()} == {
                id(v) for v in now.values() if torch.is_tensor(v) and v.shape == cut.shape
            }


class Strange(torch.optim.SGD):
    pass


def test_what_is_not_cut() -> None:
    p = torch.nn.Parameter(torch.zeros(8, 8))

    def may(p: torch.nn.Parameter, cls: Any = torch.optim.AdamW, **options: Any) -> bool:
        p.grad = torch.zeros_like(p)
        return rows_possible(cls([p], **options), p)

    assert may(p)
    assert not may(p, fused=True)
    assert not may(p, torch.optim.Adafactor)
    assert not may(p, torch.optim.Muon)
    assert not may(p, Strange)
    assert not may(torch.nn.Parameter(torch.zeros(1, 8)))
    assert not may(torch.nn.Parameter(torch.zeros(())))
    assert not may(torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16)))
    assert not may(torch.nn.Parameter(torch.zeros(8, 8).t()[:, :4]))


# --- in a step ---

WORDS, WIDTH, ROWS = 3000, 16, 32
TABLE = WORDS * WIDTH * 4


class Program:
    """Nearly all of it is one table."""

    def __init__(self, name: str, **options: Any) -> None:
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(WORDS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 4)
        self.x = torch.randint(WORDS, (ROWS, 6))
        given: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
        parameters = [*self.table.parameters(), *self.head.parameters()]
        self.optimizer = getattr(torch.optim, name)(parameters, **given)
        table, head, optimizer = self.table, self.head, self.optimizer

        @oomkit.auto_batch(label="table", **options)
        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = head(table(x).mean(1)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        self.step = step

    def run(self, steps: int) -> list[float]:
        return [self.step(self.x) for _ in range(steps)]

    def picture(self) -> list[Any]:
        values = [p.detach().numpy().copy() for p in (self.table.weight, *self.head.parameters())]
        for state in self.optimizer.state.values():
            values += [v.numpy().copy() for v in state.values() if torch.is_tensor(v)]
        return values


@contextmanager
def room(tables: float) -> Any:
    """The table is there; so many more of its size."""
    gc.collect()
    with oomkit.limit_memory(allocated() + int(tables * TABLE), device="cpu"):
        yield


@pytest.fixture(autouse=True)
def _bytes_are_counted() -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass


ENOUGH = 1.3  # its gradient, and a little: no room for state beside them, or for a temporary


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "RAdam"])
def test_a_table_is_trained_beside_its_gradient_alone(name: str) -> None:
    plain = Program(name, ladder=())
    losses = plain.run(4)
    expected = plain.picture()
    program = Program(name)
    with room(ENOUGH):
        assert program.run(4) == losses
        records = program.step.records
        assert [r.rung for r in records] == [2] * 4
        assert records[-1].ooms == 0
        assert records[-1].accumulation_steps == 1
    assert same(program.picture(), expected)
    given, wanted = program.optimizer.state_dict(), plain.optimizer.state_dict()
    assert given["param_groups"] == wanted["param_groups"]
    assert given["state"].keys() == wanted["state"].keys()


def test_where_there_is_room_again_it_is_updated_whole() -> None:
    program = Program("AdamW")
    with room(ENOUGH):
        program.run(3)
    with room(12):
        program.run(12)
    assert program.step.records[-1].rung == 0
    plain = Program("AdamW", ladder=())
    plain.run(15)
    assert same(program.picture(), plain.picture())


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_failure_anywhere_in_the_update_is_undone_and_repeated(calls: int, times: int) -> None:
    plain = Program("AdamW", ladder=())
    plain.run(calls + 1)
    expected = plain.picture()

    def faulted(nth: int) -> tuple[Program, Any]:
        program = Program("AdamW")
        with room(ENOUGH + 0.1):
            program.run(calls)
            with inject_oom(nth=nth, times=times, phase="optimizer") as fault:
                program.run(1)
        return program, fault

    for nth in sampled(range(1, faulted(10**9)[1].seen + 1), 12):
        program, fault = faulted(nth)
        assert fault.fired > 0
        assert same(program.picture(), expected), nth


@pytest.mark.filterwarnings("ignore")
def test_for_good_it_is_out_of_memory_with_the_state_of_the_entry() -> None:
    program = Program("AdamW")
    with room(ENOUGH + 0.1):
        program.run(2)
        before = program.picture()
        with inject_oom(nth=10**9, phase="optimizer") as fault:
            program.run(1)
    for nth in sampled(range(1, fault.seen + 1), 6):
        program = Program("AdamW")
        with room(ENOUGH + 0.1):
            program.run(2)
            with inject_oom(nth=nth, times=None, phase="optimizer"):
                with pytest.raises(oomkit.OutOfMemory) as caught:
                    program.run(1)
        assert not caught.value.committed
        assert same(program.picture(), before), nth


def test_many_calls_hold_nothing_more() -> None:
    program = Program("AdamW")
    with room(ENOUGH):
        program.run(12)
        gc.collect()
        counted, objects = allocated(), len(gc.get_objects())
        program.run(60)
        gc.collect()
        assert allocated() == counted
        assert abs(len(gc.get_objects()) - objects) < 50


def test_a_known_class_that_is_declared_too_goes_by_rows() -> None:
    oomkit.register_optimizer(torch.optim.AdamW, independent=True)
    want, found = Program("AdamW"), Program("AdamW")
    losses = want.run(3)
    with room(ENOUGH):
        assert found.run(3) == losses
