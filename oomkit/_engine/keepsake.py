"""What an optimizer keeps beside the tensors in its ``state``, for ``optimizer_safety="copy"``.

A class of somebody's own may keep momentum in a list, a queue, an array of numpy or an object of
its own, and draw random numbers. Their contents are noted before an update and put back into the
very objects when it has failed. torch's own optimizers keep nothing there.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

_MOST = 100_000  # objects that are looked at
_CONSTANT = (
    *(bool, int, float, complex, str, bytes, range, slice, type, type(None), type(...)),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(types.CodeType, types.MappingProxyType, weakref.ref),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Objects of these do not change what an update computes.
_IDLE = frozenset({"_thread", "abc", "contextlib", "decimal", "enum", "fractions", "functools"})
_IDLE_TOP = frozenset({"logging", "oomkit", "pathlib", "threading", "warnings", "weakref"})

_Undo = Callable[[], object]


def _is_plain_class(kind: type) -> bool:
    """Do its objects keep everything in their dictionary?"""
    return all(
        base is object
        or (base.__flags__ & (1 << 9) and not getattr(base, "__slots__", ()))
        or base is types.SimpleNamespace
        for base in kind.__mro__
    )


def _put_dict(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    now = list(base.items(value))
    if len(now) == len(items) and all(
        a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)
    ):
        return
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)


def _put_tensor(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(copy)


def _put_array(array: Any, copy: Any) -> None:
    array[...] = copy


class Keepsake:
    """The contents of what hangs on an optimizer.

    Attributes:
        unknown: names what cannot be put back, or None.
    """

    __slots__ = ("seen", "undo", "unknown")

    def __init__(self, optimizer: Any, handled: set[int], streams: bool) -> None:
        self.undo: list[_Undo] = []
        self.seen: dict[int, object] = {}  # held: an address could be another object's by then
        self.unknown: str | None = None
        waiting: deque[tuple[str, Any]] = deque([("", optimizer)])
        while waiting:
            path, value = waiting.popleft()
            if isinstance(value, _CONSTANT) or id(value) in self.seen or id(value) in handled:
                continue
            if len(self.seen) >= _MOST:
                self.unknown = self.unknown or "more than can be copied"
                break
            self.seen[id(value)] = value
            waiting.extend(self.note(path, value))
        if streams:
            self.undo.append(functools.partial(random.setstate, random.getstate()))
            numpy = sys.modules.get("numpy.random")
            if numpy is not None:
                self.undo.append(functools.partial(numpy.set_state, numpy.get_state()))

    def note(self, path: str, value: Any) -> list[tuple[str, Any]]:
        """Remember the contents of one object; what is in it comes next."""
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
            self.undo.append(functools.partial(_put_tensor, value, copy))
            return []
        if isinstance(value, (tuple, frozenset)):
            return [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, dict):
            base = OrderedDict if isinstance(value, OrderedDict) else dict
            items = list(base.items(value))
            self.undo.append(functools.partial(_put_dict, value, items))
            inner = [(f"{path}[{_key(k)}]", item) for k, item in items]
            return inner + self.attributes(path, value)
        if isinstance(value, (list, bytearray)):
            self.undo.append(functools.partial(value.__setitem__, slice(None), value[:]))
            return [(f"{path}[{i}]", v) for i, v in enumerate(value)] + self.attributes(path, value)
        if isinstance(value, (deque, set)):
            self.undo.append(functools.partial(_refill, value, list(value)))
            return [(f"{path}[...]", v) for v in value] + self.attributes(path, value)
        return self.other(path, value)

    def attributes(self, path: str, value: Any) -> list[tuple[str, Any]]:
        own = getattr(value, "__dict__", None)
        if not isinstance(own, dict):
            return []
        items = [(k, v) for k, v in own.items() if not _is_ours(v)]
        if path:  # the optimizer's own go back with its methods: step_attributes.c
            self.undo.append(functools.partial(_put_dict, own, list(own.items())))
        return [(f"{path}.{name}" if path else name, item) for name, item in items]

    def other(self, path: str, value: Any) -> list[tuple[str, Any]]:
        kind = type(value)
        module = str(kind.__module__)
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Generator):
            self.undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self.undo.append(functools.partial(value.setstate, value.getstate()))
        elif numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
            self.undo.append(functools.partial(_put_array, value, value.copy()))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self.undo.append(functools.partial(setattr, bits, "state", bits.state))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            self.undo.append(functools.partial(value.set_state, value.get_state()))
        elif numpy is not None and isinstance(value, (numpy.generic, numpy.dtype)):
            return []
        elif _is_idle(value, module):
            return []
        elif isinstance(value, torch.nn.Module):
            return []  # its parameters and buffers take part by themselves
        elif not path or (_is_plain_class(kind) and not hasattr(kind, "__next__")):
            return self.attributes(path, value)
        else:
            self.unknown = self.unknown or f"{path} ({kind.__name__})"
        return []

    def restore(self) -> None:
        for undo in reversed(self.undo):
            undo()


def _is_ours(value: object) -> bool:
    return type(value).__module__ == "oomkit._C"


def _is_idle(value: object, module: str) -> bool:
    if module in _IDLE or module.partition(".")[0] in _IDLE_TOP:
        return True
    return isinstance(value, enum.Enum)


def _key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else "..."


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    for item in items:
        value.append(item) if isinstance(value, deque) else value.add(item)


def keepsake(optimizer: Any, handled: set[int], streams: bool) -> Keepsake | None:
    """Note what an optimizer keeps beside its state, or None where it is one of torch's.

    Args:
        handled: addresses of tensors that the engine has copies of.
        streams: whether random numbers of ``random`` and numpy are rolled back.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return None
    return Keepsake(optimizer, handled, streams)
