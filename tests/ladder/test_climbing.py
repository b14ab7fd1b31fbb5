"""Which rung a step stands on: no higher than it must, as long as it must, and said once."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.sample import sampled
from helpers.seeds import seed_all

import oomkit
from ladder.programs import Embedded, Table, allocated
from oomkit._ladder import host
from oomkit.testing import inject_oom

SEED = 21
NEEDED = {("activations",): "activations", ("recompute",): "recompute", "auto": "activations"}


LENGTH, WIDTH = 1024, 32
ROW = LENGTH * WIDTH * 4  # bytes


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


class Tower(torch.nn.Module):
    """Little in parameters, much in what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Program:
    """A deep model, its plain SGD step, and batches that are made in each step."""

    def __init__(
        self, rows: int = 1, lr: float = 0.1, dtype: Any = torch.float32, **options: Any
    ) -> None:
        seed_all(SEED)
        self.model = Tower().to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.rows, self.dtype = rows, dtype
        self.generator = torch.Generator().manual_seed(SEED)
        model, optimizer = self.model, self.optimizer

        @oomkit.auto_batch(label="tower", **options)
        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        self.step = step

    def batch(self) -> torch.Tensor:
        return torch.randn(self.rows, LENGTH, WIDTH, generator=self.generator, dtype=self.dtype)

    def run(self, steps: int) -> list[float]:
        return [self.step(self.batch()) for _ in range(steps)]

    def picture(self) -> list[Any]:
        return [p.detach().numpy().copy() for p in self.model.parameters()]

    @property
    def rungs(self) -> list[int]:
        return [r.rung for r in self.step.records]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(map(numpy.array_equal, a, b))


@contextmanager
def room(size: int) -> Iterator[None]:
    gc.collect()
    with oomkit.limit_memory(allocated() + size, device="cpu"):
        yield


def peak(make: Callable[[], Program], steps: int = 2) -> int:
    """Bytes above what there is now that a program needs at most."""
    gc.collect()
    before = allocated()
    program = make()
    program.run(steps)
    return max(r.peak_allocated or 0 for r in program.step.records) - before


def least(make: Callable[[], Program], high: int) -> int:
    """The smallest room in which it trains two steps."""
    low = 0
    while high - low > high // 50:
        middle = (low + high) // 2
        try:
            with room(middle):
                make().run(2)
            high = middle
        except (oomkit.OutOfMemory, torch.OutOfMemoryError):
            low = middle
    return high


@pytest.fixture(scope="module")
def rooms() -> dict[str, int]:
    """What the program needs with each ladder, in bytes."""
    with oomkit.limit_memory("1GB", device="cpu"):
        pass
    logging.disable(logging.WARNING)
    whole = peak(lambda: Program(ladder=()))
    found = {"plain": whole}
    for name, ladder in {
        "activations": ("activations",),
        "recompute": ("recompute",),
        "both": ("activations", "recompute"),
    }.items():
        found[name] = least(lambda ladder=ladder: Program(ladder=ladder), whole)  # type: ignore[misc]
    logging.disable(logging.NOTSET)
    print(found)
    return found


def test_each_rung_needs_less(rooms: dict[str, int]) -> None:
    assert rooms["activations"] < 0.5 * rooms["plain"]
    assert rooms["recompute"] < 0.7 * rooms["plain"]
    # A module that is computed again needs all of its own at that time.
    assert rooms["both"] < 0.35 * rooms["plain"]


