"""Attributes, items and variables that a run of a proof stores to: noted before it, put back after.

What the code of the step shows has been marked (plain_state.py); this looks at every object of the
program that the step's names and arguments lead to, however it stores there: by `vars(x)`, a bound
method, a default argument, a class. A proof can afford that; a healthy step could not.
"""

from __future__ import annotations

import types
import weakref
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .._code.plain_state import _LIBRARIES
from .._code.side_effects import (
    _MODULE_OWN,
    _attributes,
    _is_foreign,
    _is_foreign_function,
    _names_of,
    _slots_of,
    _undecorated,
    _unwrap,
)
from .._code.spots import OWN_RULES, inside, is_array, own_of, reachable

__all__ = ["PlainValues", "Step"]

Step = tuple[Any, tuple[Any, ...], dict[str, Any]]

_LONG = 1024  # items of a container that is not looked at
_SMALL = 1 << 20  # bytes of an array that is
_NAMES = (types.SimpleNamespace, Namespace)
_CONTAINERS = (dict, list, set, deque)
_PASSED = (types.MethodType, partial, tuple)  # which hold nothing that changes
# Locks, events, queues and threads: what has one may change while the step runs.
_THREADS = frozenset({"_thread", "threading", "queue", "_queue", "multiprocessing", "concurrent"})
_ABSENT = object()


class _Graph(weakref.ref[torch.Tensor]):
    """A tensor that has a graph, which is not to live longer for this."""


def _held(value: Any) -> Any:
    graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return _Graph(value) if graph else value


def _given(held: Any) -> Any:
    """The value; None for a tensor that is gone."""
    return held() if type(held) is _Graph else held


class _Place:
    """Names and what each leads to: attributes, items of a dictionary, variables."""

    __slots__ = ("put", "read", "was")

    def __init__(self, read: Callable[[], dict[Any, Any]], put: Callable[[Any, Any], None]) -> None:
        self.read, self.put = read, put
        self.was = {name: _held(value) for name, value in read().items()}

    def put_back(self) -> None:
        now = self.read()
        for name in [*self.was, *(name for name in now if name not in self.was)]:
            held, new = self.was.get(name, _ABSENT), now.get(name, _ABSENT)
            old = _given(held)
            gone = old is None and held is not None
            if old is not new and not gone and not _is_ours(old) and not _is_ours(new):
                self.put(name, old)


class PlainValues:
    """Of all that a step leads to.

    Args:
        step: the decorated callable, and ``args`` and ``kwargs`` of its call.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._reached: list[Any] | None = None
        self._noted: list[Callable[[], None]] = []  # each puts something back

    def note(self) -> None:
        """A run begins. What an earlier one has made is gone again, so that all look alike."""
        if self._reached is None:
            function, args, kwargs = _unwrap(*self._step)
            given = [*args, *kwargs.values()]
            is_plain = isinstance(function, types.FunctionType)
            found = reachable(function, given, _leads_to) if is_plain else ()
            self._reached = [value for value in found if not isinstance(value, torch.Tensor)]
        self._noted = [back for value in self._reached for back in _notes(value)]

    def put_back(self) -> None:
        """After the run. May be called again where it has failed."""
        while self._noted:
            self._noted[-1]()
            self._noted.pop()


def _is_ours(value: Any) -> bool:
    """Whether oomkit has put it there, for as long as it needs it."""
    of = value if isinstance(value, types.FunctionType) else type(value)
    return str(of.__module__).partition(".")[0] == "oomkit"


def _is_of_program(kind: type) -> bool:
    """Whether instances are the program's own; what libraries keep is theirs."""
    top = str(kind.__module__).partition(".")[0]
    made_in_python = bool(kind.__flags__ & (1 << 9))
    return kind in _NAMES or (made_in_python and not _is_foreign(kind) and top not in _LIBRARIES)


def _is_looked_at(value: Any) -> bool:
    """Whether it is an object of the program, and none that threads share."""
    if not _is_of_program(type(value)) or isinstance(value, (UserDict, UserList)):
        return False
    kinds = (str(type(v).__module__).partition(".")[0] for _, v in _attributes(value))
    return not any(kind in _THREADS for kind in kinds)


