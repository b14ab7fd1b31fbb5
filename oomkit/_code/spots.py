"""Places in the state of a program: how each is reached, and what is there now.

Nothing is evaluated: no property, no method of the user's.
"""

from __future__ import annotations

import functools
import gc
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from .. import _C
from .bytecode import ANY, Steps
from .objects import (
    LIBRARIES,
    PLAIN,
    in_class,
    is_foreign_function,
    names_of,
    own_attributes,
    slots_of,
    undecorated,
    wrapped,
)
from .uses import GOT, RETURNED, Either, uses_of

# How a place is reached from the one before it (plain_state.h).
ARGUMENT, KEYWORD, OBJECT, CELL, ATTRIBUTE, ITEM, SWITCH = range(7)

OWN_RULES = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
CONTAINERS = (list, dict, set, deque)
ITEMS = 64  # of a container that are looked into
_OBJECTS = 5000  # looked at for random generators
_DEPTH = 8
_CALLS = 3  # of functions, inside one another, whose results are followed
_PARTS = 2000  # modules of a model
_VIEWS = frozenset(
    "detach flatten narrow numpy ravel reshape select squeeze unsqueeze view".split()
)
_PLAIN_ONES = frozenset(map(id, PLAIN))  # a metaclass may have an == of its own
_CACHED = type(functools.lru_cache(None)(len))
EMPTY = object()  # the value of a variable that has none


def per_group(owner: Any, name: str) -> bool:
    """A list of a scheduler, as of the first rates: a step that adds a group adds to it, too."""
    scheduler = isinstance(owner, torch.optim.lr_scheduler.LRScheduler)
    return scheduler and type(own_of(owner).get(name)) is list


class Spot:
    """A place, and what is there now."""

    __slots__ = ("key", "kind", "label", "parent", "value")

    def __init__(
        self, parent: Spot | None, kind: int, key: Any, value: Any, label: str = ""
    ) -> None:
        self.parent, self.kind, self.key, self.value = parent, kind, key, value
        self.label = label

    def name(self) -> str:
        if self.label or self.parent is None:
            return self.label
        before = self.parent.name()
        return f"{before}[{self.key!r}]" if self.kind == ITEM else f"{before}.{self.key}"


def variable(space: dict[str, Any], name: str) -> Spot:
    """A global variable, whether or not it has a value."""
    return Spot(Spot(None, OBJECT, space, space), ITEM, name, space.get(name), name)


def whole(value: Any, label: str = "") -> Spot:
    """An object that the function itself leads to; a weak reference to it where it has any."""
    try:
        key: Any = weakref.ref(value)
    except TypeError:
        key = value
    label = label or getattr(value, "__name__", type(value).__name__)
    return Spot(None, OBJECT, key, value, label)


