"""Places of a program that hold plain values: what is there is noted, and put back.

Nothing of the user's is run: an object may have an `==`, a length or an order of its own. Another
thread may change a place at any time, so each is copied at one stroke, and what is no longer there
is no error.
"""

from __future__ import annotations

import contextlib
import random
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack

from ..._code.objects import MODULE_OWN, names_of, own_attributes, slots_of
from ..._code.spots import is_a

__all__ = [
    "Array",
    "Items",
    "Names",
    "Object",
    "Sequence",
    "Set",
    "Stream",
    "base_of_array",
    "of_class",
    "of_function",
    "of_module",
]

_SMALL = 1 << 16  # bytes of a tensor whose value is kept when its graph goes
_ABSENT = object()
_GONE = object()

Put = Callable[[Any, Any], None]


class _Graph(weakref.ref[torch.Tensor]):
    """A tensor that has a graph, which is not to live longer for this; its value may."""

    __slots__ = ("value",)
    value: Any


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        with torch._C.DisableTorchFunction():
            return tensor.grad_fn is not None
    except RuntimeError:
        return True  # a view whose base has been written to: it has one, which is not to be seen


def _held(value: Any) -> Any:
    if not is_a(value, torch.Tensor) or not _has_graph(value):
        return value
    graph = _Graph(value)
    graph.value = _GONE
    if type(value) is torch.Tensor and value.nbytes <= _SMALL and not _len_torch_dispatch_stack():
        with torch._C.DisableTorchFunction(), contextlib.suppress(RuntimeError):
            graph.value = value.detach()
    return graph


def _given(held: Any) -> Any:
    if type(held) is not _Graph:
        return held
    value = held()
    return held.value if value is None else value


class _Values:
    """Values in their order. Most hold no graph, and need no look at each."""

    __slots__ = ("_held", "has_graphs")

    def __init__(self, values: list[Any]) -> None:
        kinds = {id(kind): kind for kind in map(type, values)}
        self.has_graphs = any(issubclass(kind, torch.Tensor) for kind in kinds.values())
        self._held = [*map(_held, values)] if self.has_graphs else values

    def given(self) -> list[Any]:
        """`_GONE` for a large tensor that is gone with its graph."""
        return [*map(_given, self._held)] if self.has_graphs else self._held


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _is_ours(value: Any) -> bool:
    """Whether oomkit has put it there, for as long as it needs it."""
    of = value if is_a(value, types.FunctionType) else type(value)
    return str(of.__module__).partition(".")[0] == "oomkit"


