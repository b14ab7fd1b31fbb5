"""Does a step take something out of an iterator that is there before its call?

Nothing can put that back. The C engine (csrc/proof/repeats.c) asks before the whole batch runs once
more, which no comparison with its parts verifies.
"""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from typing import Any

from .objects import unwrap, wrapped
from .plain_state import Places, given_to
from .spots import Frame
from .uses import Uses


class _Search(Places):
    """Stops at nothing: what the code comes to by a name may be taken from."""

    name: str | None = None  # of the first one

    def read(self, frame: Frame, found: Uses) -> None:
        super().read(frame, found)
        spots = (spot for steps in found.loads for spot in frame.resolve(steps))
        if self.name is None:
            self.name = next((spot.name() for spot in spots if _is_iterator(spot.value)), None)


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
