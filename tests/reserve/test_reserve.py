"""oomkit.reserve in one process: limits, waiting, messages, refusals. Time here is a number."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit import reserve as reserve_function
from oomkit._limits import admission as _admission
from oomkit._limits import layers as _layers
from oomkit._limits.admission import Ticket
from oomkit.memory import _host_bytes

MIB = 2**20
module: Any = __import__("sys").modules["oomkit.reserve"]


def reserve(mebibytes: float, budget: float = 100, **options: Any) -> oomkit.Reservation:
    return reserve_function(int(mebibytes * MIB), device="cpu", budget=int(budget * MIB), **options)


class Time:
    """A clock that goes on while somebody sleeps, and what happens at which second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()

    def at(self, second: float, event: Callable[[], object]) -> None:
        self.events.append((second, event))


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMKIT_RESERVE_DIR", str(tmp_path))
    return tmp_path / "cpu"


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(module, "_clock", lambda: found.now)
    monkeypatch.setattr(module, "_sleep", found.sleep)
    return found


@pytest.fixture(autouse=True)
def _nothing_stays(queue: Path) -> Iterator[None]:
    limit = oomkit.memory("cpu").budget
    yield
    assert _layers._reserved == {} and _layers._of_user == {}
    assert oomkit.memory("cpu").budget == limit


def another(size: float) -> Ticket:
    """A place of somebody else: a lock of its own, which this process's others respect."""
    ticket = Ticket(_admission.folder("cpu"))
    assert ticket.ask(int(size * MIB))
    return ticket


def files(queue: Path) -> list[str]:
    return [name for name in os.listdir(queue) if name != "queue.lock"]


def budget() -> int | None:
    return oomkit.memory("cpu").budget


# --- limits ---------------------------------------------------------------------------


def test_it_is_the_limit_of_the_block(queue: Path) -> None:
    with oomkit.limit_memory(80 * MIB, device="cpu"):
        with reserve(50) as one:
            assert budget() == one.bytes == 50 * MIB
            assert one.budget == 100 * MIB and one.device == torch.device("cpu")
            assert len(files(queue)) == 1
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(60 * MIB, dtype=torch.uint8)
        assert budget() == 80 * MIB and files(queue) == []
        with reserve(50, limit=False):
            assert budget() == 80 * MIB


def test_a_step_inside_is_split_to_fit() -> None:
    model = torch.nn.Linear(1024, 1024)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(model(x)).sum(dim=1)

    x = torch.randn(1024, 1024)
    used = oomkit.memory("cpu").allocated or 0
    with reserve(used / MIB + 5, used / MIB + 50):
        assert step(x).shape == (1024,)
    assert step.records[-1].micro_batch_size < 1024


def test_threads_of_a_process_have_their_limits_together() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with reserve(30):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with reserve(20):
        thread.start()
        assert entered.wait(60)
        assert budget() == 50 * MIB
    assert budget() == 30 * MIB
    leave.set()
    thread.join()


def test_what_the_block_leaves_in_cycles_is_freed_before_the_place(queue: Path) -> None:
    class Node:
        pass

    gc.collect()
    gc.disable()
    try:
        with reserve(50):
            before = oomkit.memory("cpu").allocated
            node: Any = Node()
            node.me, node.tensor = node, torch.empty(10 * MIB, dtype=torch.uint8)
            del node
            assert oomkit.memory("cpu").allocated != before
        assert oomkit.memory("cpu").allocated == before
    finally:
        gc.enable()


# --- waiting --------------------------------------------------------------------------


def test_it_waits_until_there_is_room(time: Time, queue: Path) -> None:
    first, second = another(60), another(30)
    time.at(5, second.leave)
    time.at(7, first.leave)
    with reserve(50) as one:
        assert 7 <= one.waited < 7.5
    assert time.events == [] and files(queue) == []


def test_nobody_overtakes_a_larger_one_that_waits(time: Time) -> None:
    first, large = another(60), another(90)
    time.at(3, first.leave)
    time.at(8, large.leave)
    with reserve(20) as small:
        assert small.waited >= 8


