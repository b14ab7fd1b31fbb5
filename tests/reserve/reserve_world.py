"""Processes that reserve memory as they are told to, and say what became of it.

Led over pipes: nothing here waits for time to pass.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

import oomkit

MIB = 2**20
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "oomkit"])
PATIENCE = 120.0  # seconds after which a test fails instead of hanging

Log = list[tuple[str, str]]


class Says(logging.Handler):
    """Tells the parent that a wait has begun."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " waiting for 0 s" in text:
            self._say("waits")


class Child:
    """What a worker process does for each line that it reads."""

    def __init__(self, commands: int, says: int) -> None:
        self._commands = os.fdopen(commands, "r", closefd=False)
        self._says = says
        self._held: list[oomkit.Reservation] = []
        self._tensors: list[torch.Tensor] = []

    def say(self, text: str) -> None:
        os.write(self._says, f"{text}\n".encode())

    def run(self) -> None:
        logger = logging.getLogger("oomkit")
        logger.setLevel(logging.INFO)
        logger.handlers = [Says(self.say)]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for line in self._commands:
            name, *numbers = line.split()
            try:
                getattr(self, f"do_{name}")(*map(int, numbers))
            except KeyboardInterrupt:
                self.say("interrupted")
            except (TimeoutError, oomkit.OutOfMemory) as error:
                self.say(type(error).__name__)

    def do_reserve(self, size: int, budget: int) -> None:
        one = oomkit.reserve(size * MIB, device="cpu", budget=budget * MIB)
        one.__enter__()
        self._held.append(one)
        self.say("admitted")

    def do_take(self, size: int) -> None:
        try:
            self._tensors.append(torch.empty(size * MIB, dtype=torch.uint8))
            self.say(f"has {size} MiB")
        except torch.OutOfMemoryError:
            self.say("out of memory")

    def do_leave(self) -> None:
        self._tensors.clear()
        self._held.pop().__exit__(None, None, None)
        self.say("left")

    def do_fork(self) -> None:
        """A child that outlives this process, as a loader's worker may."""
        pid = os.fork()
        if pid == 0:
            self._held[-1].__exit__(None, None, None)  # as at the end of a `with` in the child
            signal.pause()
        self.say(f"forked {pid}")


def _child(directory: str, commands: Connection, says: Connection) -> None:
    os.environ["OOMKIT_RESERVE_DIR"] = directory  # the server's is older
    Child(commands.fileno(), says.fileno()).run()


class Worker:
    """One process, seen from the test. It comes from a server that has only imported torch: a
    child of a process that has run other tests may hang in a lock that a thread held."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        self._log = log
        theirs, self._commands = SERVER.Pipe(duplex=False)
        self._heard, says = SERVER.Pipe(duplex=False)
        self._rest = b""
        directory = os.environ["OOMKIT_RESERVE_DIR"]
        self._process = SERVER.Process(target=_child, args=(directory, theirs, says))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        theirs.close()
        says.close()

    def tell(self, *words: Any) -> None:
        os.write(self._commands.fileno(), (" ".join(map(str, words)) + "\n").encode())

    def says(self) -> str:
        """The next thing that it says."""
        while b"\n" not in self._rest:
            assert self._heard.poll(PATIENCE), f"{self.name} says nothing; so far: {self._log}"
            more = os.read(self._heard.fileno(), 4096)
            assert more, f"{self.name} ended; so far: {self._log}"
            self._rest += more
        said, _, self._rest = self._rest.partition(b"\n")
        self._log.append((self.name, said.decode()))
        return said.decode()

    def is_silent(self) -> bool:
        return not self._rest and not self._heard.poll(0)

    def signal(self, number: int) -> None:
        self._log.append((self.name, signal.Signals(number).name))
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._commands.close()
        self._heard.close()
