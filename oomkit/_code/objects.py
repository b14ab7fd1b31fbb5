"""Objects and functions of a program, looked at without running anything of theirs.

No property is evaluated, no descriptor run, no `__eq__` or `__hash__` asked.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .. import _C

_Slots = list[tuple[str, types.MemberDescriptorType]]

PLAIN = (int, float, complex, bool, str, bytes, type(None))
_DECORATORS = 8  # around a function
_TYPES = 1000  # known to have no slots
# Attributes of a module that torch itself keeps, and parts that have rules of their own.
MODULE_OWN = frozenset(vars(torch.nn.Module())) | {
    # of DistributedDataParallel
    "require_forward_param_sync",
    "_has_rebuilt_buckets",
    "_lazy_init_ran",
    "_static_graph_delay_allreduce_enqueued",
}
# A class has a hundred names or more, and modules are many and alike. (The slots themselves
# would keep their class alive.)
_SLOTLESS: dict[int, weakref.ref[type]] = {}
FOREIGN = frozenset({"torch", "oomkit", "accelerate", "numpy", "logging", "threading"})
# Large, and without state of the step's.
LIBRARIES = frozenset({"transformers", "lightning", "pytorch_lightning", "peft", "diffusers"})


def is_foreign(kind: type) -> bool:
    top = str(getattr(kind, "__module__", "")).partition(".")[0]
    return top in FOREIGN or top in sys.stdlib_module_names


def slots_of(kind: type) -> _Slots:
    """Names and descriptors of ``__slots__``."""
    known = _SLOTLESS.get(id(kind))  # by address: a metaclass may have a hash of its own
    if known is not None and known() is kind:
        return []
    found = [
        (name, slot)
        for base in kind.__mro__
        for name, slot in list(vars(base).items())
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    ]
    if not found:
        if len(_SLOTLESS) >= _TYPES:
            _SLOTLESS.clear()
        _SLOTLESS[id(kind)] = weakref.ref(kind)
    return found


def own_attributes(value: object, but: frozenset[str] = frozenset()) -> list[tuple[str, Any]]:
    """Names and values of ``__dict__`` and ``__slots__``: no property is evaluated.

    Args:
        but: names that are passed over.
    """
    found = _C._attributes(value, but)
    for name, slot in slots_of(type(value)):
        try:
            if name not in but:
                found.append((name, slot.__get__(value)))
        except AttributeError:
            continue  # empty
    return found


def names_of(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += names_of(inner)
    return list(dict.fromkeys(names))


def call_of(value: object) -> types.FunctionType | None:
    """``__call__`` of an object's class, where it is written in Python."""
    for kind in type(value).__mro__:
        call = vars(kind).get("__call__")
        if call is not None:
            return call if isinstance(call, types.FunctionType) else None
    return None


def unwrap(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The plain function behind methods, partials and objects with ``__call__``."""
    for _ in range(16):
        if isinstance(func, types.FunctionType):
            return func, args, kwargs
        if isinstance(func, types.MethodType):
            func, args = func.__func__, (func.__self__, *args)
        elif isinstance(func, (staticmethod, classmethod)):
            func = func.__func__
        elif isinstance(func, functools.partial):
            func, args, kwargs = func.func, (*func.args, *args), {**func.keywords, **kwargs}
        elif isinstance(func, torch.nn.Module):
            func, args = type(func).forward, (func, *args)
        else:
            call = call_of(func)
            if call is None:
                break
            func, args = call, (func, *args)
    return None, args, kwargs


def undecorated(value: Any) -> Any:
    """The function in a decorated step: called inside another one it is like any other."""
    while type(value).__module__ == "oomkit._C" and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def wrapped(function: Any) -> Iterator[types.FunctionType]:
    """It, and what it wraps."""
    for _ in range(_DECORATORS):
        if not isinstance(function, types.FunctionType):
            return
        yield function
        function = undecorated(vars(function).get("__wrapped__"))


def method_of(value: object, name: str, after: type | None = None) -> types.FunctionType | None:
    """A method by its name, where it is a Python function; no descriptor is run.

    Args:
        after: the class whose ``super()`` is meant.
    """
    kinds = type(value).__mro__
    if after is not None:
        kinds = kinds[kinds.index(after) + 1 :] if after in kinds else ()
    found = next((vars(k)[name] for k in kinds if name in vars(k)), None)
    found = undecorated(found)
    return found if isinstance(found, types.FunctionType) else None


def in_class(kind: type, name: str) -> Any:
    """What a class has by a name, as it lies there, or None."""
    return next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), None)


def is_foreign_function(function: types.FunctionType) -> bool:
    top = str(function.__module__).partition(".")[0]
    return top in FOREIGN or top in sys.stdlib_module_names
