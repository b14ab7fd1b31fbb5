"""What CPython itself loses where there is no memory: asked of the interpreter at hand."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Sequence

from .fault import Fault, Outcome, suffer
from .fork import apart


class _Lost:
    pass


def _cell(other: object) -> object:
    return [other for _ in (0,)]  # a cell of an argument


def _tuple(lost: _Lost) -> object:
    return tuple(lost for _ in range(9))


def _list(lost: _Lost) -> object:
    some = [lost]
    return list(some)


LOSES: list[tuple[str, Callable[[_Lost], object]]] = [
    # ceval.c, MAKE_CELL, seen with gdb: a function that has no memory for a cell of its own does
    # not give its arguments back. Debian's 3.11.2 has PyCell_New() inlined there.
    (r"^_PyObject_GC_New < PyCell_New < _PyEval_EvalFrameDefault$", _cell),
    (r"^_PyObject_GC_New < _PyEval_EvalFrameDefault$", _cell),
    # tupleobject.c, _PyTuple_Resize: a tuple that cannot be made smaller is freed, its items
    # are not given back.
    (r"^_PyObject_GC_Resize < _PyTuple_Resize <", _tuple),
    # list(), called by its name: what it cannot make a list of keeps a reference.
    (r"^\? < _PyEval_EvalFrameDefault$", _list),
]
"""(where memory is refused, what then loses its argument: proof that this Python does)."""


def _left_alive(call: Callable[[_Lost], object], nth: int) -> int:
    for _ in range(60):  # until CPython has specialised it
        call(_Lost())
    suffer(lambda: call(_Lost()), Fault(nth), Outcome())
    gc.collect()
    return sum(type(thing) is _Lost for thing in gc.get_objects())


@functools.cache
def is_proven(call: Callable[[_Lost], object]) -> bool:
    return any(apart(lambda nth=nth: _left_alive(call, nth)).value for nth in range(9))


def loses(places: Sequence[str]) -> bool:
    """May objects be alive that nothing refers to, for a fault of CPython's? Of any type: these
    are whatever somebody's function was given."""
    return any(
        is_proven(call) for place, call in LOSES if any(re.search(place, at) for at in places)
    )
