"""Does a step write to parameters by hand? Read from its code, before its first call.

A write through ``.data`` leaves no trace that could be seen after an error, so copies have to be
there before. Steps whose code shows no such write pay nothing.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from .objects import FOREIGN, method_of, names_of, undecorated, unwrap, wrapped
from .side_effects import _bind
from .spots import own_of

_log = logging.getLogger("oomkit")

_FUNCTIONS = 100  # looked into at most
_ITEMS = 64  # of a container
_OPTIMIZING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_EMBEDDING = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_IN_PLACE = frozenset(
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ fill_ index_add_ "
    "index_copy_ index_fill_ lerp_ masked_fill_ mul_ neg_ normal_ pow_ renorm_ round_ scatter_ "
    "scatter_add_ set_ sign_ sqrt_ sub_ subtract_ multiply_ divide_ uniform_ zero_".split()
)
# Functions that write to parameters, some of them through ``.data``.
_WRITERS = frozenset({"merge_adapter", "unmerge_adapter", "vector_to_parameters"})
_LOADERS = frozenset({"load_state_dict"})
# Where one of these is named, a loop's variable may be a parameter.
_LEADS = frozenset(
    "bias data detach inference_mode modules named_modules named_parameters no_grad param_groups "
    "parameters set_grad_enabled state_dict weight".split()
)
_SKIPPED = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "RESUME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def _module(kind: type) -> str:
    """The module of a class, without asking its metaclass."""
    return str(type.__dict__["__dict__"].__get__(kind).get("__module__", ""))


def _is_foreign(kind: type) -> bool:
    top = _module(kind).partition(".")[0]
    return top in FOREIGN or top in sys.stdlib_module_names


class Write(NamedTuple):
    """A line that may write to parameters; ``hidden``: perhaps through ``.data``."""

    where: str
    hidden: bool


class _Code:
    """One code object, and what its names mean."""

    def __init__(self, code: types.CodeType, known: dict[str, Any], parts: set[str]) -> None:
        self.known, self.parts = known, parts
        self.names = frozenset(code.co_names)
        self.ops = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
        count = code.co_argcount + code.co_kwonlyargcount
        self.loose = set(code.co_varnames[:count]) - known.keys()
        self.leads = bool(self.names & _LEADS)
        line = code.co_firstlineno
        self.lines = []
        for i in self.ops:
            if i.positions is not None and i.positions.lineno:
                line = i.positions.lineno
            self.lines.append(line)
        self.loops()

    def loops(self) -> None:
        """Names that a loop gives a value are loose, too."""
        for at, op in enumerate(self.ops):
            if op.opname != "FOR_ITER":
                continue
            for after in self.ops[at + 1 : at + 8]:
                if not after.opname.startswith(("STORE_FAST", "UNPACK_", "STORE_DEREF")):
                    break
                if after.opname.startswith("STORE_"):
                    self.loose.update(_several(after.argval))

    def attribute(self, at: int) -> str | None:
        """The name, where the instruction at this place reads an attribute."""
        if at < 0 or self.ops[at].opname not in _ATTRIBUTES:
            return None
        return str(self.ops[at].argval)

    def may_be_parameter(self, at: int) -> bool:
        """What the instruction at this place has put on the stack."""
        name = self.attribute(at)
        if name == "grad" or at < 0:
            return False
        if name == "data":
            return self.attribute(at - 1) != "grad"
        if name is not None:
            return name in self.parts
        op = self.ops[at]
        if op.opname.startswith("LOAD_"):
            name = str(_several(op.argval)[-1])
            if name in self.known:
                return _is_parameter(self.known[name])
            return self.leads and name in self.loose
        if op.opname.startswith(("CALL", "BINARY_SUBSCR", "BINARY_OP")):
            near = [self.attribute(i) for i in range(max(0, at - 4), at)]
            return self.leads and "grad" not in near and not {"detach", "data"}.isdisjoint(near)
        return False

    def writes(self, at: int) -> bool:
        op = self.ops[at]
        name = str(op.argval)
        if name in _WRITERS | _LOADERS and op.opname.startswith("LOAD_"):
            return True
        if op.opname in _ATTRIBUTES and name in _IN_PLACE:
            return self.may_be_parameter(at - 1)
        if op.opname in _ATTRIBUTES and name.startswith("_foreach_") and name.endswith("_"):
            return "grad" not in self.names
        if op.opname == "STORE_ATTR" and name == "data":
            return str(self.ops[at - 1].argval) != "self"
        augmented = at > 0 and self.ops[at - 1].argrepr.endswith("=")
        if op.opname == "STORE_ATTR" and augmented:
            return name in self.parts
        if op.opname == "STORE_FAST" and augmented:
            return self.leads and name in self.loose
        return op.opname == "STORE_SUBSCR" and self.stores_item(at)

    def stores_item(self, at: int) -> bool:
        line = self.lines[at]
        same = [i for i in range(at) if self.lines[i] == line]
        return any(
            self.attribute(i) in self.parts | {"data"} and self.attribute(i - 1) != "grad"
            for i in same
        )

    def find(self) -> tuple[int, bool] | None:
        """The first line that writes, and whether ``.data`` may be what it writes through."""
        for at in range(len(self.ops)):
            if self.writes(at):
                return self.lines[at], bool(self.names & ({"data"} | _WRITERS))
        return None


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_parameter(value: object) -> bool:
    return isinstance(value, torch.nn.Parameter) or (
        isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    )


def _is_of_interest(names: frozenset[str]) -> bool:
    """Reading the instructions takes a thousand times as long as this."""
    return (
        not names.isdisjoint(_IN_PLACE)
        or not names.isdisjoint(_WRITERS | _LOADERS | {"data"})
        or any(n.startswith("_foreach_") for n in names)
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _augments(code: types.CodeType, parts: set[str]) -> bool:
    """May it hold ``p -= ...`` or ``layer.weight[i] = ...`` of a parameter?"""
    return not frozenset(code.co_names).isdisjoint({"no_grad", "inference_mode"} | parts)


class _Walk:
    """The functions that a step consists of, as far as its names lead to them."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.seen: set[int] = set()
        self.words: set[str | int] = set()  # plain values that a function's names lead to
        self.tables: list[Any] = []  # containers likewise
        self.waiting: deque[tuple[types.FunctionType, dict[str, Any]]] = deque()
        self.parts = {name for m in modules for name in m._parameters}
        for module in modules:
            if not _is_foreign(type(module)):
                self.method(module, "forward")

    def function(self, value: Any, given: dict[str, Any]) -> None:
        value = undecorated(value)
        while isinstance(value, functools.partial):
            value = value.func
        while isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            value = value.__wrapped__  # torch.no_grad() as a decorator
        if isinstance(value, types.FunctionType) and id(value.__code__) not in self.seen:
            if not _is_foreign_code(value):
                self.seen.add(id(value.__code__))
                self.waiting.append((value, given))

    def method(self, value: object, name: str) -> None:
        for found in wrapped(method_of(value, name)):  # in torch.no_grad() as a decorator
            if found.__code__.co_argcount:
                self.function(found, {found.__code__.co_varnames[0]: value})

    def object(self, value: Any, names: list[str], depth: int) -> None:
        kind = type(value)
        if isinstance(value, torch.optim.Optimizer):
            self.optimizer(value, names)
        if isinstance(value, (torch.Tensor, type, *_OPTIMIZING)):
            return
        if isinstance(value, (types.FunctionType, functools.partial)) or (
            _module(kind) == "oomkit._C"
        ):
            self.function(value, {})
        elif isinstance(value, types.MethodType):
            self.method(value.__self__, value.__func__.__name__)
        elif isinstance(value, types.ModuleType):
            self.module(value, names, depth)
        elif isinstance(value, (str, int)):
            self.words.add(value)
        elif isinstance(value, (dict, list, tuple)) and depth:
            self.tables.append(value)
        elif kind.__flags__ & (1 << 9):  # a class made in Python
            if not _is_foreign(kind):
                for name in names:
                    self.method(value, name)
                self.method(value, "__call__")
            self.inside(value, names, depth)

    def optimizer(self, value: torch.optim.Optimizer, names: list[str]) -> None:
        """Methods beside its `step`, as those by which SAM climbs and comes back."""
        if not _is_foreign(type(value)):
            for name in names:
                if name not in ("step", "zero_grad", "load_state_dict"):
                    self.method(value, name)

    def module(self, value: types.ModuleType, names: list[str], depth: int) -> None:
        """What the code names of a module of the user's: helpers.attack(model)."""
        top = value.__name__.partition(".")[0]
        if depth == 0 or top in FOREIGN or top in sys.stdlib_module_names:
            return
        space = vars(value)
        for name in names:
            if name in space:
                self.object(space[name], names, depth - 1)

    def table(self, value: Any, words: set[Any], names: list[str]) -> None:
        """Functions by name, as in LOSSES[kind](...): those whose names are in sight, or all."""
        named = isinstance(value, dict)
        inner = list(islice(dict.items(value) if named else enumerate(value), _ITEMS))
        chosen = [item for key, item in inner if key in words]
        for item in chosen if named and chosen else [item for _, item in inner]:
            if not isinstance(item, (dict, list, tuple)):
                self.object(item, names, 0)

    def inside(self, value: Any, names: list[str], depth: int) -> None:
        if depth == 0:
            return
        own = own_of(value)
        modules = own.get("_modules") if isinstance(value, torch.nn.Module) else None
        for name in names:
            if name in own:
                self.object(own[name], names, depth - 1)
            elif modules and name in modules:
                self.object(modules[name], names, depth - 1)

    def look(self, function: types.FunctionType, given: dict[str, Any]) -> Write | None:
        code = function.__code__
        known = dict(_outer(function))
        for inner in _codes(code):
            if _is_of_interest(frozenset(inner.co_names)) or _augments(inner, self.parts):
                read = _Code(inner, known | given, self.parts)
                found = read.find()
                if found is not None:
                    return Write(f"{function.__name__}(), line {found[0]}", found[1])
        names = names_of(code)
        self.words, self.tables = set(), []
        for value in [*known.values(), *given.values()]:
            self.object(value, names, 2)
        words = self.words | {c for c in code.co_consts if isinstance(c, (str, int))}
        for value in self.tables:
            self.table(value, words, names)
        return None

    def run(self) -> Write | None:
        shown = None
        for _ in range(_FUNCTIONS):
            if not self.waiting or (shown is not None and shown.hidden):
                break
            found = self.look(*self.waiting.popleft())
            if shown is None or (found is not None and found.hidden):
                shown = found
        return shown