def test_who_comes_later_is_in_nobodys_way(queue: Path) -> None:
    with reserve(60):
        later = another(90)
        with reserve(60):
            pass
        later.leave()


def test_a_time_out(time: Time, queue: Path) -> None:
    first, second = another(60), another(70)
    pid = os.getpid()
    with pytest.raises(TimeoutError) as caught:
        with reserve(50, timeout=2.5):
            raise AssertionError
    assert message_of(caught.value) == (
        "reserve() of 50.00 MiB on 'cpu' was not admitted within 2.5 s: 60.00 MiB of 100.00 MiB "
        f"are reserved by process {pid} (60.00 MiB); process {pid} (70.00 MiB) before this one. "
        "Reserve less, wait longer (timeout=), or end one of them"
    )
    assert time.now == pytest.approx(2.5)
    first.leave()
    second.leave()
    assert files(queue) == []


def test_without_waiting(time: Time) -> None:
    with reserve(50, timeout=0) as one:
        assert one.waited == 0
    first = another(60)
    with pytest.raises(TimeoutError, match="within 0 s"):
        reserve(50, timeout=0).__enter__()
    assert time.now == 0
    first.leave()


def test_what_is_said_while_it_waits(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    first = another(60)
    time.at(75, first.leave)
    with caplog.at_level(logging.INFO, "oomkit"), reserve(50):
        pass
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    who = f"60.00 MiB of 100.00 MiB are reserved by process {os.getpid()} (60.00 MiB)"
    start = "reserve=52428800 device=cpu"
    assert said == [
        ("INFO", f"{start} waiting for 0 s: {who}"),
        ("WARNING", f"{start} waiting for 10 s: {who}"),
        ("WARNING", f"{start} waiting for 70 s: {who}"),
        ("INFO", f"{start} admitted after {time.now:.1f} s"),
    ]


def test_nothing_is_said_without_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "oomkit"), reserve(50):
        pass
    assert caplog.records == []


def test_many_processes_are_not_all_named(time: Time) -> None:
    places = [another(10) for _ in range(9)]
    with pytest.raises(TimeoutError, match=r"(?:\d+ \(10.00 MiB\), ){5}.*\) and 3 more\. Reserve"):
        reserve(50, timeout=1).__enter__()
    for place in places:
        place.leave()


