"""Every rung of the ladder on a device: where copies go, what is waited for, and what is asked."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.collector import hide_modules
from helpers.sample import sampled
from ladder.test_climbing import Program as Deep
from ladder.test_host_gradients import ENOUGH, LAYER
from ladder.test_host_gradients import ROWS as MANY
from ladder.test_host_gradients import Program as Wide
from ladder.test_host_state import BATCH, PARAMS, ROOMS, WIDTH, Program, allocated, same
from optim.test_update_rows import ENOUGH as BESIDE
from optim.test_update_rows import TABLE
from optim.test_update_rows import Program as Table

import oomkit
from device import CUDA, PRIVATE, XPU, Device, accelerator_error
from device.host_memory import HostMemory
from oomkit import _C
from oomkit._ladder import state as hosted
from oomkit.testing import force_slices, inject_oom

MATRIX = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _modules_are_not_searched_for_garbage() -> None:
    """No workspaces are given back here."""
    hide_modules()


@pytest.fixture
def host(cuda: Device) -> Iterator[HostMemory]:
    made = HostMemory(cuda).install()
    yield made
    made.remove()


@contextmanager
def room(size: int) -> Iterator[None]:
    """So many bytes beyond what there is: the device's limit, and what is refused."""
    gc.collect()
    total = allocated() + size
    _C.device_budget_set(CUDA, 0, total)
    with oomkit.limit_memory(total, device="cpu"):
        yield
    _C.device_budget_set(CUDA, 0, None)


def for_parameters(times: float) -> int:
    return int(times * PARAMS) + 8 * BATCH


def expected_of(name: str, steps: int, **options: Any) -> tuple[list[float], list[Any]]:
    plain = Program(name, ladder=(), **options)
    return plain.run(steps), plain.picture()


def there(program: Program) -> int:
    found = hosted.hosted_state(program.optimizer, None)
    return len(found) if isinstance(found, dict) else 0


# --- each rung ---


def test_an_update_in_parts(host: HostMemory) -> None:
    losses, expected = expected_of("AdamW", 4)
    program = Program("AdamW", optimizer_safety="parts")
    with room(for_parameters(6)):
        assert program.run(4) == losses
    assert same(program.picture(), expected) and not host.faults
    assert host.out > 0 and host.left() == 0


@pytest.mark.parametrize("name", ROOMS)
def test_state_on_the_host(host: HostMemory, name: str) -> None:
    losses, expected = expected_of(name, 5)
    with room(for_parameters(ROOMS[name])):
        program = Program(name)
        assert program.run(5) == losses
        assert [r.rung for r in program.step.records] == [2] * 5
    assert same(program.picture(), expected) and not host.faults
    assert there(program) == host.left() > 0


@pytest.mark.parametrize("ladder", [("activations",), ("recompute",), ("activations", "recompute")])
def test_activations_on_the_host_and_modules_computed_again(
    host: HostMemory, ladder: tuple[str, ...]
) -> None:
    plain = Deep(ladder=())
    gc.collect()
    before = allocated()
    losses = plain.run(3)
    peak = max(r.peak_allocated or 0 for r in plain.step.records) - before
    expected = plain.picture()
    del plain
    share = 0.8 if ladder == ("recompute",) else 0.6
    with room(int(share * peak)):
        program = Deep(ladder=ladder)
        assert program.run(3) == losses
    assert same(program.picture(), expected) and host.left() == 0
    assert host.emptied == 0, "pinned memory serves the next step, too: to pin it is slow"
    assert set(program.rungs) == {3 if ladder[0] == "activations" else 4}
    assert (host.out > 0) == ("activations" in ladder)


