"""Several processes on one device: each reserves what it will use, and waits until that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from . import _C, _admission
from .memory import (
    DeviceLike,
    _device_of,
    _get_limit,
    _host_bytes,
    _key,
    _parse_budget,
    _set_limit,
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


# --- the limits of this process -------------------------------------------------------

_mutex = threading.Lock()  # guards the next two
_active: dict[tuple[int, int], list[int]] = {}  # device -> bytes of each reservation
_before: dict[tuple[int, int], int | None] = {}  # device -> the limit that was there before
_mine = threading.local()  # .held: reservations of this thread, outermost first


def _forget_in_child() -> None:
    """A child has none of its parent's reservations; its limits begin anew, too."""
    global _mutex, _mine
    _mutex, _mine = threading.Lock(), threading.local()
    _active.clear()
    _before.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _limit_of_user(device: torch.device) -> int | None:
    """The limit that is in force here but for reservations."""
    with _mutex:
        key = _key(device)
        return _before[key] if key in _active else _get_limit(device)


def _limit_more(device: torch.device, size: int) -> None:
    """The reservations of all threads together are this process's limit."""
    key = _key(device)
    with _mutex:
        if key not in _active:
            _before[key] = _get_limit(device)
            _active[key] = []
        _active[key].append(size)
        _set_limit(device, _least(sum(_active[key]), _before[key]))


def _limit_less(device: torch.device, size: int) -> None:
    key = _key(device)
    with _mutex:
        _active[key].remove(size)
        if _active[key]:
            _set_limit(device, _least(sum(_active[key]), _before[key]))
        else:
            del _active[key]
            _set_limit(device, _before.pop(key))


def _least(size: int, limit: int | None) -> int:
    return size if limit is None else min(size, limit)


# --- devices --------------------------------------------------------------------------


def _queue_of(device: torch.device) -> tuple[str, int | None]:
    """(name of the device's queue, its bytes): the same for all processes that see it."""
    if device.type == "cpu":
        return "cpu", _host_bytes()
    if device.type != "cuda":
        raise ValueError(f"reserve() knows 'cpu' and 'cuda' devices, got {str(device)!r}")
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"reserve(): there is no device {str(device)!r} here")
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


# --- reservations ---------------------------------------------------------------------