def test_an_error_in_the_wait_leaves_no_place(time: Time, queue: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first = another(60)
    time.at(1, interrupt)
    one = reserve(50)
    with pytest.raises(KeyboardInterrupt):
        one.__enter__()
    first.leave()
    assert files(queue) == [] and repr(one).endswith("not held>")
    with one:  # it can be used again
        assert repr(one) == "<oomkit.Reservation of 50.00 MiB on 'cpu', held>"


def test_an_error_of_the_block_passes(queue: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with reserve(50):
            raise ZeroDivisionError
    assert files(queue) == []


# --- the folder -----------------------------------------------------------------------


def test_what_dead_processes_left_is_cleared(queue: Path) -> None:
    queue.mkdir()
    dead = queue / "000000000007.104857600.1"
    dead.touch()
    (queue / "notes.txt").touch()  # no place of ours
    with reserve(100, timeout=0):
        assert sorted(files(queue)) == [f"000000000008.104857600.{os.getpid()}", "notes.txt"]


def test_a_folder_that_is_emptied_costs_no_more_than_the_place(time: Time, queue: Path) -> None:
    first = another(60)

    def empty() -> None:
        for name in files(queue):
            (queue / name).unlink()

    time.at(1, empty)
    with reserve(50) as one:
        assert one.waited >= 1
        assert len(files(queue)) == 1
    first.leave()


def test_a_folder_that_is_deleted_is_made_again(time: Time, queue: Path) -> None:
    first = another(60)
    time.at(1, lambda: shutil.rmtree(queue))
    with reserve(50) as one:
        assert one.waited >= 1 and len(files(queue)) == 1
        shutil.rmtree(queue)
    first.leave()
    assert budget() is None


def test_a_locked_queue_takes_no_longer_than_there_is(
    time: Time, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = _admission._lock_queue(_admission.folder("cpu"))
    assert lock is not None
    looks: list[float] = []
    monkeypatch.setattr(_admission, "_sleep", looks.append)
    owner = _admission._owner(queue)
    assert owner in (None, os.getpid())  # not every system tells
    named = "" if owner is None else f" by process {owner}"
    with pytest.raises(TimeoutError, match=f"its queue is locked{named}\\."):
        reserve(50, timeout=0).__enter__()
    assert looks == []
    _admission._close(lock)


def test_a_queue_that_stays_locked_is_said(time: Time, queue: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(_admission, "TRIES", 1)
    lock = _admission._lock_queue(_admission.folder("cpu"))
    assert lock is not None
    time.at(5, functools.partial(_admission._close, lock))
    with reserve(50) as one:
        assert one.waited >= 5
    lock = _admission._lock_queue(queue)
    assert lock is not None
    with pytest.raises(TimeoutError, match="within 1 s: its queue is locked"):
        reserve(50, timeout=1).__enter__()
    _admission._close(lock)


def test_the_folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OOMKIT_RESERVE_DIR")
    monkeypatch.setattr(_admission, "BASE", tmp_path)
    own = tmp_path / f"oomkit-{os.geteuid()}"
    with reserve(10):
        assert (own / "cpu" / "queue.lock").exists()
    assert own.stat().st_mode & 0o777 == 0o700
    (own / "cpu" / "queue.lock").unlink()
    (own / "cpu").rmdir()
    own.rmdir()
    own.symlink_to(tmp_path)  # somebody's trap
    with pytest.raises(PermissionError, match="belongs to another user than"):
        reserve(10).__enter__()


# --- inside another one ---------------------------------------------------------------


def test_a_part_of_what_is_reserved_needs_no_place(queue: Path) -> None:
    with reserve(100), reserve(100) as inner:
        assert len(files(queue)) == 1 and budget() == 100 * MIB
        assert inner.budget == 100 * MIB
        with pytest.raises(RuntimeError, match=r"100.50 MiB on 'cpu' inside a reservation of 100"):
            reserve(100.5, 200).__enter__()
        inner.__exit__(None, None, None)
        assert len(files(queue)) == 1 and budget() == 100 * MIB


def test_one_object_is_held_once() -> None:
    one = reserve(10)
    with one, pytest.raises(RuntimeError, match="held already: make another one"):
        one.__enter__()


# --- as a decorator -------------------------------------------------------------------


def test_a_decorated_function_reserves_for_each_call(queue: Path) -> None:
    @reserve(60)
    def work(depth: int) -> list[int]:
        """Doc."""
        inner = work(depth - 1) if depth else []
        return [len(files(queue)), *inner]

    assert files(queue) == [] if queue.exists() else True
    assert work(2) == [1, 1, 1] and files(queue) == []
    assert (work.__name__, work.__doc__) == ("work", "Doc.")


def test_what_cannot_be_decorated() -> None:
    async def later() -> None:
        pass

    def generate() -> Iterator[int]:
        yield 1

    for function in (later, generate):
        with pytest.raises(TypeError, match="cannot decorate an async or a generator function"):
            reserve(1)(function)
    with pytest.raises(TypeError, match="expected a function to decorate, got 'int'"):
        reserve(1)(3)  # type: ignore[type-var]


# --- refusals -------------------------------------------------------------------------


def test_what_can_never_fit(queue: Path) -> None:
    with pytest.raises(oomkit.OutOfMemory) as caught:
        reserve(101).__enter__()
    assert message_of(caught.value) == (
        "reserve() of 101.00 MiB on 'cpu' can never be admitted: there are 100.00 MiB for all "
        "reservations. Reserve less"
    )
    with oomkit.limit_memory(40 * MIB, device="cpu"):
        with pytest.raises(oomkit.OutOfMemory, match=r"limit_memory\(\) leaves this process 40.00"):
            reserve(50).__enter__()
        with reserve(50, limit=False):
            pass
    assert oomkit.is_oom_error(caught.value)
    with pytest.raises(oomkit.OutOfMemory, match="there are .* GiB for all"):
        reserve_function("100000TiB", device="cpu").__enter__()  # of this machine


def test_the_machines_memory_is_the_budget_else() -> None:
    with reserve_function("1MiB", device="cpu") as one:
        assert one.budget == _host_bytes()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("1 parsec",), ValueError, "reserve() expected nbytes to be an int (bytes) or a str "),
        ((1.5,), TypeError, "reserve() expected nbytes to be an int (bytes) or a str "),
        ((0,), ValueError, "reserve() expected a size of at least 1 byte, got 0"),
        ((1, "x"), ValueError, "reserve() expected budget to be an int (bytes) or a str "),
        ((1, 1, "1"), TypeError, "timeout to be a number of seconds or None, got 'str'"),
        ((1, 1, True), TypeError, "timeout to be a number of seconds or None, got 'bool'"),
        ((1, 1, -1), ValueError, "reserve() expected timeout to be at least 0 seconds, got -1"),
        ((1, 1, float("nan")), ValueError, "at least 0 seconds, got nan"),
        ((1, 1, 1, "nowhere"), ValueError, "reserve() does not know the device 'nowhere'"),
    ],
)
def test_arguments(arguments: Any, error: type[Exception], text: str) -> None:
    names = ("budget", "timeout", "device")
    options = dict(zip(names, arguments[1:], strict=False))
    with pytest.raises(error) as caught:
        reserve_function(arguments[0], **options)
    assert text in str(caught.value)


def test_without_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_admission, "fcntl", None)
    with pytest.raises(RuntimeError, match=r"needs the file locks of Linux and macOS \(fcntl\)"):
        reserve(1).__enter__()


