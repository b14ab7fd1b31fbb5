"""What the names and arguments of a step lead to, as far as objects of the program may come after
it: through methods, classes, weak references and modules of the program, however deep.

Nothing of the user's is run: an object may have an `==`, a length or an order of its own.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any

import torch

from .objects import (
    FOREIGN,
    LIBRARIES,
    MODULE_OWN,
    is_foreign,
    is_foreign_function,
    names_of,
    own_attributes,
    undecorated,
)
from .spots import CONTAINERS, ITEMS, OWN_RULES, inside, is_a, is_array, own_of

__all__ = [
    "carefully",
    "has_threads",
    "is_looked_at",
    "is_of_program",
    "is_of_threads",
    "is_own_module",
    "leads_on",
]

_log = logging.getLogger("oomkit")

_NAMES = (types.SimpleNamespace, Namespace, ChainMap)
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


def carefully(look: Callable[[], Any]) -> Any:
    """An object that cannot be looked at (a class with rules of its own, another thread that fills
    it meanwhile) is left as it is: it is no fault of the step's."""
    try:
        return look()
    except MemoryError:
        raise
    except Exception:
        _log.debug("an object could not be looked at", exc_info=True)
        return None


def _has_threads(values: Iterator[tuple[str, Any]]) -> bool:
    return any(str(type(v).__module__).partition(".")[0] in _THREADS for _, v in values)


def has_threads(value: object) -> bool:
    """Does an object have a lock, a queue or a thread?"""
    return _has_threads(iter(own_attributes(value)))


def is_of_threads(value: Any) -> bool:
    """A thread, a pool of them, or the class of one."""
    kinds = (value if is_a(value, type) else type(value)).__mro__
    return any(str(k.__module__).partition(".")[0] in _THREADS for k in kinds)


def is_of_program(kind: type) -> bool:
    """Whether instances are the program's own; what libraries keep is theirs."""
    top = str(kind.__module__).partition(".")[0]
    made_in_python = bool(kind.__flags__ & (1 << 9))
    return kind in _NAMES or (made_in_python and not is_foreign(kind) and top not in LIBRARIES)


def is_looked_at(value: Any) -> bool:
    """Whether it is an object of the program, and none that threads share."""
    if not is_of_program(type(value)) or is_a(value, (UserDict, UserList)):
        return False
    return not _has_threads(iter(own_attributes(value)))


def is_own_module(module: types.ModuleType) -> bool:
    """Whether it is the program's own, and none that threads share."""
    space = vars(module)
    top, parts = str(space.get("__name__")).partition(".")[0], PurePath(str(space.get("__file__")))
    library = top in FOREIGN or top in LIBRARIES or "__file__" not in space
    installed = {"site-packages", "dist-packages", "lib-dynload"}.intersection(parts.parts)
    standard = top in sys.stdlib_module_names
    return not (library or installed or standard or _has_threads(iter([*space.items()])))


def leads_on(value: Any) -> list[Any]:
    return carefully(partial(_leads_to, value)) or []


def _leads_to(value: Any) -> list[Any]:
    """What lies in it, as far as objects of the program may come after it."""
    kind = type(value)
    if is_a(value, (*OWN_RULES, UserDict, UserList)):
        return []
    if is_a(value, torch.nn.Module):
        own = own_of(value)
        parts = [v for name in ("_modules", *_HOOKS) for v in [*own.get(name, {}).values()]]
        inner = [v for _, v in own_attributes(value, MODULE_OWN)]
        return [*parts, *inner, *_of_classes(kind)]
    if is_a(value, types.FunctionType):
        return [] if is_foreign_function(value) else _of_function(value)
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
        return [inner for _, inner in own_attributes(value)]  # the mask of a masked array
    if kind.__module__ == "oomkit._C":
        return [inner] if (inner := undecorated(value)) is not value else []
    if is_a(value, (*CONTAINERS, *_PASSED)) or is_looked_at(value):
        return [*inside(value), *_of_classes(kind)]
    return []


def _of_function(function: types.FunctionType) -> list[Any]:
    """Also what it names in other modules of the program: `utils.count()`."""
    found = inside(function)
    names = names_of(function.__code__)
    for module in [v for v in found if is_a(v, types.ModuleType) and is_own_module(v)]:
        found += [vars(module)[name] for name in names if name in vars(module)]
    return [*found, *vars(function).values()]


def _of_classes(kind: type) -> Iterator[Any]:
    """An object's classes, and what these have: containers, methods, the one instance."""
    for each in filter(is_of_program, kind.__mro__):
        yield each
        for name, value in [*vars(each).items()]:
            if is_a(value, (staticmethod, classmethod)):
                yield value.__func__
            elif not is_a(value, type) and name != "__dict__":
                yield value
