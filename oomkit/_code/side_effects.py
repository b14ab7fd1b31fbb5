"""What a step changes besides its gradients: read from its code, and watched once.

Everything in a step runs once per micro-batch when the batch is split. The C engine calls
:func:`watch` around the first micro-batch of a site's first split call, and nowhere else.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from .. import _C
from .bytecode import Effect, attributes_of, effects_of, methods_of
from .companions import companions
from .module_buffers import Buffers, TensorMark
from .objects import (
    MODULE_OWN,
    PLAIN,
    is_foreign,
    is_foreign_function,
    method_of,
    names_of,
    own_attributes,
    slots_of,
    undecorated,
    unwrap,
)
from .reach import carefully, is_looked_at, leads_on
from .spots import is_a, own_of, reachable

_log = logging.getLogger("oomkit")

Participants = tuple[Any, bool, list[torch.Tensor], list[Any], int]

_VALUES = 400  # recorded at most
_FAR_VALUES = 4000
_ITEMS = 64  # looked at in one container
_DEPTH = 2  # attributes of attributes
_FUNCTIONS = 50  # called by the step and looked into
_SHOWN = 12  # named in the message
_CONTAINERS = (list, dict, set, deque)
# A metric of torchmetrics has it, which is to count: see oomkit._proof.metrics.
_METRIC = "._update_count"
_AT = "\0"  # between the name of a class and the address of an object, which is not shown


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else text[:21] + "..."


# Slots, here and below: object_new() of CPython 3.11 never gives an object back for whose
# dictionary there was no memory.
class _Length:
    __slots__ = ("kind", "length")

    def __init__(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length


class _Other:
    """An object that is looked into, or is of no interest: which one it was."""

    __slots__ = ("kind", "ref")

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__
        try:
            self.ref: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self.ref = lambda: self

    def same(self, other: _Other) -> bool:
        mine, its = self.ref(), other.ref()
        return mine is self or its is other or mine is its


def _within(path: str, places: set[str]) -> bool:
    """Does it lead to one of the places (names with a number), or into what lies there?"""
    names = {place.rpartition(" ")[0] for place in places}
    return any(path.startswith(p) and path[len(p) : len(p) + 1] in ("", ".", "[") for p in names)


def _difference(was: object, now: object) -> str | None:
    """How a recorded value changed, or None."""
    if isinstance(was, _Length) and isinstance(now, _Length):
        if was.length != now.length:
            return f"{now.kind} of {was.length} -> {now.length}"
        return None
    if isinstance(was, TensorMark) and isinstance(now, TensorMark):
        return None if was.same(now) else "tensor changed"
    if isinstance(was, _Other) and isinstance(now, _Other):
        return None if was.same(now) else f"another {now.kind}"
    if type(was) is type(now) and (was == now or (was != was and now != now)):
        return None
    names = [
        _short(x) if isinstance(x, PLAIN) else getattr(x, "kind", "tensor") for x in (was, now)
    ]
    return f"{names[0]} -> {names[1]}"


class _Scan:
    """The state that the names of a step lead to, as plain values by path."""

    __slots__ = ("found", "opened", "seen", "skip")

    def __init__(self, skip: set[int]) -> None:
        self.skip = skip
        self.seen: set[int] = set()
        self.opened: set[int] = set()  # objects whose attributes have been looked at
        self.found: dict[str, object] = {}

    def value(self, path: str, value: Any, depth: int) -> None:
        if len(self.found) >= _VALUES or id(value) in self.skip:
            return
        kind = type(value)
        if kind in PLAIN:
            self.found[path] = value
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.found[path] = TensorMark(value)
        elif id(value) in self.seen:
            return
        elif isinstance(value, (*_CONTAINERS, tuple)):
            self.seen.add(id(value))
            self.container(path, value, depth)
        elif isinstance(value, torch.nn.Module):
            self.seen.add(id(value))
            self.opened.add(id(value))
            self.module(path, value)
        elif not is_foreign(kind) and kind.__flags__ & (1 << 9):  # a class made in Python
            self.seen.add(id(value))
            self.found[path] = _Other(value)
            if depth < _DEPTH:
                self.opened.add(id(value))
                for name, inner in own_attributes(value):
                    self.value(f"{path}.{name}", inner, depth + 1)

    def container(self, path: str, value: Any, depth: int) -> None:
        """By the methods of the plain types: a subclass may have its own."""
        base: Any = next(b for b in (*_CONTAINERS, tuple) if isinstance(value, b))
        if base is not tuple:
            self.found[path] = _Length(type(value).__name__, base.__len__(value))
        if base is dict:
            keys = list(dict.items(value))[:_ITEMS]
            items = [(_short(k) if type(k) in PLAIN else "...", v) for k, v in keys]
        elif base in (list, tuple):
            items = [(str(i), v) for i, v in enumerate(base.__getitem__(value, slice(_ITEMS)))]
        else:
            return
        for key, inner in items:
            if type(inner) in PLAIN or isinstance(inner, torch.Tensor):
                self.value(f"{path}[{key}]", inner, max(depth, 1))
            elif depth < _DEPTH and not isinstance(inner, torch.nn.Module):
                self.value(f"{path}[{key}]", inner, depth + 1)

    def module(self, path: str, value: torch.nn.Module) -> None:
        """Plain attributes only: parameters and buffers have rules of their own."""
        known = (MODULE_OWN, self.skip, slots_of, _Length, TensorMark, _ITEMS, _VALUES)
        if not _C._scan_modules(path, value, self.found, *known):
            self.odd_module(path, value)

    def odd_module(self, path: str, value: torch.nn.Module) -> None:
        """The same where a module has slots, or a ``named_modules()`` of its own."""
        for name, part in list(islice(value.named_modules(), _ITEMS)):
            at = f"{path}.{name}" if name else path
            for key, inner in own_attributes(part, MODULE_OWN):
                if len(self.found) >= _VALUES:
                    return
                if type(inner) in PLAIN:
                    self.found[f"{at}.{key}"] = inner
                elif type(inner) in (list, dict, set) and id(inner) not in self.skip:
                    self.found[f"{at}.{key}"] = _Length(type(inner).__name__, len(inner))
                elif isinstance(inner, torch.Tensor) and part is value:
                    self.value(f"{at}.{key}", inner, 1)


class _Far:
    """What lies farther away than `_Scan` looks, in objects of the program: a callback's average
    of the weights. By class and address, for the way there has no name.

    Args:
        near: what has been found; gets the rest.
        known: addresses of modules whose parameters and buffers have rules of their own.
    """

    __slots__ = ("_known", "_near", "_passed")

    def __init__(self, near: _Scan, known: set[int]) -> None:
        self._near, self._known = near, known
        self._passed = set(near.opened)

    def value(self, value: Any) -> None:
        """The nearest come first."""
        if is_a(value, torch.nn.Module):
            own = own_of(value)
            if id(value) in self._passed:  # with what is in it
                self._passed |= {id(part) for part in own.get("_modules", {}).values()}
            else:
                self._attributes(value, MODULE_OWN)
            if id(value) not in self._known:
                self._tensors(value, own)
        elif id(value) not in self._passed and is_looked_at(value):
            self._attributes(value, frozenset())

    def _tensors(self, module: Any, own: dict[str, Any]) -> None:
        for kind, sample in (("_parameters", False), ("_buffers", True)):
            for name, tensor in [*own.get(kind, {}).items()]:
                if is_a(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                    self._record(module, name, TensorMark(tensor, sample))

    def _attributes(self, owner: Any, but: frozenset[str]) -> None:
        for name, value in own_attributes(owner, but):
            if type(value) in PLAIN:
                self._record(owner, name, value)
            elif is_a(value, torch.Tensor):
                if not is_a(value, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(value):
                    self._record(owner, name, TensorMark(value))
            elif type(value) in _CONTAINERS and id(value) not in self._near.skip:
                inner = _Scan(self._near.skip)
                inner.container("", value, _DEPTH - 1)
                for at, found in inner.found.items():
                    self._record(owner, name + at, found)

    def _record(self, owner: object, name: str, found: object) -> None:
        if len(self._near.found) < _FAR_VALUES:
            self._near.found[f"{type(owner).__name__}{_AT}{id(owner)}.{name}"] = found


class _Function:
    """A function that the step consists of, and what its names lead to."""

    def __init__(self, function: types.FunctionType, given: dict[str, Any]) -> None:
        self.function, self.given = function, given

    def names(self) -> Iterator[tuple[str, Any]]:
        """Arguments, closure and globals that the code names."""
        yield from self.given.items()
        cells = self.function.__closure__ or ()
        for name, cell in zip(self.function.__code__.co_freevars, cells, strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue  # empty
        for name in names_of(self.function.__code__):
            if name in self.function.__globals__:
                yield name, self.function.__globals__[name]


def _bind(
    function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[: code.co_argcount]
    defaults = function.__defaults__ or ()
    given = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    given.update(function.__kwdefaults__ or {})
    given.update(zip(positional, args, strict=False))
    given.update({k: v for k, v in kwargs.items() if k in names})
    # The batch is the engine's: objects of the user's own are looked into, and containers
    # that hold no tensor, which reach every micro-batch as they are.
    return {
        k: v
        for k, v in given.items()
        if not isinstance(v, torch.Tensor)
        and (type(v).__flags__ & (1 << 9) or (isinstance(v, _CONTAINERS) and _is_flat(v)))
    }


def _is_flat(container: Any) -> bool:
    values = dict.values(container) if isinstance(container, dict) else container
    return all(type(v) in PLAIN for v in list(values)[:_ITEMS])


def _called(function: _Function) -> Iterator[_Function]:
    """Functions of the user's that this one names: globals, closure, methods of ``self``."""
    for _, value in function.names():
        value = undecorated(value)
        if isinstance(value, types.FunctionType) and not is_foreign_function(value):
            yield _Function(value, {})
    of_super, _, kind = methods_of(function.function)
    after_super = [(name, kind) for name in sorted(of_super)] if kind is not None else []
    for variable, value in function.given.items():
        if isinstance(value, torch.nn.Module) or is_foreign(type(value)):
            continue
        named: list[tuple[str, type | None]] = [
            (name, None) for name in attributes_of(function.function.__code__, variable)
        ]
        for name, after in [*named, *after_super]:
            inner = method_of(value, name, after)
            if inner is not None and inner.__code__.co_argcount:
                yield _Function(inner, {inner.__code__.co_varnames[0]: value})


