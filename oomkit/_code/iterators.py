"""Does a step take something out of an iterator that is there before its call?

Nothing can put that back. The C engine (csrc/proof/repeats.c) asks before the whole batch runs once
more, which no comparison with its parts verifies.
"""

from __future__ import annotations

import io
import queue
import types
from collections.abc import Iterator
from typing import Any

from .bytecode import Steps
from .objects import unwrap, wrapped
from .plain_state import Places, given_to
from .spots import Frame
from .uses import Uses


class _Search(Places):
    """Stops at nothing: what the code comes to by a name may be taken from."""

    name: str | None = None  # of the first one

    def read(self, frame: Frame, found: Uses) -> None:
        super().read(frame, found)
        for steps in found.loads:
            if self.name is not None:
                return
            self.name = next(
                (spot.name() for spot in frame.resolve(steps) if _is_iterator(spot.value)), None
            ) or self._taken_from(frame, steps)

    def _taken_from(self, frame: Frame, steps: Steps) -> str | None:
        """`queue.get`, `file.readline`: the method has no place of its own."""
        if len(steps) < 2 or steps[-1][0] != ".":
            return None
        name = steps[-1][1]
        kinds = _TAKES.get(name, ())
        owners = frame.resolve(steps[:-1]) if kinds else []
        return next(
            (f"{one.name()}.{name}" for one in owners if isinstance(one.value, kinds)), None
        )


_TAKES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("get", "get_nowait"), (queue.Queue, queue.SimpleQueue)),
    **dict.fromkeys(("read", "readline", "readlines", "readinto"), (io.IOBase,)),
}
"""Names of methods, and whose they are."""


def _is_iterator(value: Any) -> bool:
    """A file is one, too, to which steps write."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def iterates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of an iterator (a generator, a loader's iterator, `itertools.count()`) that is there
    before the call, and that the code of the step, or of what it calls, comes to.

    Args:
        func: the decorated callable, and ``args`` and ``kwargs`` of its call.
    """
    function, bound, named = unwrap(func, args, kwargs)
    if not isinstance(function, types.FunctionType):
        return None
    search = _Search()
    for inner in wrapped(function):
        search.visit(inner, given_to(inner, bound, named, args, kwargs))
    search.run()
    return search.name


__all__ = ["iterates"]