def test_two_rows_are_proven_with_what_they_save_on_the_host(
    host: HostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """One row fits, whose gradient says nothing of two. Pinned copies and no parameters: it is
    done in the first step of a large model."""
    plain = Deep(ladder=())
    gc.collect()
    before = allocated()
    plain.run(1)
    peak = (plain.step.records[-1].peak_allocated or 0) - before
    del plain
    _C._prove(True)  # a fixture has turned it off
    program = Deep(rows=4, ladder=())
    with room(int(1.5 * peak)), caplog.at_level("INFO", logger="oomkit"):
        program.run(2)
    assert [r.accumulation_steps for r in program.step.records] == [4, 4]
    assert "proved the split of tower: 2 rows" in caplog.text
    assert "not compared" not in caplog.text
    assert host.out > 0 and host.left() == 0 and not host.faults
    assert host.emptied == 1, "nothing more of it is used"


def test_gradients_accumulate_on_the_host(host: HostMemory) -> None:
    program = Wide()
    with room(int(ENOUGH * LAYER)):
        program.one()
        program.one()
    assert program.last.rung == 5 and not host.faults
    assert host.out > 0
    plain = Wide(ladder=())
    for record in program.step.records:
        count = record.accumulation_steps
        with force_slices([MANY // count + (i < MANY % count) for i in range(count)]):
            plain.one()
    assert same(program.picture(), plain.picture())
    del program
    assert host.left() == 0


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_table_by_rows(host: HostMemory, name: str) -> None:
    plain = Table(name, ladder=())
    losses, expected = plain.run(4), plain.picture()
    program = Table(name)
    with room(int(BESIDE * TABLE)):
        assert program.run(4) == losses
        assert [r.rung for r in program.step.records] == [2] * 4
    assert same(program.picture(), expected) and not host.faults
    assert host.out > 0
    del program
    assert host.left() == 0


# --- the next part's state ---

AHEAD = for_parameters(3.3)


def test_state_of_the_next_part_comes_meanwhile(host: HostMemory) -> None:
    losses, expected = expected_of("AdamW", 5)
    with room(AHEAD):
        program = Program("AdamW")
        assert program.run(5) == losses
    assert same(program.picture(), expected)
    assert host.beside > 0 and not host.faults
    assert [r.ooms for r in program.step.records[1:]] == [0] * 4
    assert all((r.peak_allocated or 0) <= (r.budget or 0) for r in program.step.records)


@pytest.mark.parametrize("lacks", ["stream_type", "stream_now", "streams"])
def test_without_streams_it_is_the_same(host: HostMemory, cuda: Device, lacks: str) -> None:
    def refuse(what: str) -> None:
        if what == "stream":
            raise RuntimeError("no streams here")

    losses, expected = expected_of("AdamW", 4)
    if lacks == "streams":
        host.before = refuse
    else:
        cuda.look_up(lacks, None)
    with room(AHEAD):
        program = Program("AdamW")
        assert program.run(4) == losses
    assert same(program.picture(), expected)
    assert host.beside == 0 < host.back


# --- errors ---


class Nth:
    """Raises once, at the nth of what a step asks of host memory."""

    def __init__(self, nth: int, error: BaseException) -> None:
        self.nth, self.error = nth, error
        self.kinds: list[str] = []

    def __call__(self, what: str) -> None:
        self.kinds.append(what)
        if len(self.kinds) == self.nth:
            raise self.error


OOM, OTHER = "CUDA out of memory. Tried to allocate 2.00 MiB.", "CUDA error: invalid argument"


@pytest.mark.parametrize("kind", ["memory", "another"])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_an_error_in_any_move(host: HostMemory, kind: str, calls: int) -> None:
    """One of memory is undone and repeated; of another one nothing is left but the error."""
    expected = expected_of("AdamW", calls + 1)[1]
    counting = Nth(0, RuntimeError())
    with room(AHEAD):
        program = Program("AdamW")
        program.run(calls)
        host.before = counting
        program.run(1)
        host.before = lambda what: None
        del program
        gc.collect()
        numbers = range(1, len(counting.kinds) + 1)
        for nth in sampled(numbers, 3, f"{kind} {calls}", kind=lambda nth: counting.kinds[nth - 1]):
            program = Program("AdamW")
            program.run(calls)
            entry, x = program.picture(), program.batch()
            error = torch.OutOfMemoryError(OOM) if kind == "memory" else accelerator_error(OTHER, 1)
            host.before = Nth(nth, error)
            what = counting.kinds[nth - 1]
            if kind == "memory" or what in ("pin", "stream"):
                program.step(x)
                assert same(program.picture(), expected), (nth, what)
            else:
                with pytest.raises(torch.AcceleratorError, match="invalid argument"):
                    program.step(x)
                assert same(program.picture(), entry), (nth, what)
                host.before = lambda what: None
                program.step(x)
                assert same(program.picture(), expected), (nth, what)
            host.before = lambda what: None
            assert not host.faults
            del program, error
            gc.collect()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_an_error_beside_a_copy(
    host: HostMemory, monkeypatch: pytest.MonkeyPatch, memory: bool, waits: bool
) -> None:
    """What is on its way arrives before its memory is free, also where streams cannot wait."""
    expected = expected_of("AdamW", 3)[1]
    module = sys.modules["torch.optim.adam"]
    plain, calls = module.adam, 0  # type: ignore[attr-defined]

    refused: list[str] = []

    def wait(what: str) -> None:
        if what == "wait" and calls == 2 and not refused:
            refused.append(what)
            raise accelerator_error(OTHER, 1)

    def adam(*args: Any, **names: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            assert host.beside > before
            raise torch.OutOfMemoryError(OOM) if memory else ValueError("of the user's")
        plain(*args, **names)

    with room(AHEAD):
        program = Program("AdamW")
        program.run(2)
        entry, x, before = program.picture(), program.batch(), host.beside
        monkeypatch.setattr(module, "adam", adam)
        host.before = (lambda what: None) if waits else wait
        if memory:
            program.step(x)
        else:
            with pytest.raises(ValueError, match="of the user's"):
                program.step(x)
            assert same(program.picture(), entry)
            program.step(x)
    assert same(program.picture(), expected) and not host.faults


@pytest.mark.parametrize("phase", ["optimizer", "backward", "forward"])
@pytest.mark.filterwarnings("ignore")
def test_memory_that_lacks_anywhere(host: HostMemory, phase: str) -> None:
    expected = expected_of("AdamW", 3)[1]
    with room(AHEAD + PARAMS // 8):
        program = Program("AdamW")
        program.run(2)
        x = program.batch()
        with inject_oom(nth=10**9, phase=phase) as fault:
            program.step(x)
        count = fault.seen
        del program
        for nth in sampled(range(1, count + 1), 6, phase):
            program = Program("AdamW")
            program.run(2)
            x = program.batch()
            with inject_oom(nth=nth, phase=phase) as fault:
                program.step(x)
            assert fault.fired == 1 and not host.faults
            if program.step.records[-1].accumulation_steps == 1:
                assert same(program.picture(), expected), nth
            del program


def test_state_that_a_failed_part_had_brought_goes_out_again(
    cuda: Device, host: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a smaller part does not need takes no room on the device."""
    cuda.look_up("stream_type", None)  # parts are smaller where the next one comes meanwhile
    inside: list[int] = []
    module = sys.modules["torch.optim.adam"]
    plain = module.adam  # type: ignore[attr-defined]
    program = Program("AdamW")
    program.run(1)
    program.optimizer.zero_grad()
    with room(int(0.95 * PARAMS) + 8 * BATCH):
        program.run(2)
        total = there(program)
        program.step = oomkit.auto_batch(program.step.__wrapped__)  # no part has failed in it

        def adam(params: list[Any], *args: Any, **names: Any) -> None:
            inside.append(total - there(program))
            if len(inside) == 1:
                raise torch.OutOfMemoryError(OOM)
            plain(params, *args, **names)

        monkeypatch.setattr(module, "adam", adam)
        program.run(1)
    assert inside[0] > inside[1] > 0 and there(program) == total, inside


@pytest.mark.parametrize("refused", ["always", "once"])
def test_memory_that_cannot_be_pinned(host: HostMemory, refused: str) -> None:
    asked = []

    def pin(what: str) -> None:
        if what == "pin":
            asked.append(what)
            if refused == "always" or len(asked) == 1:
                raise accelerator_error("CUDA error: out of memory", 2)

    losses, expected = expected_of("AdamW", 3)
    host.before = pin
    with room(for_parameters(ROOMS["AdamW"])):
        program = Program("AdamW")
        assert program.run(3) == losses
    assert same(program.picture(), expected)
    assert there(program) > 0 and (host.left() > 0) == (refused == "once")


# --- what is asked ---


def test_without_a_limit_the_driver_is_asked(cuda: Device, host: HostMemory) -> None:
    """The first update needs its state and temporaries: it goes in parts where they do not fit."""
    total = 1 << 40
    losses, expected = expected_of("AdamW", 3)
    gc.collect()
    cuda.__dict__["info"] = (int(2.2 * PARAMS), total)
    with oomkit.limit_memory(allocated() + for_parameters(6), device="cpu"):
        program = Program("AdamW")
        assert program.run(3) == losses
    assert program.step.records[0].rung == 1
    assert same(program.picture(), expected)


def test_room_that_another_process_gives_back_is_seen(cuda: Device, host: HostMemory) -> None:
    cuda.__dict__["info"] = (2 * MATRIX, 1 << 40)
    program = Program("AdamW")
    program.run(2)
    assert [r.rung for r in program.step.records] == [2, 2]
    cuda.__dict__["info"] = (1 << 39, 1 << 40)
    program.run(12)
    assert program.step.records[-1].rung == 0 and there(program) == 0


def test_later_updates_know_what_is_left_too(cuda: Device, host: HostMemory) -> None:
    """Without a limit, and before anything has failed: one that no longer fits is not tried."""
    expected = expected_of("AdamW", 3)[1]
    gc.collect()
    cuda.__dict__["info"] = (for_parameters(4), 1 << 40)
    program = Program("AdamW")
    program.run(1)
    asked = len(cuda.asked_of)
    program.run(1)
    assert len(cuda.asked_of) == asked, "a driver is slow to answer"
    held = torch.empty(2 * PARAMS + 8 * BATCH - 2 * MATRIX, dtype=torch.uint8)
    cuda.__dict__["info"] = (2 * MATRIX, 1 << 40)
    with oomkit.limit_memory(allocated() + 2 * MATRIX + 8 * BATCH, device="cpu"):
        program.run(1)
    assert same(program.picture(), expected) and len(held)
    assert [r.rung for r in program.step.records] == [0, 0, 1]


# --- which tensors ---


def test_state_of_another_device_stays_there(cuda: Device, host: HostMemory) -> None:
    cuda.wide_index = 1
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    wide = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float64))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW([*model.parameters(), wide], foreach=False)

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        (x[:, :64].double() @ wide).mean().backward()
        optimizer.step()

    with room(for_parameters(1.8) + 4 * wide.nbytes):
        for _ in range(2):
            step(torch.ones(8, WIDTH))
    state = hosted.hosted_state(optimizer, None)
    assert isinstance(state, dict) and len(state) == 8
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Set seed for")
@pytest.mark.parametrize("kind", [XPU, PRIVATE])
def test_other_backends(fake: Device, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not exchange memory of one out of its tree with the host's; others pin nothing."""
    fake.install(kind)
    there_is = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "privateuseone", there_is, raising=False)
    host = HostMemory(fake).install()
    try:
        losses = expected_of("AdamW", 3)[0]
        gc.collect()
        total = allocated() + for_parameters(ROOMS["AdamW"])
        _C.device_budget_set(kind, 0, total)
        with oomkit.limit_memory(total, device="cpu"):
            program = Program("AdamW")
            if kind == PRIVATE:
                with pytest.raises(oomkit.OutOfMemory):
                    program.run(3)
            else:
                assert program.run(3) == losses
                assert there(program) > 0
        assert host.left() == host.beside == 0
    finally:
        host.remove()
        torch.get_device_module.cache_clear()


# --- afterwards ---


@pytest.mark.parametrize("times", [2.8, 3.3])
def test_nothing_pinned_is_left_when_the_step_goes(host: HostMemory, times: float) -> None:
    with room(for_parameters(times)):
        program = Program("AdamW")
        program.run(3)
        assert host.left() > 0 == host.emptied
        del program
    gc.collect()
    assert host.left() == 0 < host.emptied and not list(hosted._all)


def test_pinned_copies_of_an_update_go_with_the_step(host: HostMemory) -> None:
    program = Program("AdamW", optimizer_safety="parts")
    program.run(2)
    assert host.out > 0 == host.emptied
    del program
    gc.collect()
    assert host.emptied > 0 == host.left()


def test_many_calls_hold_nothing_more(host: HostMemory) -> None:
    with room(AHEAD):
        program = Program("AdamW")
        program.run(10)
        gc.collect()
        counted, pinned, objects = allocated(), host.left(), len(gc.get_objects())
        program.run(50)
        gc.collect()
        assert (allocated(), host.left()) == (counted, pinned)
        assert abs(len(gc.get_objects()) - objects) < 50


# --- checkpoints ---


def on_host(optimizer: torch.optim.Optimizer, host: HostMemory) -> int:
    pinned = {one.cdata for one in host.pinned if not one.expired()}
    values = [v for state in optimizer.state.values() for v in state.values()]
    return sum(v.untyped_storage()._cdata in pinned for v in values)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_optimizer_has_its_state_on_the_device(host: HostMemory, how: str) -> None:
    """Nobody would bring it there: to torch it is as any other."""
    with room(for_parameters(2.8)):
        program = Program("AdamW")
        program.run(2)
        before = program.picture()
    assert on_host(program.optimizer, host) == there(program) > 0
    made = (
        copy.deepcopy(program.optimizer)
        if how == "deepcopy"
        else pickle.loads(pickle.dumps(program.optimizer))
    )
    assert on_host(program.optimizer, host) == on_host(made, host) == there(program) == 0
    assert same(program.picture(), before)
    a, b = (o.state_dict()["state"] for o in (program.optimizer, made))
    assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


def test_a_state_dict_shows_the_values(host: HostMemory) -> None:
    plain = Program("AdamW", ladder=())
    losses = plain.run(2)
    with room(for_parameters(2.8)):
        program = Program("AdamW")
        assert program.run(2) == losses
        found = pickle.loads(pickle.dumps(program.optimizer.state_dict()))["state"]
        assert on_host(program.optimizer, host) > 0
    wanted = plain.optimizer.state_dict()["state"]
    assert all(torch.equal(wanted[i][k], found[i][k]) for i in wanted for k in wanted[i])
