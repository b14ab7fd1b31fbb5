"""oomkit.reserve between processes on CPU budgets: order, death, interrupts, fork."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from oomkit._limits import admission as _admission
from reserve.reserve_world import Log, Worker


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMKIT_RESERVE_DIR", str(tmp_path))
    return tmp_path / "cpu"


@pytest.fixture
def log() -> Iterator[Log]:
    found: Log = []
    yield found
    print()
    for name, said in found:
        print(f"{name}: {said}")


@pytest.fixture
def workers(queue: Path, log: Log) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Worker(name, log)) for name in "ABCD"]


def held(queue: Path) -> list[int]:
    """Processes with a living place, first come first."""
    places = _admission._places(queue)
    return [place.pid for place in places if _admission._is_held(queue / place.name)]


def test_four_processes_share_and_one_is_killed(workers: list[Worker], queue: Path) -> None:
    a, b, c, d = workers
    for one in (a, b):  # 200 of 250 MiB
        one.tell("reserve", 100, 250)
        assert one.says() == "admitted"
        one.tell("take", 90)
        assert one.says() == "has 90 MiB"
        one.tell("take", 20)  # its own share is its limit
        assert one.says() == "out of memory"
    for one in (c, d):
        one.tell("reserve", 100, 250)
        assert one.says() == "waits"
    assert held(queue) == [one.pid for one in workers]

    a.kill()
    assert c.says() == "admitted"
    assert d.is_silent() and held(queue) == [b.pid, c.pid, d.pid]
    c.tell("take", 90)
    assert c.says() == "has 90 MiB"

    b.tell("leave")
    assert (b.says(), d.says()) == ("left", "admitted")
    for one in (c, d):
        one.tell("leave")
        assert one.says() == "left"
    assert held(queue) == []
    # What the killed one left goes with the next that comes.
    b.tell("reserve", 250, 250)
    assert b.says() == "admitted"
    b.tell("leave")
    assert b.says() == "left"
    assert os.listdir(queue) == ["queue.lock"]


def test_nobody_overtakes(workers: list[Worker]) -> None:
    a, b, c, d = workers
    a.tell("reserve", 150, 200)
    assert a.says() == "admitted"
    b.tell("reserve", 200, 200)
    assert b.says() == "waits"
    c.tell("reserve", 10, 200)  # would fit beside A, and B would wait for longer
    assert c.says() == "waits"
    a.tell("leave")
    assert (a.says(), b.says()) == ("left", "admitted")
    assert c.is_silent()
    d.tell("reserve", 190, 200)
    assert d.says() == "waits"
    b.tell("leave")
    assert (b.says(), c.says(), d.says()) == ("left", "admitted", "admitted")


def test_a_process_that_is_killed_while_it_waits_holds_nobody_up(
    workers: list[Worker], queue: Path
) -> None:
    a, b, c, _ = workers
    a.tell("reserve", 100, 150)
    assert a.says() == "admitted"
    b.tell("reserve", 150, 150)
    assert b.says() == "waits"
    c.tell("reserve", 50, 150)
    assert c.says() == "waits"
    b.kill()
    assert c.says() == "admitted"
    assert held(queue) == [a.pid, c.pid]


def test_an_interrupt_ends_the_wait_at_once(workers: list[Worker], queue: Path) -> None:
    a, b, c, _ = workers
    a.tell("reserve", 100, 100)
    assert a.says() == "admitted"
    b.tell("reserve", 100, 100)
    assert b.says() == "waits"
    b.signal(signal.SIGINT)
    assert b.says() == "interrupted"
    assert held(queue) == [a.pid]
    c.tell("reserve", 100, 100)
    assert c.says() == "waits"
    a.tell("leave")
    assert (a.says(), c.says()) == ("left", "admitted")


def test_children_of_a_killed_process_keep_nothing(workers: list[Worker], queue: Path) -> None:
    a, b, _, _ = workers
    a.tell("reserve", 100, 100)
    assert a.says() == "admitted"
    a.tell("fork")
    child = int(a.says().removeprefix("forked "))
    try:
        assert held(queue) == [a.pid]  # the end of the block in the child ended nothing
        b.tell("reserve", 100, 100)
        assert b.says() == "waits"
        a.kill()
        assert b.says() == "admitted"
        os.kill(child, 0)  # the child lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_can_never_fit_is_said_at_once(workers: list[Worker], queue: Path) -> None:
    a, b, _, _ = workers
    a.tell("reserve", 100, 100)
    assert a.says() == "admitted"
    b.tell("reserve", 101, 100)
    assert b.says() == "OutOfMemory"
    assert held(queue) == [a.pid]