def _logging(function: _Function) -> list[str]:
    """``self.log`` of a LightningModule, called by this function or a method it names.

    Lightning's own collection keeps what is logged, out of the scan's sight: the value of the
    last micro-batch, or their mean as if each had as many samples as the batch. Where the
    callback of oomkit.lightning stands in for `log`, it is logged once.
    """
    found = []
    for name, value in function.given.items():
        if hasattr(getattr(value, "__dict__", {}).get("log"), "collects"):
            continue
        if not any(k.__name__ == "LightningModule" for k in type(value).__mro__):
            continue
        codes = [(function.function.__code__, name)]
        seen: set[str] = set()
        while codes and len(seen) < _VALUES:
            for method in attributes_of(*codes.pop()):
                inner = None if method in seen else method_of(value, method)
                seen.add(method)
                if inner is not None and "lightning" not in str(inner.__module__):
                    codes.append((inner.__code__, inner.__code__.co_varnames[0]))
        found += [f"{name}.{log}()" for log in ("log", "log_dict") if log in seen]
    return found


def _functions(first: _Function) -> list[_Function]:
    found, seen = [first], {first.function.__code__}
    at = 0
    while at < len(found) < _FUNCTIONS:
        for inner in _called(found[at]):
            if inner.function.__code__ not in seen and len(found) < _FUNCTIONS:
                seen.add(inner.function.__code__)
                found.append(inner)
        at += 1
    return found