def test_a_machine_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_host_bytes", lambda: None)
    with pytest.raises(RuntimeError, match="does not know this machine's memory: pass budget="):
        reserve_function(1, device="cpu").__enter__()


# --- accelerators ---------------------------------------------------------------------


def test_a_cuda_device_goes_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="6f1c-77", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert module._queue_of(torch.device("cuda", 1)) == ("cuda-6f1c-77", 24 * 2**30)
    del properties.uuid
    assert module._queue_of(torch.device("cuda", 1)) == ("cuda-1", 24 * 2**30)
    with pytest.raises(ValueError, match="there is no device 'cuda:2' here"):
        module._queue_of(torch.device("cuda", 2))
    with pytest.raises(ValueError, match="knows 'cpu' and 'cuda' devices, got 'xpu:0'"):
        module._queue_of(torch.device("xpu", 0))


@pytest.mark.parametrize("broken", [False, True])
def test_on_cuda_the_cache_is_given_back_before_the_place(
    queue: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    seen = []

    def empty() -> None:
        seen.append(len(files(queue)))
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "_queue_of", lambda device: ("cpu", 100 * MIB))
    monkeypatch.setattr(_layers, "_get", lambda key: None)
    monkeypatch.setattr(_layers, "_put", lambda key, limit: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    with reserve_function(MIB, device=torch.device("cuda", 0)):
        assert seen == []
    assert seen == [1] and files(queue) == []


def test_a_block_is_left_without_memory(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails between the call of __exit__ and its `try` kept the place."""
    one = oomkit.reserve(1 << 20, device="cpu", budget=2 << 20)
    one.__enter__()
    pids = mock.Mock(side_effect=[MemoryError, *[os.getpid()] * 20])
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(os, "getpid", pids)
        one.__exit__(None, None, None)
    assert "not held" in repr(one)
    with oomkit.reserve(2 << 20, device="cpu", budget=2 << 20):
        pass