def function_cells(function: types.FunctionType) -> Iterator[tuple[str, Spot]]:
    """The variables of enclosing functions."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
        try:
            yield name, Spot(None, CELL, cell, cell.cell_contents, name)
        except ValueError:
            yield name, Spot(None, CELL, cell, EMPTY, name)


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """By its type: what an object gives as its `__class__` may be a mock's word, that of what a
    proxy stands for, or an error."""
    return issubclass(type(value), kinds)


def is_array(value: object) -> bool:
    return any(k.__module__ == "numpy" and k.__name__ == "ndarray" for k in type(value).__mro__)


def is_stream(value: object) -> bool:
    """A random generator of Python, of numpy or of torch."""
    if is_a(value, (random.Random, torch.Generator)):
        return not is_a(value, random.SystemRandom)  # which has no state
    return any(
        str(k.__module__).startswith("numpy.random") and k.__name__ in ("Generator", "RandomState")
        for k in type(value).__mro__
    )


def own_of(value: object) -> dict[str, Any]:
    """What is in ``__dict__``, which stays unmade: it would slow every reading down."""
    return dict(_C._attributes(value, frozenset()))


def is_metric(value: object) -> bool:
    return isinstance(value, torch.nn.Module) and isinstance(own_of(value).get("_defaults"), dict)


class Frame:
    """A function that runs in the step, and what its names lead to."""

    def __init__(
        self,
        function: types.FunctionType,
        given: dict[str, Spot],
        caller: Frame | None = None,
        library: str = "",
        depth: int = 0,
    ) -> None:
        self.function, self.given = function, given
        self._depth = depth  # of calls whose results are followed
        self.library = library
        """The code of this library is read, too, where it calls it."""
        self.fills = False
        """It writes to something in place that is no name."""
        self._caller = caller

    def may_be_filled(self) -> bool:
        """May what it loads be written to, here or by a caller that it is returned to?"""
        at: Frame | None = self
        while at is not None and not at.fills:
            at = at._caller
        return at is not None

    def root(self, name: str) -> Spot | None:
        """What a name means in the function; its value may be EMPTY."""
        if name in self.given:
            return self.given[name]
        default = _default(self.function, name)
        if isinstance(default, CONTAINERS):
            return whole(default, name)  # the same one in each call
        for free, cell in function_cells(self.function):
            if free == name:
                return cell
        space = self.function.__globals__
        return variable(space, name) if name in space else None

    def resolve(self, steps: Steps) -> list[Spot]:
        """The places that a path may lead to; none where it leads out of sight."""
        if isinstance(steps[0], Either):
            return [spot for path in steps[0] for spot in self.resolve(path)]
        root = self.root(steps[0])
        spots = [] if root is None or root.value is EMPTY else [root]
        for step in steps[1:]:
            spots = [inner for spot in spots for inner in self._inner(spot, step)]
        return spots

    def _inner(self, spot: Spot, step: Any) -> list[Spot]:
        what, key = step
        if what == RETURNED:
            return self._result(spot, *key)
        found = _inner(spot, step)
        if not found and key is GOT:
            return self._result(spot, "get", ())
        if not found and what == ".":
            getter = in_class(type(spot.value), key)
            if isinstance(getter, property):
                return self._returned(getter.fget, spot, ())
        return found

    def _result(self, spot: Spot, name: str, paths: Steps) -> list[Spot]:
        if isinstance(spot.value, torch.Tensor) or is_array(spot.value):
            return [spot] if name in _VIEWS else []
        first, function = _callee(spot, name)
        if is_a(function, _CACHED):
            return [whole(value) for value in _results(function)]
        return self._returned(function, first, paths)

    def _returned(self, function: Any, first: Spot | None, paths: Steps) -> list[Spot]:
        """What the code of a function shows that it gives back."""
        found: list[Spot] = []
        for inner in wrapped(function) if self._depth < _CALLS else ():
            if is_foreign_function(inner) or str(inner.__module__).partition(".")[0] in LIBRARIES:
                continue
            code = inner.__code__
            names = code.co_varnames[: code.co_argcount]
            known = [[first]] if first is not None else []
            known += [self.resolve(path) if path else [] for path in paths]
            given = {name: spots[0] for name, spots in zip(names, known, strict=False) if spots}
            frame = Frame(inner, given, depth=self._depth + 1)
            for path in uses_of(code).returns:
                if path[0] in given or path[0] not in names:
                    found += frame.resolve(path)
        return found[:ITEMS]


def _default(function: types.FunctionType, name: str) -> Any:
    code, defaults = function.__code__, function.__defaults__ or ()
    if name in (function.__kwdefaults__ or {}):
        return (function.__kwdefaults__ or {})[name]
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return defaults[names.index(name)] if name in names else None


def _results(cached: Any) -> list[Any]:
    """What functools.cache() keeps of a function; one with a limit (`maxsize`) hides it."""
    held = [v for v in gc.get_referents(cached) if type(v) is dict and "__wrapped__" not in v]
    return [v for results in held for v in islice(results.values(), ITEMS)]


def _callee(spot: Spot, name: str) -> tuple[Spot | None, Any]:
    """The function that is called, and what it gets before its arguments."""
    value = spot.value
    if name and isinstance(value, types.ModuleType):
        value, name = vars(value).get(name), ""
    elif name and not isinstance(value, type) and name in (own := own_of(value)):
        value, name = own[name], ""
    if not name:
        value = undecorated(value)
        if isinstance(value, types.MethodType):
            return whole(value.__self__), value.__func__
        return None, value
    kind = value if isinstance(value, type) else type(value)
    raw = in_class(kind, name)
    if isinstance(raw, classmethod):
        return (spot if value is kind else whole(kind)), raw.__func__
    if isinstance(raw, staticmethod):
        return None, raw.__func__
    return (None if value is kind else spot), undecorated(raw)


def _inner(spot: Spot, step: Any) -> list[Spot]:
    """What an attribute or an item leads to. Runs no code of the user's."""
    if step is None or not isinstance(step, tuple):
        return []
    what, key = step
    value = spot.value
    if isinstance(value, torch.Tensor) or is_array(value):
        return [spot]  # a view, or .data: the memory is the same
    return _attribute(spot, key) if what == "." else list(_items(spot, key))


def _slot(spot: Spot, name: str, descriptor: Any) -> list[Spot]:
    try:
        return [Spot(spot, ATTRIBUTE, name, descriptor.__get__(spot.value))]
    except AttributeError:
        return []  # empty


