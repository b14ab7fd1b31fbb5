"""Children that are made by fork: what one of them answers, or how it died."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """When a child counts as hung."""

    cpu: float
    """Seconds of processor time, that of its own children left out."""
    wall: float
    """Seconds, for one that waits."""


FAULTY = Limit(0.6, 120)
"""One with a fault. None of them takes a tenth of it."""
CALM = Limit(60, 600)
"""One without a fault, which may import everything."""
SWEEP = Limit(600, 1800)
"""One that forks all of these for a body."""


@dataclass
class Answer:
    value: Any = None
    died: str = ""
    """Of what, with what it said last; empty when it came to its end."""


def _read(reader: int) -> bytes:
    parts = []
    while part := os.read(reader, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def _last_words(text: str) -> str:
    """The line that tells why, and where Python was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Fatal", "terminate", "what():", "corrupt"))]
    frames = [line for line in lines if line.startswith("File ")][:4]
    return "; ".join(told + frames) or " / ".join(lines[-3:])


def _arm(limit: Limit) -> None:
    """A child that hangs is ended by a signal, which says where it was."""
    signal.setitimer(signal.ITIMER_PROF, limit.cpu)
    signal.setitimer(signal.ITIMER_REAL, limit.wall)
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.unregister(number)  # of the process that this one was forked from
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, 2, all_threads=False, chain=True)


def apart(work: Callable[[], Any], limit: Limit = FAULTY) -> Answer:
    """What `work` returns in a child of this process. An exception of it is a death, too."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as words:
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.dup2(words.fileno(), 2)
            code = 1
            try:
                faulthandler.enable(2, all_threads=False)
                _arm(limit)
                answer = pickle.dumps(work())
                while answer:
                    answer = answer[os.write(writer, answer) :]
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(writer)
        answer = _read(reader)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return Answer(pickle.loads(answer))
        words.seek(0)
        text = words.read()
    if os.WIFSIGNALED(status):
        how = signal.Signals(os.WTERMSIG(status)).name
        return Answer(died=f"{how}: {_last_words(text)}")
    return Answer(died=f"exit {os.waitstatus_to_exitcode(status)}: {text[-1500:]}")
