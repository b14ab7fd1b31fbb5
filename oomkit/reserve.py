"""Several processes on one device: each reserves what it will use, and waits until that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

import torch

from . import _C
from ._limits import admission as _admission
from ._limits import layers as _layers
from .memory import (
    DeviceLike,
    _device_of,
    _host_bytes,
    _key,
    _parse_budget,
    memory,
)
from .report import format_bytes

__all__ = ["Reservation", "reserve"]

log = logging.getLogger("oomkit")

_F = TypeVar("_F", bound=Callable[..., Any])

_INTERVAL = 0.1  # seconds between two looks at the queue
_LOUD = 10.0  # seconds of waiting that are no more than INFO
_REPEAT = 60.0  # seconds between two messages after that
_NAMED = 6  # processes that a message names

# What a test of waiting replaces.
_clock = time.monotonic
_sleep = time.sleep


# --- the reservations of this process -------------------------------------------------

# By context, not by thread: a task of asyncio is inside its own blocks alone. Outermost first,
# and weak: who forgets to leave a block keeps no others in it.
_held: ContextVar[tuple[weakref.ref[Reservation], ...]] = ContextVar("oomkit.reserve", default=())


# --- devices --------------------------------------------------------------------------


def _queue_of(device: torch.device) -> tuple[str, int | None]:
    """(name of the device's queue, its bytes): the same for all processes that see it."""
    if device.type == "cpu":
        return "cpu", _host_bytes()
    if device.type != "cuda":
        raise ValueError(
            f"reserve() knows 'cpu' and 'cuda' devices, got {str(device)!r}{_C.see('reserve')}"
        )
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"reserve(): there is no device {str(device)!r} here{_C.see('reserve')}")
    about = torch.cuda.get_device_properties(device)
    # Numbers differ between processes with another CUDA_VISIBLE_DEVICES.
    return f"cuda-{getattr(about, 'uuid', device.index)}", int(about.total_memory)


# --- what is said ---------------------------------------------------------------------


def _told(places: Sequence[_admission.Place], budget: int) -> str:
    """Who has memory, and who waits for it."""
    held: list[_admission.Place] = []
    waiting: list[_admission.Place] = []
    for place in places:
        fits = not waiting and sum(p.bytes for p in held) + place.bytes <= budget
        (held if fits else waiting).append(place)
    text = (
        f"{format_bytes(sum(p.bytes for p in held))} of {format_bytes(budget)} are reserved by "
        f"{_named(held)}"
    )
    return f"{text}; {_named(waiting)} before this one" if waiting else text


def _named(places: Sequence[_admission.Place]) -> str:
    names = [f"{place.pid} ({format_bytes(place.bytes)})" for place in places[:_NAMED]]
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"process{'es' if len(places) > 1 else ''} {', '.join(names)}{more}"


def _locked(ticket: _admission.Ticket) -> str:
    owner = ticket.owner()
    return "its queue is locked" if owner is None else f"its queue is locked by process {owner}"


# --- reservations ---------------------------------------------------------------------


class _Share:
    """The place in the queue that a reservation and those inside of it have together."""

    __slots__ = ("baseline", "key", "parts", "ticket")

    def __init__(self, key: _layers.Key) -> None:
        self.key = key
        self.parts: set[int] = set()  # ids of the reservations that are held in it
        self.ticket: _admission.Ticket | None = None
        self.baseline: int | None = None  # bytes that were allocated before

    def free(self) -> None:
        try:
            _layers.release(self.key, id(self))
        finally:
            if self.ticket is not None:
                self.ticket.leave()
        self.ticket = None