def _attribute(spot: Spot, name: str) -> list[Spot]:
    value = spot.value
    if name == "__class__":
        return [whole(type(value))]
    if isinstance(value, types.ModuleType):
        space = vars(value)
        return [variable(space, name)] if name in space else []
    if isinstance(value, type):
        kind = next((k for k in value.__mro__ if name in vars(k)), None)
        if kind is None:
            return []
        return [Spot(whole(kind), ATTRIBUTE, name, vars(kind)[name])]
    if isinstance(value, OWN_RULES):
        return [Spot(spot, ATTRIBUTE, name, own_of(value)[name])] if per_group(value, name) else []
    own = own_of(value)
    if name in own:
        return [Spot(spot, ATTRIBUTE, name, own[name])]
    if isinstance(value, torch.nn.Module):
        parts = own.get("_modules", {})
        if name in parts:
            return [Spot(spot, ATTRIBUTE, name, parts[name])]
        if name in own.get("_buffers", {}) or name in own.get("_parameters", {}):
            return []
    for slot, descriptor in slots_of(type(value)):
        if slot == name:
            return _slot(spot, name, descriptor)
    if (
        is_a(value, dict)
        and dict.__contains__(value, name)
        and in_class(type(value), "__getattr__")
    ):
        return [Spot(spot, ITEM, name, dict.get(value, name))]
    found = _attribute(whole(type(value)), name)
    if found and isinstance(found[0].value, (*CONTAINERS, torch.Tensor)):
        return found
    if found and type(found[0].value).__name__ == "_tuplegetter" and isinstance(value, tuple):
        index = found[0].value.__reduce__()[1][0]  # a field of a namedtuple
        return [Spot(spot, ITEM, index, tuple.__getitem__(value, index))]
    return []


def _items(spot: Spot, key: Any) -> Iterator[Spot]:
    value = spot.value
    if isinstance(value, torch.nn.Module):  # nn.ModuleList and nn.ModuleDict
        parts = own_of(value).get("_modules", {})
        names = [str(key)] if str(key) in parts else list(parts)[:ITEMS]
        for name in names:
            yield Spot(spot, ATTRIBUTE, name, parts[name])
    elif isinstance(value, dict):
        known = key is not ANY and type(key) in (str, int, bool, float) and key in value
        for name in [key] if known else list(islice(dict.keys(value), ITEMS)):
            yield Spot(spot, ITEM, name, dict.get(value, name))
    elif isinstance(value, (list, tuple)):
        size = tuple.__len__(value) if isinstance(value, tuple) else list.__len__(value)
        known = type(key) is int and -size <= key < size
        for index in [key % size] if known else range(min(size, ITEMS)):
            yield Spot(spot, ITEM, index, value[index])
    else:
        yield from _members(value)


def _members(value: Any) -> Iterator[Spot]:
    """Of a set or a deque: not by their places, of which there are none or that move."""
    for base in (set, frozenset, deque):
        if is_a(value, base):  # whose `__iter__` may be the user's
            for inner in [*islice(base.__iter__(value), ITEMS)]:  # at once: threads may add to it
                if not is_a(inner, (*PLAIN, *CONTAINERS, tuple)):
                    yield whole(inner)


def parts_of(spot: Spot) -> Iterator[Spot]:
    """A module and those in it."""
    queue, seen = deque([spot]), {id(spot.value)}
    while queue and len(seen) < _PARTS:
        at = queue.popleft()
        yield at
        for name, part in own_of(at.value).get("_modules", {}).items():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                queue.append(Spot(at, ATTRIBUTE, name, part))


def streams_of(function: types.FunctionType, given: list[Any]) -> dict[int, Any]:
    """All random generators that a function's names lead to, by their addresses."""
    return {id(v): v for v in reachable(function, given, inside) if is_stream(v)}


def reachable(
    function: types.FunctionType, given: list[Any], leads_to: Callable[[Any], list[Any]]
) -> Iterator[Any]:
    """What a function's names and arguments lead to, each once, the nearest first.

    Args:
        leads_to: what lies in one of them; see `inside`.
    """
    queue = deque((value, 0) for value in [*given, *inside(function), function])
    seen: dict[int, Any] = {}
    while queue and len(seen) < _OBJECTS:
        value, depth = queue.popleft()
        if id(type(value)) in _PLAIN_ONES or id(value) in seen:
            continue
        seen[id(value)] = value  # alive, so that no address is used again
        yield value
        if depth < _DEPTH and not is_stream(value):
            queue.extend((inner, depth + 1) for inner in leads_to(value))


def inside(value: Any) -> list[Any]:
    """What lies in an object, a container, or the names of a function."""
    if is_a(value, (torch.Tensor, types.ModuleType, type)) or is_array(value):
        return []
    if is_a(value, dict):
        return list(islice(dict.values(value), ITEMS))
    for base in (list, tuple, deque):
        if is_a(value, base):  # whose `__iter__` may be the user's
            return list(islice(base.__iter__(value), ITEMS))
    if is_a(value, types.MethodType):
        return [value.__self__, value.__func__]
    if is_a(value, types.BuiltinFunctionType):  # random.random is a method of Python's stream
        return [value.__self__]
    if is_a(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if is_a(value, types.FunctionType):
        names = names_of(value.__code__)
        spaces = [value.__globals__[n] for n in names if n in value.__globals__]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return spaces + [spot.value for _, spot in function_cells(value)] + defaults
    return [inner for _, inner in own_attributes(value)]
