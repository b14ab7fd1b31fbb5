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
from typing import Any

SECONDS = 120
CPU_SECONDS = 0.6
"""After which a child counts as hung. None of them takes a tenth of it."""


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


def _limit(cpu: float) -> None:
    """A child that hangs is ended by a signal, which says where it was."""
    if cpu:
        signal.setitimer(signal.ITIMER_PROF, cpu)
        signal.alarm(SECONDS)  # for one that waits
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
            faulthandler.register(number, 2, all_threads=False, chain=True)


def apart(work: Callable[[], Any], cpu: float = CPU_SECONDS) -> Answer:
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
                _limit(cpu)
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
