"""The queue for a device's memory: a folder for each device, a locked file for each place in it.

A place is a file whose name says ticket, bytes and process, and whose lock (flock) its process
holds. The kernel releases the lock when the process ends, however it ends: a place whose lock
can be had is that of a dead process, and nobody counts it.

A place is admitted when the bytes of all places before it and its own fit. That needs nothing
but the folder: places before it only go, so that what is admitted stays admitted, and nobody
overtakes. Tickets are given under a lock of their own (`queue.lock`), so that no later place
gets a smaller one. No torch, no policy, no messages here.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

BASE = Path("/tmp")  # of the folders of all users; the same in each session
TRIES = 1000  # a millisecond each: others hold the lock of the queue for microseconds
_LOCK = "queue.lock"
_NAME = re.compile(r"(\d{12})\.(\d+)\.(\d+)")

# Descriptors whose locks are this process's. A child made by fork shares them and would keep
# the locks when this process is killed.
_open: set[int] = set()


def _forget_in_child() -> None:
    while _open:
        with contextlib.suppress(OSError):  # closed by the child's own code
            os.close(_open.pop())  # closing releases nothing: the parent has it open, too


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class Place(NamedTuple):
    """A place in the queue, as its file's name tells it."""

    ticket: int
    bytes: int
    pid: int
    name: str


def has_locks() -> bool:
    """Whether this Python has the locks that all of this rests on."""
    return fcntl is not None


def folder(device: str) -> Path:
    """The folder of a device's queue, made where it is missing. OSError where it cannot be.

    OOMKIT_RESERVE_DIR names the folder of all queues. The one by default is the same for all
    sessions of a user, whatever their environment, and on no network disk.
    """
    given = os.environ.get("OOMKIT_RESERVE_DIR")
    if given:
        found = Path(given).expanduser() / device
        found.mkdir(parents=True, exist_ok=True)
        return found
    own = BASE / f"oomkit-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    about = own.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{own} is no folder of user {os.geteuid()}")
    found = own / device
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _places(queue: Path) -> list[Place]:
    found = []
    for name in os.listdir(queue):
        match = _NAME.fullmatch(name)
        if match is not None:
            found.append(Place(int(match[1]), int(match[2]), int(match[3]), name))
    return sorted(found)


def _is_held(file: Path) -> bool:
    """Whether a living process has a place."""
    try:
        number = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def _lock_queue(queue: Path) -> int | None:
    """The lock of the queue, to be given to `_close`; None where others have it for long."""
    number = os.open(queue / _LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    _open.add(number)
    try:
        for _ in range(TRIES):
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number
            except BlockingIOError:
                time.sleep(0.001)
    except BaseException:  # an interrupt
        _close(number)
        raise
    _close(number)
    return None


def _close(number: int) -> None:
    """Said, not only closed: a child forked meanwhile may have it open still."""
    with contextlib.suppress(OSError):  # the folder's disk is gone, and the lock with it
        fcntl.flock(number, fcntl.LOCK_UN)
    _open.discard(number)
    os.close(number)


class Ticket:
    """A place of this process: asked for, waited with, left."""

    __slots__ = ("_file", "_number", "_pid", "_queue", "_ticket")

    def __init__(self, queue: Path) -> None:
        self._queue = queue
        self._ticket = 0
        self._number: int | None = None  # the descriptor that has the lock
        self._file: Path | None = None
        self._pid = os.getpid()

    def ask(self, size: int) -> bool:
        """Takes the last place of the queue. False where no ticket could be had in time."""
        lock = _lock_queue(self._queue)
        if lock is None:
            return False
        try:
            last = 0
            for place in _places(self._queue):
                last = max(last, place.ticket)
                if not _is_held(self._queue / place.name):
                    with contextlib.suppress(OSError):  # another user's; it counts for nothing
                        os.unlink(self._queue / place.name)
            self._ticket = last + 1
            self._file = self._queue / f"{self._ticket:012d}.{size}.{self._pid}"
            number = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            # Until it has the lock the file is a dead process's to all others.
            self._number = number
            _open.add(number)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            _close(lock)
        return True

    def before(self) -> list[Place] | None:
        """The living places before this one; None where this one has none (any more).

        Somebody may have emptied the folder: then another ticket is needed.
        """
        if self._file is None:
            return None
        places = _places(self._queue)
        if self._file.name not in [place.name for place in places]:
            self.leave()
            return None
        return [
            place
            for place in places
            if place.ticket < self._ticket and _is_held(self._queue / place.name)
        ]

    def leave(self) -> None:
        """Gives the place back. In a child made by fork it is the parent's, and stays."""
        if os.getpid() != self._pid:
            return
        if self._file is not None:
            with contextlib.suppress(OSError):  # gone already; without its lock it counts not
                os.unlink(self._file)
            self._file = None
        if self._number is not None:
            _close(self._number)
            self._number = None

    __del__ = leave  # where an interrupt came in the middle of it
