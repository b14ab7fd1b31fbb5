"""What CPython itself loses where there is no memory: asked of the interpreter at hand."""

from __future__ import annotations

import functools
import gc

from .fault import Fault, Outcome, suffer
from .fork import apart

LOST = frozenset(
    [
        "_Symbol",
        "_Scan",
        "_Length",
        "_Other",
        "TensorMark",
        "_Function",
        "Watch",
        "Buffers",
        "_Edge",
    ]
)
"""What _bytecode.py, _side_effects.py and _buffers.py are made of: it may stay alive where
`loses_arguments()`. Python only: effects_of() and watch() alone, without a call of ours in C,
leave the same."""


class _Lost:
    def __init__(self, other: object) -> None:
        self.others = [other for _ in (self,)]  # a cell of an argument


def _left_alive(nth: int) -> int:
    suffer(lambda: _Lost(0), Fault(nth), Outcome())
    gc.collect()
    return sum(type(thing) is _Lost for thing in gc.get_objects())


@functools.cache
def loses_arguments() -> bool:
    """ceval.c, MAKE_CELL, seen with gdb: a function that has no memory for a cell of its own
    (a comprehension or an inner function uses its argument) does not give its arguments back,
    `self` among them. Asked of this interpreter."""
    return any(apart(lambda nth=nth: _left_alive(nth)).value for nth in range(1, 9))