def _leads_to(value: Any) -> list[Any]:
    """What lies in it, as far as objects of the program may come after it."""
    kind = type(value)
    if isinstance(value, (*OWN_RULES, UserDict, UserList)):
        return []
    if isinstance(value, torch.nn.Module):
        parts = own_of(value).get("_modules", {})
        inner = [v for _, v in _attributes(value, _MODULE_OWN)]
        return [*parts.values(), *inner, *_of_classes(kind)]
    if isinstance(value, types.FunctionType):
        return [] if _is_foreign_function(value) else inside(value)
    if kind.__module__ == "oomkit._C":
        return [inner] if (inner := _undecorated(value)) is not value else []
    if isinstance(value, (*_CONTAINERS, *_PASSED)) or _is_looked_at(value):
        return [*inside(value), *_of_classes(kind)]
    return []


def _of_classes(kind: type) -> Iterator[Any]:
    """An object's classes, and containers that they have."""
    for each in filter(_is_of_program, kind.__mro__):
        yield each
        yield from (v for v in [*vars(each).values()] if isinstance(v, _CONTAINERS))


def _notes(value: Any) -> Iterator[Callable[[], None]]:
    """What puts it back as it is now."""
    if isinstance(value, _CONTAINERS) and len(value) <= _LONG:
        yield from _of_container(value)
    if is_array(value) and value.nbytes <= _SMALL and value.flags.writeable:
        if not value.dtype.hasobject:
            yield partial(_refill_array, value, value.copy())
        return
    if isinstance(value, type):
        yield _Place(partial(_of_class, value), partial(_put_in_class, value)).put_back
        return
    if isinstance(value, types.FunctionType):
        if _is_foreign_function(value):
            return
        yield _Place(partial(_variables, value), partial(_put_variable, value)).put_back
    elif not _is_looked_at(value):
        return
    yield _Place(partial(_own, value), partial(_put_attribute, value)).put_back


def _of_container(value: Any) -> Iterator[Callable[[], None]]:
    """By the methods of the plain types: a subclass may have its own."""
    if isinstance(value, dict):
        of = OrderedDict if isinstance(value, OrderedDict) else dict
        yield _Place(partial(dict.copy, value), partial(_put_item, of, value)).put_back
    elif not isinstance(value, deque) or value.maxlen is not None:  # another thread's, maybe
        base: Any = next(b for b in (list, set, deque) if isinstance(value, b))
        yield partial(_refill, base, value, [*map(_held, base.__iter__(value))])


def _refill(base: Any, value: Any, was: list[Any]) -> None:
    now = [*base.__iter__(value)]
    old = [_given(held) for held in was]
    if len(now) != len(old) or any(a is not b for a, b in zip(now, old, strict=True)):
        base.clear(value)
        fill = base.update if base is set else base.extend
        fill(value, [a for a, b in zip(old, was, strict=True) if a is not None or b is None])


def _refill_array(array: Any, was: Any) -> None:
    if array.tobytes() != was.tobytes():
        array[...] = was


def _put_item(base: Any, owner: Any, name: Any, value: Any) -> None:
    if value is _ABSENT:
        base.__delitem__(owner, name)
    else:
        base.__setitem__(owner, name, value)


def _own(owner: Any) -> dict[str, Any]:
    but = _MODULE_OWN if isinstance(owner, torch.nn.Module) else frozenset()
    return dict(_attributes(owner, but))


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    slot = dict(_slots_of(type(owner))).get(name)
    if slot is None:
        _put_item(dict, object.__getattribute__(owner, "__dict__"), name, value)
    elif value is _ABSENT:
        slot.__delete__(owner)
    else:
        slot.__set__(owner, value)


def _of_class(kind: type) -> dict[str, Any]:
    return {name: v for name, v in [*vars(kind).items()] if not name.startswith("__")}


def _put_in_class(kind: type, name: str, value: Any) -> None:
    if value is _ABSENT:
        type.__delattr__(kind, name)
    else:
        type.__setattr__(kind, name, value)


def _variables(function: types.FunctionType) -> dict[Any, Any]:
    """Of enclosing functions, by their place, and global ones."""
    found: dict[Any, Any] = {}
    for i, cell in enumerate(function.__closure__ or ()):
        try:
            found[i] = cell.cell_contents
        except ValueError:
            continue  # empty
    space = function.__globals__
    return found | {name: space[name] for name in _names_of(function.__code__) if name in space}


def _put_variable(function: types.FunctionType, name: Any, value: Any) -> None:
    if isinstance(name, str):
        _put_item(dict, function.__globals__, name, value)
    elif value is _ABSENT:
        del function.__closure__[name].cell_contents  # type: ignore[index]
    else:
        function.__closure__[name].cell_contents = value  # type: ignore[index]