def _is_foreign_code(function: types.FunctionType) -> bool:
    top = str(function.__module__).partition(".")[0]
    return top in ("torch", "oomkit", "numpy", "logging", "contextlib", "functools")


def _outer(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and what the closure holds, as far as the code names them."""
    for name in names_of(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # empty


def _look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], roots: Any) -> Write | None:
    modules = [m for ref in roots or () if isinstance(m := ref(), torch.nn.Module)]
    walk = _Walk(modules)
    plain, args, kwargs = unwrap(func, args, kwargs)
    if plain is not None:
        walk.function(plain, {})
        given = _bind(plain, args, kwargs)
        if walk.waiting and walk.waiting[-1][0] is plain:
            walk.waiting[-1] = (plain, given | dict.fromkeys(_arguments(plain) - given.keys()))
    shown = walk.run()
    if shown is None:
        for module in modules:
            if isinstance(module, _EMBEDDING) and module.max_norm is not None:
                return Write(f"max_norm of {type(module).__name__}", False)
    return shown


def _arguments(function: types.FunctionType) -> set[str]:
    """Of the step itself: what no object of the user's stands for is the batch."""
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def parameter_writes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], roots: Any
) -> Write | None:
    """The line by which a step writes to parameters outside an optimizer, or None.

    Args:
        func: the decorated callable, and ``args`` and ``kwargs`` of its call.
        roots: weak references to the modules that take part.
    """
    try:
        return _look(func, args, kwargs, roots)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        _log.debug("the writes of a step could not be read from its code", exc_info=True)
        return None