def _differences(was: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Names, and what is to be there again."""
    for name in [*was, *(name for name in now if name not in was)]:
        old, new = was.get(name, _ABSENT), now.get(name, _ABSENT)
        if old is not new and old is not _GONE and not _is_ours(old) and not _is_ours(new):
            yield name, old


class Names:
    """Names and what each leads to: attributes of a class, variables.

    Args:
        read: all of them.
        put: one of them; None where it was not there.
    """

    __slots__ = ("_names", "_put", "_read", "_values")

    def __init__(self, read: Callable[[], dict[Any, Any]], put: Put) -> None:
        self._read, self._put = read, put
        now = read()
        self._names, self._values = [*now], _Values([*now.values()])

    def put_back(self) -> None:
        now, values = self._read(), self._values.given()
        if _same(self._names, [*now]) and _same(values, [*now.values()]):
            return
        for name, old in _differences(dict(zip(self._names, values, strict=True)), now):
            with contextlib.suppress(KeyError, AttributeError):
                self._put(name, old)


class Object(Names):
    """Attributes, and the class."""

    __slots__ = ("_kind", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner, self._kind = owner, type(owner)
        # No methods of its own, with which it would be part of a cycle.
        super().__init__(partial(_own, owner), partial(_put_attribute, owner))

    def put_back(self) -> None:
        if type(self._owner) is not self._kind:
            object.__setattr__(self._owner, "__class__", self._kind)
        super().put_back()


def _own(owner: Any) -> dict[str, Any]:
    but = MODULE_OWN if is_a(owner, torch.nn.Module) else frozenset()
    return dict(reversed(own_attributes(owner, but)))


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    slot = dict(reversed(slots_of(type(owner)))).get(name)
    if slot is None:
        _set_item(object.__getattribute__(owner, "__dict__"), name, value)
    elif value is _ABSENT:
        slot.__delete__(owner)
    else:
        slot.__set__(owner, value)


class Items:
    """Those of a dictionary, in their order, by the methods of the plain type."""

    __slots__ = ("_base", "_keys", "_owner", "_values")

    def __init__(self, owner: dict[Any, Any]) -> None:
        self._owner = owner
        self._base: Any = OrderedDict if is_a(owner, OrderedDict) else dict
        pairs = self._pairs()
        self._keys, self._values = [k for k, _ in pairs], _Values([v for _, v in pairs])

    def _pairs(self) -> list[tuple[Any, Any]]:
        return [*self._base.items(self._owner)]

    def put_back(self) -> None:
        now, values = self._pairs(), self._values.given()
        keys, others = [k for k, _ in now], [v for _, v in now]
        if _same(keys, self._keys):  # the common case asks no key for its hash
            if _same(values, others):
                return
            for key, old, new in zip(keys, values, others, strict=True):
                if old is not new and old is not _GONE and not _is_ours(new):
                    self._base.__setitem__(self._owner, key, old)
            return
        was = dict(zip(self._keys, values, strict=True))
        for key, old in _differences(was, dict(now)):
            if old is not _ABSENT:
                self._base.__setitem__(self._owner, key, old)
                continue
            with contextlib.suppress(KeyError):  # another thread's was faster
                self._base.__delitem__(self._owner, key)
        if not _same([k for k, _ in self._pairs()], self._keys):
            self._put_in_order()

    def _put_in_order(self) -> None:
        """What is new, and not to go, comes first."""
        for key in self._keys:
            with contextlib.suppress(KeyError):
                if self._base is OrderedDict:
                    OrderedDict.move_to_end(self._owner, key)  # type: ignore[arg-type]
                else:
                    dict.__setitem__(self._owner, key, dict.pop(self._owner, key))


class Sequence:
    """The items of a list or a deque, by the methods of the plain types."""

    __slots__ = ("_base", "_owner", "_values")

    def __init__(self, base: Any, owner: Any) -> None:
        self._base, self._owner = base, owner
        self._values = _Values([*base.__iter__(owner)])

    def put_back(self) -> None:
        old = self._values.given()
        if _same(old, [*self._base.__iter__(self._owner)]):
            return
        old = [value for value in old if value is not _GONE]
        if self._base is list:
            list.__setitem__(self._owner, slice(None), old)
        else:
            self._base.clear(self._owner)
            self._base.extend(self._owner, old)


class Set:
    """The items of a set. One that goes and comes again may change the order of the others, so
    none does. Tensors with a graph are left as they are."""

    __slots__ = ("_order", "_owner", "_was")

    def __init__(self, owner: set[Any]) -> None:
        self._owner, self._order = owner, _Values([*set.__iter__(owner)])
        self._was = None if self._order.has_graphs else set.copy(owner)

    def put_back(self) -> None:
        now = [*set.__iter__(self._owner)]
        if self._was is None or _same(self._order.given(), now):
            return
        set.difference_update(self._owner, set.difference(self._owner, self._was))
        set.update(self._owner, self._was)


def base_of_array(array: Any) -> Any:
    """numpy.ndarray: a subclass may have methods of its own."""
    kinds = type(array).__mro__
    return next(k for k in kinds if k.__module__ == "numpy" and k.__name__ == "ndarray")


class Array:
    """What is in an array of numpy."""

    __slots__ = ("_plain", "_was")

    def __init__(self, array: Any) -> None:
        base = base_of_array(array)
        self._plain = base.view(array, base)
        self._was = self._plain.tobytes()

    def put_back(self) -> None:
        plain = self._plain
        if plain.tobytes() != self._was:
            plain[...] = type(plain)(plain.shape, plain.dtype, self._was)


class Stream:
    """Where a random generator of Python or numpy is, by the methods of the plain types."""

    __slots__ = ("_set", "_was")

    def __init__(self, stream: Any) -> None:
        if is_a(stream, random.Random):
            self._was, self._set = random.Random.getstate(stream), partial(_set_random, stream)
            return
        of = stream.bit_generator if hasattr(stream, "bit_generator") else stream._bit_generator
        self._was, self._set = of.state, partial(setattr, of, "state")

    def put_back(self) -> None:
        self._set(self._was)


def _set_random(stream: random.Random, state: Any) -> None:
    random.Random.setstate(stream, state)


def _set_item(owner: dict[Any, Any], name: Any, value: Any) -> None:
    if value is _ABSENT:
        dict.__delitem__(owner, name)
    else:
        dict.__setitem__(owner, name, value)


def of_class(kind: type) -> Names:
    def read() -> dict[str, Any]:
        return {name: v for name, v in [*vars(kind).items()] if not name.startswith("__")}

    def put(name: str, value: Any) -> None:
        if value is _ABSENT:
            type.__delattr__(kind, name)
        else:
            type.__setattr__(kind, name, value)

    return Names(read, put)


def of_function(function: types.FunctionType) -> Names:
    """Variables of enclosing functions, by their place, and global ones."""
    cells, space = function.__closure__ or (), function.__globals__
    names = names_of(function.__code__)

    def read() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for i, cell in enumerate(cells):
            with contextlib.suppress(ValueError):  # empty
                found[i] = cell.cell_contents
        return found | {name: space[name] for name in names if name in space}

    def put(name: Any, value: Any) -> None:
        if isinstance(name, str):
            _set_item(space, name, value)
        elif value is _ABSENT:
            del cells[name].cell_contents
        else:
            cells[name].cell_contents = value

    return Names(read, put)


def of_module(module: types.ModuleType) -> Names:
    space = vars(module)

    def read() -> dict[str, Any]:
        return {name: v for name, v in [*space.items()] if not name.startswith("__")}

    def put(name: str, value: Any) -> None:
        _set_item(space, name, value)

    return Names(read, put)