class Reservation:
    """What `reserve` returns: a context manager, and a decorator.

    `bytes` and `device` are what is reserved, `budget` what the device has for all
    reservations; `waited` is the time in seconds that the admission took.
    """

    __slots__ = (
        "_again", "_baseline", "_limit", "_limited", "_pid", "_stack", "_ticket", "_timeout",
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
        self.bytes = size
        self.device = device
        self.budget = budget  # None: the device's own, which is asked for at the entry
        self.waited = 0.0
        self._timeout = timeout
        self._limit = limit
        self._again = again
        self._ticket: _admission.Ticket | None = None
        self._limited = False  # whether the limit has to be taken back
        self._stack: list[Reservation] | None = None  # the thread's, while it is held
        self._baseline: int | None = None
        self._pid = 0

    def __repr__(self) -> str:
        state = "not held" if self._stack is None else "held"
        return f"<oomkit.Reservation of {self._what()}, {state}>"

    def _what(self) -> str:
        return f"{format_bytes(self.bytes)} on {str(self.device)!r}"

    def __call__(self, function: _F) -> _F:
        """A function that reserves anew at each call."""
        if not callable(function):
            raise TypeError(
                f"reserve() expected a function to decorate, got {type(function).__name__!r}"
            )
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("reserve() cannot decorate an async or a generator function")
        again = self._again

        @functools.wraps(function)
        def reserved(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return reserved  # type: ignore[return-value]

    # --- taking ---

    def __enter__(self) -> Reservation:
        if self._stack is not None:
            raise RuntimeError("reserve(): this reservation is held already: make another one")
        stack: list[Reservation] = _mine.__dict__.setdefault("held", [])
        outer = next((one for one in reversed(stack) if one.device == self.device), None)
        self._pid = os.getpid()
        try:
            if outer is None:
                self._admit()
            else:
                self._check_inside(outer)
            stack.append(self)
            self._stack = stack
        except BaseException:  # interrupts, too: the place must not stay
            self._give_back()
            raise
        return self

    def _check_inside(self, outer: Reservation) -> None:
        """A part of what this thread has reserved needs no place of its own."""
        self.budget = outer.budget
        if self.bytes > outer.bytes:
            # Who waits for more while holding some, and another one does so, wait for ever.
            raise RuntimeError(
                f"reserve() of {self._what()} inside a reservation of "
                f"{format_bytes(outer.bytes)}: it would wait for more while holding some, as "
                "others may, for ever. Reserve the larger amount first"
            )

    def _admit(self) -> None:
        if not _admission.has_locks():
            raise RuntimeError(
                "reserve() needs the file locks of Linux and macOS (fcntl), which this Python "
                "lacks: run one process at a time, or give each a device of its own"
            )
        name, total = _queue_of(self.device)
        self.budget = budget = total if self.budget is None else self.budget
        if budget is None:
            raise RuntimeError("reserve() does not know this machine's memory: pass budget=")
        self._check_possible(budget)
        self._ticket = _admission.Ticket(_admission.folder(name))
        self._wait(self._ticket, budget)
        if self._limit:
            _limit_more(self.device, self.bytes)
            self._limited = True
        self._baseline = memory(self.device).allocated

    def _check_possible(self, budget: int) -> None:
        where = f"there are {format_bytes(budget)} for all reservations"
        limit = _limit_of_user(self.device) if self._limit else None
        if limit is not None and limit < budget:
            budget, where = limit, f"limit_memory() leaves this process {format_bytes(limit)}"
        if self.bytes > budget:
            raise _C.OutOfMemory(
                f"reserve() of {self._what()} can never be admitted: {where}. Reserve less"
            )

    def _wait(self, ticket: _admission.Ticket, budget: int) -> None:
        begun = _clock()
        silent = 0.0  # seconds of waiting before the next message
        while True:
            places = ticket.before()
            if places is None and ticket.ask(self.bytes):
                places = ticket.before()
            self.waited = _clock() - begun
            if places is not None and sum(p.bytes for p in places) + self.bytes <= budget:
                break
            why = "its queue is locked" if places is None else _told(places, budget)
            if self._timeout is not None and self.waited >= self._timeout:
                raise TimeoutError(
                    f"reserve() of {self._what()} was not admitted within {self._timeout:g} s: "
                    f"{why}. Reserve less, wait longer (timeout=), or end one of them"
                )
            if self.waited >= silent:
                silent = self._say_waiting(why)
            left = _INTERVAL if self._timeout is None else self._timeout - self.waited
            _sleep(min(_INTERVAL, left))
        if silent:
            log.info("oomkit: reserve=%d device=%s admitted after %.1f s",
                     self.bytes, self.device, self.waited)  # fmt: skip

    def _say_waiting(self, why: str) -> float:
        """The time of the next message. The first is quiet: most waits are short."""
        loud = self.waited >= _LOUD
        log.log(logging.WARNING if loud else logging.INFO,
                "oomkit: reserve=%d device=%s waiting for %.0f s: %s",
                self.bytes, self.device, self.waited, why)  # fmt: skip
        return self.waited + _REPEAT if loud else _LOUD

    # --- giving back ---

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a child made inside the block: the reservation is its parent's
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.remove(self)
        if self._ticket is not None:
            try:
                self._let_go()
            finally:
                self._give_back()

    def _let_go(self) -> None:
        """Who comes next needs the memory itself: not caches, nor what cycles hold."""
        now = memory(self.device).allocated
        if now is not None and self._baseline is not None and now > self._baseline:
            gc.collect()
        is_cuda = self.device.type == "cuda"
        if is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # the device is broken: its next call says so
                log.debug("oomkit: emptying the cache after a reservation failed: %s", error)

    def _give_back(self) -> None:
        ticket, self._ticket = self._ticket, None
        limited, self._limited = self._limited, False
        try:
            if limited:
                _limit_less(self.device, self.bytes)
        finally:
            if ticket is not None:
                ticket.leave()


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

    All processes of a user that reserve stand in one queue for each device: first come, first
    served, also before a smaller one that would fit. A reservation ends with its block, and
    with its process, however that ends. Inside the block `limit_memory(nbytes)` is in force, so
    that what others have reserved is there for them, and steps of `auto_batch` are split to fit.

    As a decorator it reserves for each call. Around an objective it belongs on the outside,
    `@reserve(...)` above `@prune_on_oom`: a failed trial's memory is free then before its place.
    Inside another reservation of the same thread and device it is a part of that one.

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
            )
        if not timeout >= 0:
            raise ValueError(f"reserve() expected timeout to be at least 0 seconds, got {timeout}")
    return Reservation(size, _device_of("reserve", device), most, timeout, limit, again)