class Watch:
    """Before the first micro-batch; called after it, it answers (refusal, warning, beside)."""

    def __init__(
        self,
        function: _Function | None,
        skip: set[int],
        modules: list[Any],
        buffered: bool,
        users: Sequence[Any],
        beside: str | None,
    ) -> None:
        self.functions = [] if function is None else _functions(function)
        self.skip = skip
        self.users: Sequence[Any] = users
        self.known = {id(module) for module in modules}
        self.beside = beside  # what has as many rows as the batch, and is not split
        self.before = self.scan()
        self.buffers = Buffers(
            modules if buffered else []
        )  # last: nobody takes its hooks out of half a Watch

    def scan(self) -> dict[str, object]:
        scan = _Scan(self.skip)
        for index, ref in enumerate(self.users):
            user = ref() if isinstance(ref, weakref.ref) else ref
            if user is not None and not any(
                v is user for f in self.functions for _, v in f.names()
            ):
                scan.value(f"participants[{index}]", user, 0)
        for function in self.functions:
            for name, value in function.names():
                if not isinstance(value, (types.FunctionType, types.ModuleType, type)):
                    scan.value(name, value, 0)
        if self.functions:
            carefully(partial(self._scan_far, scan))
        return scan.found

    def _scan_far(self, scan: _Scan) -> None:
        first, far = self.functions[0], _Far(scan, self.known)
        for value in reachable(first.function, [*first.given.values()], leads_on):
            carefully(partial(far.value, value))

    def __call__(
        self, guarded: bool, settled: set[str]
    ) -> tuple[str | None, str | None, str | None]:
        try:
            refusal, buffers = self.buffers.end()
            warning = None if guarded else self.warning(buffers, settled)
        except Exception:
            _log.debug("a step's side effects could not be looked at", exc_info=True)
            return None, None, self.beside
        finally:
            self.abandon()
        return refusal, warning, self.beside

    def warning(self, buffers: list[str], settled: set[str]) -> str | None:
        """What is not in ``settled``: numbers that end as the whole batch would leave them."""
        effects = [
            effect
            for each in self.functions
            for effect in effects_of(each.function, each.given)
            if not effect.path.endswith(_METRIC)
            and not _within(self._of_step(each, effect.path), settled)
        ]
        if self.functions:
            for effect in effects:
                effect.own = effect.function == self.functions[0].function.__name__
        now = self.scan()
        changed = {
            path: how
            for path, was in self.before.items()
            if path in now
            and not _within(path, settled)
            and f"{path.rpartition('.')[0]}{_METRIC}" not in now
            and (how := _difference(was, now[path])) is not None
        }
        changed |= {
            path: f"{_short(value)}, made by it"
            for path, value in now.items()
            if path not in self.before and _is_count(path, value) and not _within(path, settled)
        }
        lines = [_line(effect, changed.pop(effect.path, None)) for effect in effects]
        lines += [f"{path} ({how})" for path, how in changed.items() if _AT not in path]
        lines += [line for f in self.functions[:1] for line in _logging(f)] + buffers
        lines += [f"{_shown(path)} ({how})" for path, how in changed.items() if _AT in path]
        lines = list(dict.fromkeys(lines))
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
        return "; ".join(lines) or None

    def _of_step(self, function: _Function, path: str) -> str:
        """A path that a function reads, by the step's own name of the object that it begins at."""
        first = min((i for i, c in enumerate(path) if c in ".["), default=len(path))
        value = function.given.get(path[:first], self)
        for name, given in self.functions[0].given.items():
            if given is value:
                return name + path[first:]
        return path

    def abandon(self) -> None:
        """Take the hooks out again and forget everything. Needs no memory."""
        self.buffers.remove()
        self.buffers.marks.clear()
        self.functions.clear()
        self.before.clear()
        self.users = ()


