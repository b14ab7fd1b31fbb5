"""Attributes, items and variables that a run of a proof stores to: noted before it, put back after.

What the code of the step shows has been marked (plain_state.py); this looks at every object of the
program that the step's names and arguments lead to, however it stores there: by `vars(x)`, a bound
method, a default argument, a class. A proof can afford that; a healthy step could not.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from ..._code.objects import is_foreign_function, unwrap
from ..._code.reach import carefully, is_looked_at, is_of_program, is_own_module, leads_on
from ..._code.spots import is_a, is_array, is_stream, reachable
from . import plain_places as places

__all__ = ["PlainValues", "Step"]

Step = tuple[Any, tuple[Any, ...], dict[str, Any]]

_LONG = 1 << 16  # items of a container that is not looked at
_SMALL = 1 << 20  # bytes of an array that is
_ALL_ARRAYS = 1 << 25  # bytes of all of them
_ALL_ITEMS = 1 << 19  # of all containers
_CONTAINERS = (dict, list, set, deque)


class _Place(Protocol):
    def put_back(self) -> None: ...


_Note = Callable[[], _Place]


class PlainValues:
    """Of all that a step leads to.

    Args:
        step: the decorated callable, and ``args`` and ``kwargs`` of its call.
        modules: those that take part, whatever leads to them.
    """

    def __init__(self, step: Step, modules: Iterable[torch.nn.Module] = ()) -> None:
        self._step = step
        self._modules = modules
        self._notes: list[_Note] | None = None
        self._noted: list[_Place] = []

    def note(self) -> None:
        """A run begins. What an earlier one has made is gone again, so that all look alike; if it
        was not put back, what was noted then is."""
        if self._noted:
            return
        if self._notes is None:
            self._notes = carefully(self._find) or []
        noted = (carefully(note) for note in self._notes)
        self._noted = [place for place in noted if place is not None]

    def put_back(self) -> None:
        """After the run. May be called again where it has failed."""
        while self._noted:
            carefully(self._noted[-1].put_back)
            self._noted.pop()

    def _find(self) -> list[_Note]:
        function, args, kwargs = unwrap(*self._step)
        if not isinstance(function, types.FunctionType):
            return []
        notes: list[_Note] = []
        room = [_ALL_ITEMS, _ALL_ARRAYS]
        for value in reachable(function, [*args, *kwargs.values(), *self._modules], leads_on):
            if not is_a(value, torch.Tensor):
                notes += carefully(partial(_notes, value, room)) or ()
        return notes


def _notes(value: Any, room: list[int]) -> list[_Note]:
    """What notes how it is now.

    Args:
        room: items, and bytes of arrays, that may still be noted; a large program would take
            longer for these than for its step.
    """
    if is_array(value):
        return [*_of_array(value, room)]
    if is_stream(value) and not is_a(value, torch.Generator):  # whose uses are seen
        return [partial(places.Stream, value)]
    if is_a(value, type):
        return [partial(places.of_class, value)] if is_of_program(value) else []
    if is_a(value, types.ModuleType):
        return [partial(places.of_module, value)] if is_own_module(value) else []
    if is_a(value, types.FunctionType):
        if is_foreign_function(value):
            return []
        return [partial(places.of_function, value), partial(places.Object, value)]
    found = [*_of_container(value, room)]
    return [*found, partial(places.Object, value)] if is_looked_at(value) else found


def _of_container(value: Any, room: list[int]) -> Iterator[_Note]:
    base: Any = next((b for b in _CONTAINERS if is_a(value, b)), None)
    if base is None or base.__len__(value) > min(_LONG, room[0]):
        return
    room[0] -= base.__len__(value)
    if base is dict:
        yield partial(places.Items, value)
    elif base is set:
        yield partial(places.Set, value)
    elif base is list or value.maxlen is not None:  # else another thread's, maybe
        yield partial(places.Sequence, base, value)


def _of_array(value: Any, room: list[int]) -> Iterator[_Note]:
    base = places.base_of_array(value)
    plain = base.view(value, base)
    if 0 in plain.strides or plain.dtype.hasobject or not plain.flags.writeable:
        return  # of a broadcast array several items are one
    if plain.nbytes <= min(_SMALL, room[1]):
        room[1] -= plain.nbytes
        yield partial(places.Array, value)
        if type(value) is not base:
            yield partial(places.Object, value)
