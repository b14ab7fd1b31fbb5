"""Where the interpreter was refused memory: what a crash far from it cannot tell."""

from __future__ import annotations

import functools
import mmap
import tempfile
from pathlib import Path
from typing import Any

from helpers.compiled import load_module

SOURCE = Path(__file__).with_name("witness.c")

room: mmap.mmap | None = None
"""Shared with children: what the last of them has written stays."""


@functools.cache
def _module() -> Any:
    with tempfile.TemporaryDirectory(prefix="oomkit-witness-") as folder:
        return load_module(SOURCE, Path(folder), ["-ldl"])


def open_room() -> None:
    """A stage's own: two that sweep at the same time must not share one."""
    global room
    room = mmap.mmap(-1, _module().size())


def begin(set_nomemory: Any, *arguments: int) -> None:
    """Nothing is allocated between set_nomemory() and the end of this call."""
    if room is None:
        set_nomemory(*arguments)
    else:
        _module().begin(room, set_nomemory, *arguments)


def places() -> list[str]:
    """Of the last child: functions from the one that allocates to the one that runs Python
    code, for each place where memory was refused (some two dozen at the most)."""
    return [] if room is None else _module().read(room)
