"""oomkit.reserve: interrupts at any line, limits of the user, blocks in odd orders."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import oomkit
from oomkit import reserve as reserve_function
from oomkit._limits import admission as _admission
from oomkit._limits import layers as _layers
from oomkit._limits.admission import Ticket

MIB = 2**20
module: Any = sys.modules["oomkit.reserve"]


def reserve(mebibytes: float, **options: Any) -> oomkit.Reservation:
    return reserve_function(int(mebibytes * MIB), device="cpu", budget=100 * MIB, **options)


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OOMKIT_RESERVE_DIR", str(tmp_path))
    limit = budget()
    yield tmp_path / "cpu"
    assert _layers._reserved == {} and _layers._of_user == {}
    assert budget() == limit


def files(queue: Path) -> list[str]:
    return [name for name in os.listdir(queue) if name != "queue.lock"]


def budget() -> int | None:
    return oomkit.memory("cpu").budget


# --- interrupts ---


class Interrupt:
    """Raises KeyboardInterrupt at one event of the reservation's own code, as a signal would."""

    FILES = (module.__file__, _admission.__file__, _layers.__file__)

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event in ("call", "line"):
            self.left -= 1
            if self.left == -1:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({event})"
                raise KeyboardInterrupt
        return self


def interrupted(at: int, body: Callable[[], object]) -> str:
    """Where it came; empty when the body has fewer events."""
    tracer, before = Interrupt(at), sys.gettrace()
    sys.settrace(tracer)
    try:
        body()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.where


# A file that closes itself says so; an interrupt in `__del__` is told, not raised.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_no_lock(queue: Path) -> None:
    def ask() -> None:
        place = Ticket(_admission.folder("cpu"))
        place.ask(MIB)
        place.leave()

    ask()
    for at in range(10_000):
        where = interrupted(at, ask)
        assert not [p for p in _admission._places(queue) if _admission._is_held(queue / p.name)]
        assert not _admission._is_held(queue / "queue.lock"), where
        if not where:
            assert at > 50
            break


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_leaves_no_reservation(queue: Path, inside: bool) -> None:
    def body() -> None:
        with reserve(10):
            if inside:
                with reserve(5, limit=True):
                    pass

    body()
    for at in range(10_000):
        where = interrupted(at, body)
        assert _layers._reserved == {} and budget() is None, where
        assert not [p for p in _admission._places(queue) if _admission._is_held(queue / p.name)]
        with reserve(100, timeout=0):  # nothing is taken for one that it were inside of
            assert len(files(queue)) == 1 and budget() == 100 * MIB, where
        if not where:
            assert at > 100
            break


def test_a_limit_that_cannot_be_set_leaves_nothing(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = _layers._put
    fails = [True]

    def broken(key: Any, limit: int | None) -> None:
        if fails:
            raise RuntimeError("CUDA error: unspecified launch failure" if fails.pop() else "")
        put(key, limit)

    monkeypatch.setattr(_layers, "_put", broken)
    one = reserve(50)
    with pytest.raises(RuntimeError, match="launch failure"):
        one.__enter__()
    assert files(queue) == [] and _layers._reserved == {} and budget() is None
    with one:
        assert budget() == 50 * MIB
        fails.append(True)
        with pytest.raises(RuntimeError, match="launch failure"):
            one.__exit__(None, None, None)
        assert files(queue) == [] and repr(one).endswith("not held>")
    with one:  # not inside of what is over
        assert len(files(queue)) == 1
    assert budget() is None


# --- limits, nesting ---


def test_limits_of_the_user_and_of_reservations_are_two() -> None:
    one = contextvars.Context().run(reserve(20).__enter__)  # inside of which is nobody
    with oomkit.limit_memory(10 * MIB, device="cpu"):
        assert budget() == 10 * MIB
        with reserve(5):
            assert budget() == 10 * MIB  # together they have 25
            one.__exit__(None, None, None)
            assert budget() == 5 * MIB
        assert budget() == 10 * MIB
    assert budget() is None

    limit = oomkit.limit_memory(50 * MIB, device="cpu")
    with reserve(20):
        limit.__exit__(None, None, None)
        assert budget() == 20 * MIB
        oomkit.limit_memory(15 * MIB, device="cpu")
        assert budget() == 15 * MIB
        oomkit.limit_memory(40 * MIB, device="cpu")
        assert budget() == 20 * MIB
    assert budget() == 40 * MIB
    oomkit.limit_memory(None, device="cpu")


def test_one_with_a_limit_in_one_without() -> None:
    with reserve(60, limit=False):
        with reserve(50), reserve(40):
            assert budget() == 50 * MIB
        assert budget() is None


def test_a_place_stays_while_others_are_inside_of_it(queue: Path) -> None:
    outer = reserve(60).__enter__()
    inner = reserve(50).__enter__()
    outer.__exit__(None, None, None)
    assert repr(outer).endswith("not held>")
    assert len(files(queue)) == 1 and budget() == 60 * MIB
    with reserve(50):
        inner.__exit__(None, None, None)
        assert len(files(queue)) == 1 and budget() == 60 * MIB
    assert files(queue) == [] and budget() is None


def test_a_task_is_inside_its_own_blocks_alone(queue: Path) -> None:
    places = []

    async def job(mebibytes: int, turns: int) -> None:
        with reserve(mebibytes):
            for _ in range(turns):
                await asyncio.sleep(0)
                places.append(len(files(queue)))

    async def both() -> None:
        await asyncio.gather(job(60, 3), job(40, 5))

    asyncio.run(both())
    assert places == [2, 2, 2, 2, 2, 1, 1, 1] and files(queue) == []
