"""Children that are made by fork: what one of them answers, or how it died."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
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


FAULTY = Limit(0.6, 30)
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


def _native(lines: list[str]) -> str:
    """The innermost functions of C, by library, as torch's own handler of signals lists them:
    of CPython's it says only that they are Python's."""
    found = []
    for line in lines:
        if line == "<omitting python frames>":
            found.append("CPython")
        elif match := re.match(r"frame #\d+: (.*) \+ 0x\w+ \(0x\w+ in (?:.*/)?([^/]*)\)$", line):
            found.append(f"{match[1]} of {match[2]}")
        elif found and not line.startswith("frame #"):
            break
    own = [n for n, name in enumerate(found) if "FatalSignalHandler" in name]
    found = found[own[-1] + 1 :] if own else []
    while found and " of libc.so" in found[0]:  # faulthandler's raise(), and the signal's frame
        found = found[1:]
    return " <- ".join(found[:8])


def _last_words(text: str) -> str:
    """The line that tells why, where C was, and where Python was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Fatal", "terminate", "what():", "corrupt"))]
    frames = [line for line in lines if line.startswith("File ")][:4]
    native = _native(lines)
    told += [f"in {native}"] if native else []
    return "; ".join(told + frames) or " / ".join(lines[-3:])


def _arm(limit: Limit) -> None:
    """A child that hangs is ended by a signal, which says where it was."""
    signal.setitimer(signal.ITIMER_PROF, limit.cpu)
    signal.setitimer(signal.ITIMER_REAL, limit.wall)
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.unregister(number)  # of the process that this one was forked from
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, 2, all_threads=False, chain=True)


def _say_native() -> None:
    """A crash also says which functions of C it was in. Not an abort: it is the allocator's own
    where the heap is broken, and listing functions would wait for its lock."""
    if torch := sys.modules.get("torch"):
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


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
                _say_native()
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