def _shown(path: str) -> str:
    kind, _, rest = path.partition(_AT)
    return kind + rest.lstrip("0123456789")


def _is_count(path: str, value: object) -> bool:
    """Is it a number in an attribute, which a first micro-batch has made? Others, and those of
    private names, are caches more often."""
    name = path.rpartition(".")[2]
    return name != path and not name.startswith("_") and type(value) in (int, float)


def _line(effect: Effect, how: str | None) -> str:
    where = f"line {effect.line}" if effect.own else f"{effect.function}(), line {effect.line}"
    return f"{effect.what} ({where}{', ' + how if how else ''})"


def watch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], participants: Participants
) -> Watch | None:
    """Look at what a step may change besides, before its first micro-batch.

    Args:
        func: the decorated callable, and ``args`` and ``kwargs`` of its call.
        participants: weak references to its modules, whether one has a buffer, those of its
            parameters that are no ``nn.Parameter`` (:class:`_Scan` passes over these by their
            type), the user's own participants (as weak references where they have any), and the
            rows of the batch.
    """
    try:
        roots, buffered, params, users, rows = participants
        own = {id(value) for value in (*args, *kwargs.values())}
        modules = [m for ref in roots or () if isinstance(m := ref(), torch.nn.Module)]
        plain, args, kwargs = unwrap(func, args, kwargs)
        function = None if plain is None else _Function(plain, _bind(plain, args, kwargs))
        beside = None if plain is None else companions(plain, args, kwargs, own, rows)
        skip = {id(p) for p in params}
        return Watch(function, skip, modules, buffered, users, beside)
    except Exception:
        _log.debug("a step's side effects could not be looked at", exc_info=True)
        return None
