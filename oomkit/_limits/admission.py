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
import io
import os
import re
import stat
import time
import weakref
from pathlib import Path
from typing import NamedTuple

from .. import _C

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

BASE = Path("/tmp")  # of the folders of all users; the same in each session
TRIES = 1000  # a millisecond each: others hold the lock of the queue for microseconds
_sleep = time.sleep  # what a test replaces
_LOCK = "queue.lock"
_NAME = re.compile(r"(\d{12})\.(\d+)\.(\d+)")

# Files whose locks are this process's. A child made by fork shares them and would keep the locks
# when this process is killed. Weak, and without callbacks: an interrupt in one would be lost.
_open: set[weakref.ref[io.FileIO]] = set()


def _forget_in_child() -> None:
    while _open:
        file = _open.pop()()
        if file is not None:
            with contextlib.suppress(OSError):  # closed by the child's own code
                file.close()  # closing releases nothing: the parent has it open, too


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
        raise PermissionError(
            f"reserve() keeps its queue in {own}, which belongs to another user than "
            f"{os.geteuid()}: set OOMKIT_RESERVE_DIR to a folder of your own{_C.see('reserve')}"
        )
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
        with io.FileIO(file) as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _owned(path: Path, flags: int) -> io.FileIO:
    """An open file that closes itself where an interrupt leaves nobody to do so.

    An interrupt just before it costs a descriptor, which has no lock yet.
    """
    file = io.FileIO(os.open(path, flags | os.O_CREAT, 0o644))
    for one in list(_open):
        if one() is None:  # closed by itself, after an interrupt
            _open.discard(one)
    _open.add(weakref.ref(file))
    return file


def _lock_queue(queue: Path, tries: int = TRIES) -> io.FileIO | None:
    """The lock of the queue, to be given to `_close`; None where others have it for long."""
    file = _owned(queue / _LOCK, os.O_RDONLY)
    try:
        for left in reversed(range(tries)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if left:
                    _sleep(0.001)
    except BaseException:  # an interrupt
        file.close()
        raise
    _close(file)
    return None


def _close(file: io.FileIO) -> None:
    """Said, not only closed: a child forked meanwhile may have it open still."""
    try:
        if not file.closed:
            with contextlib.suppress(OSError):  # the folder's disk is gone, and the lock with it
                fcntl.flock(file, fcntl.LOCK_UN)
        _open.discard(weakref.ref(file))
    finally:
        file.close()


def _owner(queue: Path) -> int | None:
    """The process that has locked the queue, where the system tells (Linux)."""
    try:
        about = (queue / _LOCK).stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:  # nobody's lock, or another system
        return None
    name = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    for line in locks:
        words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
        if words[1] == "FLOCK" and words[3] == "WRITE" and words[5] == name:
            return int(words[4])
    return None


class Ticket:
    """A place of this process: asked for, waited with, left."""

    # Of the class, not set by `__init__`: `leave` comes after an interrupt in there, too.
    _file: Path | None = None
    _lock: io.FileIO | None = None
    _ticket = 0
    _pid = 0

    def __init__(self, queue: Path) -> None:
        self._pid = os.getpid()
        self._queue = queue

    def ask(self, size: int, seconds: float | None = None) -> bool:
        """Takes the last place of the queue. False where no ticket could be had in time."""
        tries = TRIES if seconds is None else min(TRIES, 1 + int(seconds * 1000))
        try:
            lock = _lock_queue(self._queue, tries)
        except FileNotFoundError:  # somebody has deleted the folder
            self._queue = folder(self._queue.name)
            return False
        if lock is None:
            return False
        with lock:  # closes it in C: for an interrupt on the way to `_close`
            try:
                self._take(size)
            except FileNotFoundError:  # deleted just now
                return False
            finally:
                _close(lock)
        return True

    def _take(self, size: int) -> None:
        last = 0
        for place in _places(self._queue):
            last = max(last, place.ticket)
            if not _is_held(self._queue / place.name):
                with contextlib.suppress(OSError):  # another user's; it counts for nothing
                    os.unlink(self._queue / place.name)
        self._ticket = last + 1
        self._file = self._queue / f"{self._ticket:012d}.{size}.{self._pid}"
        # Until it has the lock the file is a dead process's to all others.
        self._lock = _owned(self._file, os.O_RDWR | os.O_EXCL)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # others that look have it for microseconds

    def owner(self) -> int | None:
        """The process that has locked the queue, where that is known."""
        return _owner(self._queue)

    def before(self) -> list[Place] | None:
        """The living places before this one; None where this one has none (any more).

        Somebody may have emptied the folder: then another ticket is needed.
        """
        if self._file is None:
            return None
        try:
            places = _places(self._queue)
        except FileNotFoundError:  # the folder, too
            places = []
        if self._file.name not in [place.name for place in places]:
            self.leave()
            return None
        before = []  # no comprehension: without memory for its cell CPython 3.11 loses `self`
        for place in places:
            if place.ticket < self._ticket and _is_held(self._queue / place.name):
                before.append(place)
        return before

    def leave(self) -> None:
        """Gives the place back. In a child made by fork it is the parent's, and stays."""
        if os.getpid() != self._pid:
            return
        try:
            if self._file is not None:
                with contextlib.suppress(OSError):  # gone already; without its lock it counts not
                    os.unlink(self._file)
                self._file = None
        finally:
            if self._lock is not None:
                _close(self._lock)
                self._lock = None

    __del__ = leave  # where an interrupt came in the middle of it