class Reservation:
    """What `reserve` returns: a context manager, and a decorator.

    `bytes` and `device` are what is reserved, `budget` what the device has for all
    reservations; `waited` is the time in seconds that the admission took.
    """

    __slots__ = (
        "__weakref__", "_again", "_key", "_limit", "_limiting", "_pid", "_share", "_timeout",
        "budget", "bytes", "device", "waited",
    )  # fmt: skip

    def __init__(
        self,
        size: int,
        device: torch.device,
        budget: int | None,
        timeout: float | None,
        limit: bool,
        again: Callable[[], Reservation],
    ) -> None:
        self._share: _Share | None = None  # while it is held
        self._pid = 0
        self.bytes = size
        self.device = device
        self.budget = budget  # None: the device's own, which is asked for at the entry
        self.waited = 0.0
        self._timeout = timeout
        self._limit = limit
        self._limiting = False  # itself, or one that it is in
        self._again = again
        self._key = _key(device)

    def __repr__(self) -> str:
        state = "held" if self._is_held() else "not held"
        return f"<oomkit.Reservation of {self._what()}, {state}>"

    def _what(self) -> str:
        return f"{format_bytes(self.bytes)} on {str(self.device)!r}"

    def __call__(self, function: _F) -> _F:
        """A function that reserves anew at each call."""
        if not callable(function):
            raise TypeError(
                f"reserve() expected a function to decorate, got {type(function).__name__!r}"
                f"{_C.see('decoration')}"
            )
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"reserve() cannot decorate an async or a generator function{_C.see('decoration')}"
            )
        again = self._again

        @functools.wraps(function)
        def reserved(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return reserved  # type: ignore[return-value]

    # --- taking ---

    def __enter__(self) -> Reservation:
        if self._is_held():
            raise self._held_already()
        self._give_back()  # what an interrupt or an error has left
        self._pid = os.getpid()
        outer = self._outer()
        try:
            if outer is None or not self._join(outer):
                self._admit()
            _held.set((*_held.get(), weakref.ref(self)))
        except BaseException:  # interrupts, too: the place must not stay
            self._give_back()
            raise
        return self

    @staticmethod
    def _held_already() -> RuntimeError:
        """Apart from __enter__(), whose handler has to begin within 256 instructions: from there
        on CPython 3.11 needs memory to enter one, and without any it tries for ever."""
        return RuntimeError(
            f"reserve(): this reservation is held already: make another one{_C.see('reserve')}"
        )

    def _outer(self) -> Reservation | None:
        for reference in reversed(_held.get()):
            one = reference()
            if one is not None and one._is_held() and one._pid == self._pid:
                if one.device == self.device:
                    return one
        return None

    def _is_held(self) -> bool:
        share = self._share
        return share is not None and id(self) in share.parts

    def _join(self, outer: Reservation) -> bool:
        """False where `outer` has ended meanwhile, in another thread or task."""
        self._check_inside(outer)
        with _layers.mutex:
            share = outer._share
            if share is None or not share.parts:
                return False
            self._share = share
            share.parts.add(id(self))
        self._limiting = self._limit or outer._limiting
        if self._limit and not outer._limiting:
            _layers.reserve(self._key, id(self), self.bytes)
        return True

    def _check_inside(self, outer: Reservation) -> None:
        """A part of what this thread has reserved needs no place of its own."""
        self.budget = outer.budget
        if self.bytes > outer.bytes:
            # Who waits for more while holding some, and another one does so, wait for ever.
            raise RuntimeError(
                f"reserve() of {self._what()} inside a reservation of "
                f"{format_bytes(outer.bytes)}: it would wait for more while holding some, as "
                "others may, for ever. Reserve the larger amount first"
                f"{_C.see('reserve')}"
            )

    def _admit(self) -> None:
        if not _admission.has_locks():
            raise RuntimeError(
                "reserve() needs the file locks of Linux and macOS (fcntl), which this Python "
                "lacks: run one process at a time, or give each a device of its own"
                f"{_C.see('reserve')}"
            )
        name, total = _queue_of(self.device)
        self.budget = budget = total if self.budget is None else self.budget
        if budget is None:
            raise RuntimeError(
                f"reserve() does not know this machine's memory: pass budget={_C.see('reserve')}"
            )
        self._check_possible(budget)
        self._share = share = _Share(self._key)
        share.parts.add(id(self))
        share.ticket = _admission.Ticket(_admission.folder(name))
        self._wait(share.ticket, budget)
        self._limiting = self._limit
        if self._limit:
            _layers.reserve(self._key, id(share), self.bytes)
        share.baseline = memory(self.device).allocated

    def _check_possible(self, budget: int) -> None:
        where = f"there are {format_bytes(budget)} for all reservations"
        limit = _layers.get_user(self._key) if self._limit else None
        if limit is not None and limit < budget:
            budget, where = limit, f"limit_memory() leaves this process {format_bytes(limit)}"
        if self.bytes > budget:
            raise _C.OutOfMemory(
                f"reserve() of {self._what()} can never be admitted: {where}. Reserve less"
                f"{_C.see('reserve')}"
            )

    def _wait(self, ticket: _admission.Ticket, budget: int) -> None:
        begun = _clock()
        silent = 0.0  # seconds of waiting before the next message
        while True:
            places = ticket.before()
            self.waited = _clock() - begun
            if places is None and ticket.ask(self.bytes, self._left()):
                places = ticket.before()
            self.waited = _clock() - begun
            if places is not None and sum(p.bytes for p in places) + self.bytes <= budget:
                break
            why = _locked(ticket) if places is None else _told(places, budget)
            if self._timeout is not None and self.waited >= self._timeout:
                raise TimeoutError(
                    f"reserve() of {self._what()} was not admitted within {self._timeout:g} s: "
                    f"{why}. Reserve less, wait longer (timeout=), or end one of them"
                    f"{_C.see('reserve')}"
                )
            if self.waited >= silent:
                silent = self._say_waiting(why)
            left = self._left()
            _sleep(_INTERVAL if left is None else min(_INTERVAL, left))
        if silent:
            log.info("reserve=%d device=%s admitted after %.1f s",
                     self.bytes, self.device, self.waited)  # fmt: skip

    def _left(self) -> float | None:
        return None if self._timeout is None else max(0.0, self._timeout - self.waited)

    def _say_waiting(self, why: str) -> float:
        """The time of the next message. The first is quiet: most waits are short."""
        loud = self.waited >= _LOUD
        log.log(logging.WARNING if loud else logging.INFO,
                "reserve=%d device=%s waiting for %.0f s: %s",
                self.bytes, self.device, self.waited, why)  # fmt: skip
        return self.waited + _REPEAT if loud else _LOUD

    # --- giving back ---

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        except MemoryError:  # anywhere in there: an error that passes would keep the place
            self._leave()
            raise

    def _leave(self) -> None:
        """May be repeated."""
        if os.getpid() != self._pid:
            return  # a child made inside the block: the reservation is its parent's
        try:
            others = []  # no comprehension: without memory for its cell CPython 3.11 loses `self`
            for reference in _held.get():
                if reference() not in (None, self):
                    others.append(reference)
            _held.set(tuple(others))
            if self._share is not None and self._share.parts == {id(self)}:
                self._let_go(self._share.baseline)
        finally:
            self._give_back()

    def _let_go(self, baseline: int | None) -> None:
        """Who comes next needs the memory itself: not caches, nor what cycles hold."""
        now = memory(self.device).allocated
        if now is not None and baseline is not None and now > baseline:
            gc.collect()
        is_cuda = self.device.type == "cuda"
        if is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # the device is broken: its next call says so
                log.debug("emptying the cache after a reservation failed: %s", error)

    def _give_back(self) -> None:
        try:
            self._undo()
        except Exception:
            raise
        except BaseException:  # an interrupt in the middle of it
            self._undo()
            raise

    def _undo(self) -> None:
        """Of any part of an entry, and of itself: marks are cleared last."""
        share = self._share
        if share is None:
            return
        with _layers.mutex:
            share.parts.discard(id(self))
            try:
                _layers.release(self._key, id(self))
            finally:
                if not share.parts:  # else others are held in it, and it keeps its place
                    share.free()
            self._share = None

    def __del__(self) -> None:
        """Where an interrupt came before the block, or in the middle of its end."""
        share = getattr(self, "_share", None)  # an interrupt may come before it is set
        if share is not None and self._pid == os.getpid():
            self._give_back()


def reserve(
    nbytes: int | str,
    *,
    device: DeviceLike = None,
    budget: int | str | None = None,
    timeout: float | None = None,
    limit: bool = True,
) -> Reservation:
    """reserve(nbytes, *, device=None, budget=None, timeout=None, limit=True) -> Reservation

    Reserve memory of a device that several processes share; wait until it is there.

    >>> with oomkit.reserve("8GiB"):
    ...     study.optimize(objective, n_trials=1)

    All processes of a user that reserve wait in one queue for each device: first come, first
    served, also before a smaller one that would fit. A reservation ends with its block, and
    with its process, however that ends. Inside the block `limit_memory(nbytes)` is in force, so
    that what others have reserved is there for them, and steps of `auto_batch` are split to fit.

    As a decorator it reserves for each call. Around an objective it belongs on the outside,
    `@reserve(...)` above `@prune_on_oom`: a failed trial's memory is free then before its place.
    Inside another reservation of the same context and device it is a part of that one. Waiting
    blocks its thread: tasks of one asyncio loop reserve before it, or in threads of their own.

    Memory that is used without a reservation is not known here; nor is what CUDA itself takes for
    each process (about half a GiB): leave room for both with `budget`.

    Parameters
    ----------
    nbytes : int or str
        Bytes, or a size such as "8GiB": all that this process will use in the block, what it
        uses already included.
    device : torch.device, str or int, optional
        The CPU or a CUDA device, by default as in `limit_memory`. CUDA is initialised (not
        the device), so children that use it have to be spawned.
    budget : int or str, optional
        Bytes that there are for all reservations, the same in all processes. By default the
        memory of the device, for the CPU that of the machine.
    timeout : float, optional
        Seconds to wait; 0 does not wait. None waits for as long as it takes. The logger `oomkit`
        says at once (INFO), after 10 s and then each minute (WARNING) who is waited for.
    limit : bool
        False leaves this process's limit as it is.

    Returns
    -------
    Reservation
        To be entered with `with`, or to decorate a function.

    Raises
    ------
    TimeoutError
        It was not admitted in time (when it is entered).
    OutOfMemory
        It is more than there is for all, or than `limit_memory` leaves (when it is entered).
    RuntimeError
        It is inside a smaller reservation; or there are no file locks here (Windows).
    """
    again = functools.partial(
        reserve, nbytes, device=device, budget=budget, timeout=timeout, limit=limit
    )
    size = _parse_budget(nbytes, "reserve", "nbytes", "a size")
    most = None if budget is None else _parse_budget(budget, "reserve")
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(
                f"reserve() expected timeout to be a number of seconds or None, got "
                f"{type(timeout).__name__!r}"
                f"{_C.see('options')}"
            )
        if not timeout >= 0:
            raise ValueError(
                f"reserve() expected timeout to be at least 0 seconds, got {timeout}"
                f"{_C.see('options')}"
            )
    return Reservation(size, _device_of("reserve", device), most, timeout, limit, again)
