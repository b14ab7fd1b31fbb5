"""Which trials of a study run, and which were left by a process that has been killed.

A process locks one byte of a file for each of its trials, at the trial's number. The kernel
takes the lock away when the process ends, however it ends: a trial that is told as running,
and whose byte nobody has locked, is dead. The file is empty, and stays so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_ALONE = 2**40  # beyond all numbers of trials


class Alive:
    """The trials of the processes that work at one study. One for each process."""

    def __init__(self, file: Path) -> None:
        self._number = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self._mine: set[int] = set()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While a trial is asked for, or dead ones are looked for, nobody else does that."""
        fcntl.lockf(self._number, fcntl.LOCK_EX, 1, _ALONE)
        try:
            yield
        finally:
            fcntl.lockf(self._number, fcntl.LOCK_UN, 1, _ALONE)

    def hold(self, trial: int) -> None:
        fcntl.lockf(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, trial)
        self._mine.add(trial)

    def drop(self, trial: int) -> None:
        self._mine.discard(trial)
        fcntl.lockf(self._number, fcntl.LOCK_UN, 1, trial)

    def is_held(self, trial: int) -> bool:
        if trial in self._mine:  # one's own locks are in nobody's way
            return True
        try:
            fcntl.lockf(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, trial)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return True
        fcntl.lockf(self._number, fcntl.LOCK_UN, 1, trial)
        return False

    def close(self) -> None:
        os.close(self._number)
