"""Attributes, items and variables that a run of a proof stores to: noted before it, put back after.

What the code of the step shows has been marked (plain_state.py); this looks at every object of the
program that the step's names and arguments lead to, however it stores there: by `vars(x)`, a bound
method, a default argument, a class. A proof can afford that; a healthy step could not.
"""

from __future__ import annotations

import logging
import types
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any, Protocol

import torch

from ..._code.plain_state import _LIBRARIES
from ..._code.side_effects import (
    _FOREIGN,
    _MODULE_OWN,
    _attributes,
    _is_foreign,
    _is_foreign_function,
    _names_of,
    _undecorated,
    _unwrap,
)
from ..._code.spots import (
    ITEMS,
    OWN_RULES,
    inside,
    is_a,
    is_array,
    is_stream,
    own_of,
    reachable,
)
from . import plain_places as places

__all__ = ["PlainValues", "Step"]

Step = tuple[Any, tuple[Any, ...], dict[str, Any]]

_log = logging.getLogger("oomkit")

_LONG = 1024  # items of a container that is not looked at
_SMALL = 1 << 20  # bytes of an array that is
_ALL_ARRAYS = 1 << 25  # bytes of all of them
_ALL_ITEMS = 1 << 19  # of all containers
_NAMES = (types.SimpleNamespace, Namespace, ChainMap)
_CONTAINERS = (dict, list, set, deque)
_PASSED = (types.MethodType, partial, tuple)  # which hold nothing that changes
_OF_BUILT_IN = (types.BuiltinMethodType, types.MethodWrapperType)  # methods of plain types
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
# Locks, events, queues and threads: what has one may change while the step runs.
_THREADS = frozenset({"_thread", "threading", "queue", "_queue", "multiprocessing", "concurrent"})


class _Place(Protocol):
    def put_back(self) -> None: ...


_Note = Callable[[], _Place]


class PlainValues:
    """Of all that a step leads to.

    Args:
        step: the decorated callable, and ``args`` and ``kwargs`` of its call.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._notes: list[_Note] | None = None
        self._noted: list[_Place] = []

    def note(self) -> None:
        """A run begins. What an earlier one has made is gone again, so that all look alike."""
        if self._notes is None:
            self._notes = _carefully(self._find) or []
        noted = (_carefully(note) for note in self._notes)
        self._noted = [place for place in noted if place is not None]

    def put_back(self) -> None:
        """After the run. May be called again where it has failed."""
        while self._noted:
            _carefully(self._noted[-1].put_back)
            self._noted.pop()

    def _find(self) -> list[_Note]:
        function, args, kwargs = _unwrap(*self._step)
        if not isinstance(function, types.FunctionType):
            return []
        notes: list[_Note] = []
        room = [_ALL_ITEMS, _ALL_ARRAYS]
        for value in reachable(function, [*args, *kwargs.values()], _leads_on):
            if not is_a(value, torch.Tensor):
                notes += _carefully(partial(_notes, value, room)) or ()
        return notes


def _carefully(look: Callable[[], Any]) -> Any:
    """An object that cannot be looked at (a class with rules of its own, another thread that fills
    it meanwhile) is left as it is: it is no fault of the step's."""
    try:
        return look()
    except MemoryError:
        raise
    except Exception:
        _log.debug("an object could not be looked at for a proof", exc_info=True)
        return None


def _has_threads(values: Iterator[tuple[str, Any]]) -> bool:
    return any(str(type(v).__module__).partition(".")[0] in _THREADS for _, v in values)


def _is_of_program(kind: type) -> bool:
    """Whether instances are the program's own; what libraries keep is theirs."""
    top = str(kind.__module__).partition(".")[0]
    made_in_python = bool(kind.__flags__ & (1 << 9))
    return kind in _NAMES or (made_in_python and not _is_foreign(kind) and top not in _LIBRARIES)


def _is_looked_at(value: Any) -> bool:
    """Whether it is an object of the program, and none that threads share."""
    if not _is_of_program(type(value)) or is_a(value, (UserDict, UserList)):
        return False
    return not _has_threads(iter(_attributes(value)))


def _is_own_module(module: types.ModuleType) -> bool:
    """Whether it is the program's own, and none that threads share."""
    space = vars(module)
    top, parts = str(space.get("__name__")).partition(".")[0], PurePath(str(space.get("__file__")))
    library = top in _FOREIGN or top in _LIBRARIES or "__file__" not in space
    installed = {"site-packages", "dist-packages", "lib-dynload"}.intersection(parts.parts)
    standard = _is_foreign(type("", (), {"__module__": top}))
    return not (library or installed or standard or _has_threads(iter([*space.items()])))


def _leads_on(value: Any) -> list[Any]:
    return _carefully(partial(_leads_to, value)) or []


def _leads_to(value: Any) -> list[Any]:
    """What lies in it, as far as objects of the program may come after it."""
    kind = type(value)
    if is_a(value, (*OWN_RULES, UserDict, UserList)):
        return []
    if is_a(value, torch.nn.Module):
        own = own_of(value)
        parts = [v for name in ("_modules", *_HOOKS) for v in [*own.get(name, {}).values()]]
        inner = [v for _, v in _attributes(value, _MODULE_OWN)]
        return [*parts, *inner, *_of_classes(kind)]
    if is_a(value, types.FunctionType):
        return [] if _is_foreign_function(value) else _of_function(value)
    if is_a(value, type):
        return [*_of_classes(value)]
    if is_a(value, _OF_BUILT_IN):
        return [value.__self__]
    if is_a(value, weakref.ref):
        return [weakref.ref.__call__(value)]
    for base in (set, frozenset):
        if is_a(value, base):
            return [*islice(base.__iter__(value), ITEMS), *_of_classes(kind)]
    if is_array(value):
        return [inner for _, inner in _attributes(value)]  # the mask of a masked array
    if kind.__module__ == "oomkit._C":
        return [inner] if (inner := _undecorated(value)) is not value else []
    if is_a(value, (*_CONTAINERS, *_PASSED)) or _is_looked_at(value):
        return [*inside(value), *_of_classes(kind)]
    return []


def _of_function(function: types.FunctionType) -> list[Any]:
    """Also what it names in other modules of the program: `utils.count()`."""
    found = inside(function)
    names = _names_of(function.__code__)
    for module in [v for v in found if is_a(v, types.ModuleType) and _is_own_module(v)]:
        found += [vars(module)[name] for name in names if name in vars(module)]
    return [*found, *vars(function).values()]


def _of_classes(kind: type) -> Iterator[Any]:
    """An object's classes, and what these have: containers, methods, the one instance."""
    for each in filter(_is_of_program, kind.__mro__):
        yield each
        for name, value in [*vars(each).items()]:
            if is_a(value, (staticmethod, classmethod)):
                yield value.__func__
            elif not is_a(value, type) and name != "__dict__":
                yield value


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
        return [partial(places.of_class, value)] if _is_of_program(value) else []
    if is_a(value, types.ModuleType):
        return [partial(places.of_module, value)] if _is_own_module(value) else []
    if is_a(value, types.FunctionType):
        if _is_foreign_function(value):
            return []
        return [partial(places.of_function, value), partial(places.Object, value)]
    found = [*_of_container(value, room)]
    return [*found, partial(places.Object, value)] if _is_looked_at(value) else found


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