def test_where_host_memory_is_short_modules_are_computed_again(
    rooms: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 1024 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    with room(rooms["recompute"] + ROW):
        program = Program()
        program.run(3)
        assert program.rungs == [4, 4, 4]


def test_it_is_bitwise_the_plain_program(rooms: dict[str, int]) -> None:
    plain = Program(ladder=())
    losses = plain.run(4)
    expected = plain.picture()
    del plain
    with room(rooms["activations"]):
        program = Program()
        assert program.run(4) == losses
        assert program.rungs == [3, 3, 3, 3]
        assert same(program.picture(), expected)


def test_recomputation_too(rooms: dict[str, int]) -> None:
    plain = Program(ladder=())
    losses = plain.run(4)
    expected = plain.picture()
    del plain
    with room(rooms["recompute"]):
        program = Program(ladder=("recompute",))
        assert program.run(4) == losses
        assert program.rungs == [4, 4, 4, 4]
        assert same(program.picture(), expected)


def test_where_micro_batches_are_enough_nothing_is_climbed(rooms: dict[str, int]) -> None:
    with room(int(1.3 * rooms["plain"])):
        program = Program(rows=6)
        program.run(4)
        assert program.rungs == [0, 0, 0, 0]
        assert program.step.records[-1].accumulation_steps > 1


def test_more_rows_fit_with_it_than_without(rooms: dict[str, int]) -> None:
    with room(int(0.97 * rooms["plain"])):
        program = Program(rows=4)
        program.run(8)
        assert set(program.rungs) == {3}
        assert program.step.records[0].accumulation_steps == 4
        assert program.step.records[-1].accumulation_steps < 4


def test_without_the_rung_it_is_out_of_memory(rooms: dict[str, int]) -> None:
    with room(rooms["activations"]):
        program = Program(ladder=("update", "state"))
        before = program.picture()
        with pytest.raises(oomkit.OutOfMemory):
            program.run(1)
        assert same(program.picture(), before)


def test_slices_on_it_are_the_whole_batch_in_double_precision(rooms: dict[str, int]) -> None:
    def program(**options: Any) -> Program:
        made = Program(rows=4, dtype=torch.float64, **options)
        for block in made.model.blocks:
            block.dropout.p = 0.0  # type: ignore[union-attr, assignment]
        return made

    whole = program(ladder=())
    losses = whole.run(3)
    expected = whole.picture()
    assert whole.step.records[-1].accumulation_steps == 1
    del whole
    with room(3 * rooms["activations"]):  # two for numbers of twice the bytes
        split = program()
        found = split.run(3)
        assert set(split.rungs) == {3}
        assert split.step.records[-1].accumulation_steps > 1
        numpy.testing.assert_allclose(found, losses, rtol=1e-12, atol=0)
        for a, b in zip(split.picture(), expected, strict=True):
            numpy.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_it_is_climbed_down_when_there_is_room(rooms: dict[str, int]) -> None:
    with room(rooms["activations"]):
        program = Program()
        program.run(2)
    with room(2 * rooms["plain"]):
        program.run(2)
    assert program.rungs == [3, 3, 0, 0]


def test_it_is_remembered(rooms: dict[str, int]) -> None:
    with room(rooms["activations"]):
        program = Program()
        program.run(1)
        sizes = program.step.state_dict()
        del program
        again = Program()
        again.step.load_state_dict(sizes)
        again.run(1)
        assert again.step.records[-1].ooms == 0
        assert again.rungs == [3]


# The first three lines of the table, in MiB; the fourth is one row that does not fit,
# test_it_is_bitwise_the_plain_program().
TABLE = [("AdamW", 72), ("AdamW", 66), ("AdamW", 60), ("SGD", 40)]
MIB = 1 << 20


@cache  # in a test: modules are imported with more threads, and round otherwise
def unlimited(name: str) -> tuple[list[float], list[Any]]:
    """Losses and parameters of a program of the table without a limit."""
    program = Table(name, ladder=())
    return program.run(3), program.picture()


@pytest.mark.parametrize(("name", "budget"), TABLE)
def test_a_line_of_the_table_trains_as_without_a_limit(name: str, budget: int) -> None:
    expected = unlimited(name)
    gc.collect()
    with room(budget * MIB):
        program = Table(name)
        losses = program.run(3)
        picture = program.picture()
    assert [r.accumulation_steps for r in program.step.records] == [1, 1, 1]
    assert losses == expected[0]
    assert same(picture, expected[1])
    # What one update has found the next ones know.
    assert [r.ooms for r in program.step.records][1:] == [0, 0]


def known_of(name: str, budget: int) -> dict[str, Any]:
    with room(budget * MIB):
        program = Table(name)
        program.run(2)
        assert program.step.records[-1].rung == 2
        known: dict[str, Any] = json.loads(json.dumps(program.step.state_dict()))
    return known


@pytest.mark.parametrize(("name", "budget"), TABLE)
def test_what_an_update_has_climbed_to_is_remembered(name: str, budget: int) -> None:
    known = known_of(name, budget)
    assert [entry["update_rung"] for entry in known["signatures"]] == [2]
    with room(budget * MIB):
        again = Table(name)
        again.step.load_state_dict(known)
        again.run(2)
    assert [(r.rung, r.ooms) for r in again.step.records] == [(2, 0), (2, 0)]


def test_state_that_was_on_the_host_goes_there_before_the_first_forward() -> None:
    """As a run goes on: with the state of its optimizer out of a checkpoint."""
    known = known_of("AdamW", 66)
    with room(80 * MIB):
        again = Table("AdamW")
        again.run(1)
        assert again.step.records[-1].rung == 0
    again.step.load_state_dict(known)
    with oomkit.limit_memory(allocated() + 2 * MIB, device="cpu"):  # 16 more are gradients
        again.run(1)
    assert [(r.rung, r.ooms) for r in again.step.records][1:] == [(2, 0)]


def test_a_state_of_before_that_was_remembered_is_read(rooms: dict[str, int]) -> None:
    known = known_of("AdamW", 72)
    for entry in known["signatures"]:
        for key in [key for key in entry if key.startswith("update_")]:
            del entry[key]
    with room(72 * MIB):
        again = Table("AdamW")
        again.step.load_state_dict(known)
        again.run(2)
    records = [(r.rung, r.ooms) for r in again.step.records]
    assert records[0][1] > 0 and records[1] == (2, 0)


def test_with_more_room_what_is_remembered_of_updates_is_no_matter() -> None:
    known = known_of("AdamW", 66)
    with room(100 * MIB):
        again = Table("AdamW")
        again.step.load_state_dict(known)
        again.run(2)
    assert [(r.rung, r.ooms) for r in again.step.records] == [(0, 0), (0, 0)]


def test_without_the_rungs_it_is_no_matter_either() -> None:
    known = known_of("AdamW", 66)
    with room(100 * MIB):
        again = Table("AdamW", ladder=())
        known["signatures"][0]["update_budget"] = 1 << 50
        again.step.load_state_dict(known)
        again.run(1)
    assert [(r.rung, r.ooms) for r in again.step.records] == [(0, 0)]


def test_each_rung_is_said_once_with_what_it_costs(
    rooms: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with room(rooms["activations"]):
        program = Program()
        program.run(4)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert (
        sum("rung=activations, what autograd saves is kept in host memory" in x for x in lines) == 1
    )
    assert sum("rung=activations reason=climbed" in x for x in lines) == 1


def test_the_modules_that_are_computed_again_are_named(
    rooms: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with room(rooms["recompute"]):
        Program(ladder=("recompute",)).run(1)
    assert any(
        "rung=recompute" in r.getMessage() and "Block in" in r.getMessage() for r in caplog.records
    )


def test_an_evaluation_has_nothing_to_move(rooms: dict[str, int]) -> None:
    model = Tower()
    x = torch.randn(1, LENGTH, WIDTH)

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with room(4000):
        with torch.no_grad(), pytest.raises(oomkit.OutOfMemory):
            evaluate(x)
    assert evaluate.records[-1].rung == 0


@pytest.mark.parametrize("ladder", [("activations",), ("recompute",), "auto"], ids=str)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore")
def test_a_failure_anywhere_is_undone_and_repeated(
    phase: str, ladder: Any, rooms: dict[str, int]
) -> None:
    plain = Program(ladder=())
    plain.run(2)
    expected = plain.picture()
    del plain
    with room(rooms[NEEDED[ladder]] + 3 * ROW):
        program = Program(ladder=ladder)
        program.run(1)
        x = program.batch()
        with inject_oom(nth=10**9, phase=phase) as fault:
            program.step(x)
        count = fault.seen
        del program
        for nth in sampled(range(1, count + 1), 10, f"{phase} {ladder}"):
            program = Program(ladder=ladder)
            program.run(1)
            x = program.batch()
            with inject_oom(nth=nth, phase=phase) as fault:
                program.step(x)
            assert fault.fired == 1
            assert same(program.picture(), expected), (nth, program.step.records[-1])
            del program


@pytest.mark.filterwarnings("ignore")
def test_for_good_it_is_out_of_memory_with_the_state_of_the_entry(rooms: dict[str, int]) -> None:
    with room(rooms["activations"] + 3 * ROW):
        program = Program()
        program.run(1)
        x = program.batch()
        with inject_oom(nth=10**9) as fault:
            program.step(x)
        for nth in sampled(range(1, fault.seen + 1), 10):
            before = program.picture()
            with inject_oom(nth=nth, times=None):
                with pytest.raises(oomkit.OutOfMemory) as caught:
                    program.step(x)
            assert caught.value.committed or same(program.picture(), before)
            with inject_oom(nth=10**9):
                program.step(x)


def test_a_thousand_calls_hold_nothing_more(rooms: dict[str, int]) -> None:
    many = 1000 if sampled.__globals__["WHOLE"] else 60
    for ladder in (("activations",), ("recompute",), "auto"):
        with room(rooms[NEEDED[ladder]] + 3 * ROW):
            program = Program(ladder=ladder)
            program.run(10)
            gc.collect()
            counted, objects = allocated(), len(gc.get_objects())
            program.run(many)
            gc.collect()
            assert allocated() == counted
            assert abs(len(gc.get_objects()) - objects) < 50
            del program


# --- parameters of very different sizes ---

WORDS = torch.arange(64)


class Words:
    """A step over an embedding, whose update is what needs most."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        seed_all(SEED)
        self.model = Embedded()
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-3)
        model, update = self.model, self.optimizer

        @oomkit.auto_batch(label="words", **options)
        def step(x: torch.Tensor) -> float:
            update.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            update.step()
            return loss.item()

        self.step = step

    def run(self, steps: int = 4) -> list[float]:
        return [self.step(WORDS) for _ in range(steps)]

    def picture(self) -> list[Any]:
        return [p.detach().numpy().copy() for p in self.model.parameters()]


def plain_peak(optimizer: str) -> tuple[int, list[float], list[Any]]:
    """Bytes that it needs without a limit, its losses, and what it ends with."""
    gc.collect()
    before = allocated()
    program = Words(optimizer, ladder=())
    with oomkit.limit_memory("1GB", device="cpu"):
        losses = program.run()
    most = max(r.peak_allocated or 0 for r in program.step.records)
    return most - before, losses, program.picture()


@pytest.mark.parametrize("share", [1.01, 1.05])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "RMSprop", "SGD"])
def test_an_update_of_a_large_parameter_that_fits_is_plain(optimizer: str, share: float) -> None:
    needed = plain_peak(optimizer)[0]
    with room(int(share * needed)):
        program = Words(optimizer)
        program.run()
        assert [(r.rung, r.ooms) for r in program.step.records] == [(0, 0)] * 4


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "RMSprop"])
def test_where_it_does_not_fit_it_goes_in_parts_and_is_never_half_done(optimizer: str) -> None:
    needed, losses, expected = plain_peak(optimizer)
    rungs = set()
    for share in (99, 97, 94, 90, 85, 80):
        with room(needed * share // 100):
            program = Words(optimizer)
            assert program.run() == losses, share
            assert same(program.picture(), expected), share
            rungs |= {r.rung for r in program.step.records}
            del program
    assert max(rungs) >= 1


def test_what_was_measured_in_parts_of_whole_groups_is_believed() -> None:
    """Of a matrix Adafactor takes half of what it may take of a vector."""
    needed, losses, expected = plain_peak("Adafactor")
    with room(int(1.05 * needed)):
        program = Words("Adafactor")
        assert program.run() == losses
        assert same(program.picture(), expected)
    assert [r.rung for r in program.step.records] == [1, 1, 0, 0]
    assert sum(r.ooms for r in program.step.records) == 0


def test_what_was_measured_with_other_options_is_not_believed() -> None:
    needed, _, _ = plain_peak("Adagrad")
    with room(int(1.05 * needed)):
        program = Words("Adagrad")
        program.run(3)
        program.optimizer.param_groups[0]["maximize"] = True  # which makes a copy of each gradient
        program.run(1)
    rungs = [r.rung for r in program.step.records]
    assert rungs[:3] == [0, 0, 0] and rungs[3] >= 1


@pytest.mark.parametrize("share", [0.85, 0.97])
def test_a_parameter_that_is_thawed_needs_what_it_needs(share: float) -> None:
    """While it has no gradient there is room in plenty, and its first one changes that."""
    needed, _, _ = plain_peak("AdamW")
    with room(int(share * needed)):
        program = Words("AdamW")
        program.model.table.requires_grad_(False)
        program.run(3)
        program.model.table.requires_grad_(True)
        program.run(2)
    rungs = [r.rung for r in program.step.records]
    assert rungs[:3] == [0, 0, 0] and rungs[4] >= 1
