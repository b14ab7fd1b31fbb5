"""Plain state that a step changes: places to mark before an attempt and put back after it.

A counter of the trainer, a list of losses, the tensors of a metric or of a moving average: the
code of the step and of what it calls shows where it stores. The engine (plain_state.c) gets a
table of places and looks at each of them at the begin of an attempt. Nothing is evaluated
here: no property, no method of the user's.
"""

from __future__ import annotations

import logging
import types
from collections import defaultdict, deque
from functools import partial
from itertools import islice
from typing import Any

import torch

from .bytecode import Steps, Symbol
from .objects import (
    LIBRARIES,
    MODULE_OWN,
    in_class,
    is_foreign_function,
    method_of,
    own_attributes,
    undecorated,
    unwrap,
    wrapped,
)
from .reach import has_threads, is_of_threads
from .spots import (
    ARGUMENT,
    ATTRIBUTE,
    CELL,
    CONTAINERS,
    ITEM,
    ITEMS,
    KEYWORD,
    OBJECT,
    OWN_RULES,
    SWITCH,
    Frame,
    Spot,
    is_array,
    is_metric,
    is_stream,
    own_of,
    parts_of,
    per_group,
    streams_of,
    variable,
    whole,
)
from .switches import Switch, attribute_of, set_by
from .uses import (
    CALL,
    STORE,
    SUPER,
    Use,
    Uses,
    calls_in,
    is_unnamed,
    items_of,
    uses_of,
    writes,
)

# What is done with a place (plain_state.h).
BIND, CONTENT, GROWS, EACH = 1, 2, 4, 8
FLOWS = 32  # of a metric: its counts belong to states that micro-batches add to

_log = logging.getLogger("oomkit")

Place = tuple[int, int, Any, int, str]  # parent, kind, key, what, name
Found = tuple[tuple[Place, ...], tuple[Any, ...]]

_VISITS = 3000  # of functions, with the objects that they are given
_CODES = 300  # functions read
_PLACES = 2000
_OWN_FILLS = ("__setitem__", "__delitem__", "__iadd__", "__isub__", "__imul__", "__ior__")
_ALIKE = 4  # of the layers of a model that find nothing, the rest is taken to be alike
_READS = frozenset(
    "items keys values get copy index count __len__ __contains__ union intersection "
    "difference issubset issuperset isdisjoint most_common elements".split()
)
_FILLS = frozenset(
    "shuffle heappush heappop heapify heapreplace insort insort_left insort_right copyto put "
    "putmask place fill_diagonal put_along_axis setitem delitem iadd iconcat".split()
)
_ARRAY_FILLS = frozenset("sort fill put partition resize itemset byteswap".split())
# Functions that let others run in another thread, or later.
_ELSEWHERE = frozenset(
    "Thread Timer Process start_new_thread submit apply_async map_async starmap_async imap "
    "imap_unordered run_in_executor to_thread add_done_callback call_soon call_soon_threadsafe "
    "call_later create_task finalize".split()
)
_SETS = vars(object)["__setattr__"]
_CALLBACKS = (types.FunctionType, types.MethodType, partial)
_HOOK = Use(CALL, None)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Methods of modules by which others come into them or go.
_LAYERS_CHANGE = frozenset(
    "__delitem__ __setitem__ add_module append clear extend insert pop popitem register_module "
    "set_submodule update".split()
)
# What torchmetrics keeps beside the states that `_defaults` names.
_METRIC = ("_update_count", "_computed", "_update_called", "_forward_cache", "_cache", "_is_synced")
_COLLECTION = ("_groups_checked", "_groups", "_state_is_copy")


class Places:
    """Everything that a step, and what it calls, may store to."""

    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self.index: dict[tuple[int, int, Any], int] = {}
        self.streams: dict[int, Any] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.queue: deque[Frame] = deque()
        self.layers: deque[Frame] = deque()
        self.parts: dict[int, list[Spot]] = {}  # of the modules that were met
        self.barren: dict[int, int] = {}  # visits in a row that found nothing

    # --- the table ---

    def at(self, spot: Spot) -> int:
        parent = -1 if spot.parent is None else self.at(spot.parent)
        by_address = spot.kind in (OBJECT, CELL)
        key = id(spot.key) if by_address else (type(spot.key), spot.key)
        where = (parent, spot.kind, key)
        if where not in self.index:
            self.index[where] = len(self.table)
            self.table.append([parent, spot.kind, spot.key, 0, spot.name()])
        return self.index[where]

    def mark(self, spot: Spot, what: int) -> None:
        if len(self.table) < _PLACES:
            self.table[self.at(spot)][3] |= what

    def fill(self, spot: Spot, what: int = CONTENT) -> None:
        """What is there may be changed in place."""
        value = spot.value
        if isinstance(value, torch.Tensor):
            if isinstance(value, torch.nn.Parameter) or value.requires_grad:
                return
        elif isinstance(value, tuple):
            what = EACH
        elif not isinstance(value, CONTAINERS) and not is_array(value):
            return
        if what == GROWS and spot.kind in (OBJECT, ARGUMENT, KEYWORD):
            what = CONTENT  # no name leads to it from which its end could be taken off
        if spot.kind == ITEM and spot.parent is not None and spot.parent.kind != OBJECT:
            if isinstance(spot.parent.value, (*CONTAINERS, tuple)):
                self.mark(spot.parent, EACH)
                return
        self.mark(spot, what)

    # --- functions ---

    def visit(
        self,
        function: types.FunctionType,
        given: dict[str, Spot],
        layer: bool = False,
        caller: Frame | None = None,
        library: str = "",
    ) -> None:
        if _is_foreign_code(function, library):
            return
        known = (id(function.__code__), *(id(spot.value) for spot in given.values()))
        if known not in self.seen and len(self.seen) < _VISITS:
            self.seen.add(known)
            (self.layers if layer else self.queue).append(Frame(function, given, caller, library))

    def enter(
        self,
        frame: Frame,
        function: types.FunctionType,
        use: Use,
        first: Spot | None = None,
        caller: Frame | None = None,
    ) -> None:
        """A call of it, and of what it wraps: a decorator passes arguments on (torch.no_grad())."""
        for inner in wrapped(function):
            for given in self.bound(frame, inner, use, first):
                self.visit(inner, given, caller=caller, library=frame.library)

    def enter_held(
        self,
        frame: Frame,
        function: types.FunctionType,
        use: Use,
        first: list[Spot],
        named: dict[str, Any],
    ) -> None:
        """The same of a partial, which has some of the arguments already."""
        for inner in wrapped(function):
            names = inner.__code__.co_varnames
            held = dict(zip(names, first, strict=False))
            held |= {name: whole(value) for name, value in named.items() if name in names}
            for given in self.bound(frame, inner, use, None, len(first)):
                self.visit(inner, {**held, **given}, library=frame.library)

    def run(self) -> None:
        while self.queue or self.layers:  # of a large model the layers must not crowd out
            frame = self.queue.popleft() if self.queue else self.layers.popleft()
            code = frame.function.__code__
            known = self.barren.get(id(code))
            if (known or 0) < _ALIKE and (known is not None or len(self.barren) < _CODES):
                before = self.size()
                self.read(frame, uses_of(code))
                self.barren[id(code)] = (known or 0) + 1 if before == self.size() else 0

    def size(self) -> tuple[int, ...]:
        return len(self.table), len(self.streams), len(self.queue), len(self.layers)

    def read(self, frame: Frame, found: Uses) -> None:
        frame.fills = found.fills_locals
        for use in found.uses:
            if use.kind == STORE:
                self.store(frame, use.place or ())
            elif use.kind == CALL:
                self.call(frame, use)
            elif use.place and use.place[-1] == (".", "__dict__"):
                for owner in frame.resolve(use.place[:-1]):
                    self.store_attributes(owner)
            else:
                for spot in frame.resolve(use.place or ()):
                    self.fill(spot)
                    self.layers_change(spot)
                    self.own_methods(spot, _OWN_FILLS)
        for steps in found.loads:
            if frame.may_be_filled():
                for spot in frame.resolve(steps):
                    self.fill_tensors(spot)
            if len(steps) > 1 and steps[-1][0] == "[":
                for spot in frame.resolve(steps[:-1]):
                    if isinstance(spot.value, defaultdict):
                        self.fill(spot)  # reading makes what is not there

    def own_methods(self, spot: Spot, names: tuple[str, ...]) -> None:
        """By which an object of a class of the user's does what operators are."""
        if isinstance(spot.value, (torch.Tensor, torch.nn.Module, type, types.ModuleType)):
            return
        for name in names:
            for function in wrapped(method_of(spot.value, name)):
                self.visit(
                    function, dict(zip(function.__code__.co_varnames[:1], [spot], strict=False))
                )

    def fill_tensors(self, spot: Spot) -> None:
        value = spot.value
        if isinstance(value, torch.Tensor):
            self.fill(spot)
        elif isinstance(value, (list, tuple, dict)):
            inner = islice(dict.values(value) if isinstance(value, dict) else value, ITEMS)
            if any(isinstance(v, torch.Tensor) for v in inner):
                self.mark(spot, EACH)

    def store(self, frame: Frame, steps: Steps) -> None:
        if len(steps) == 1:
            if steps[0] not in frame.given:
                root = frame.root(steps[0])
                self.mark(root or variable(frame.function.__globals__, steps[0]), BIND)
            return
        last = steps[-1]
        for owner in frame.resolve(steps[:-1]):
            self.store_attribute(owner, last[1])

    def store_attribute(self, owner: Spot, name: str) -> None:
        value = owner.value
        self.switch(f"{owner.name()}.{name}", attribute_of(value, name))
        if isinstance(value, CONTAINERS) or (isinstance(value, torch.Tensor) and name == "data"):
            self.fill(owner)  # a dict whose items are its attributes
        if isinstance(value, (torch.Tensor, *OWN_RULES)) or name == "grad":
            if per_group(value, name):
                self.mark(Spot(owner, ATTRIBUTE, name, own_of(value)[name]), BIND)
            return
        if isinstance(value, CONTAINERS) and not _has_attribute(value, name):
            return
        self.own_methods(owner, ("__setattr__",))
        setter = in_class(type(value), name)
        if isinstance(setter, property):
            for function in wrapped(setter.fset):
                self.visit(function, {function.__code__.co_varnames[0]: owner})
        if isinstance(value, types.ModuleType):
            self.mark(variable(vars(value), name), BIND)
            return
        own = own_of(value)
        if isinstance(value, torch.nn.Module) and any(
            name in own.get(part, ()) for part in ("_parameters", "_buffers", "_modules")
        ):
            if name in own.get("_buffers", ()):
                self.new_buffer(owner, name)
            if name in own.get("_modules", ()):
                self.layers_change(owner)
            return  # tensors that are there have rules of their own
        if isinstance(value, type):
            owner = whole(value)
        self.mark(Spot(owner, ATTRIBUTE, name, own.get(name)), BIND)

    def layers_change(self, owner: Spot) -> None:
        """Of a `Sequential`, a `ModuleList` or another module: what it consists of."""
        if isinstance(owner.value, torch.nn.Module):
            layers = own_of(owner.value).get("_modules")
            if isinstance(layers, dict):  # a Sequential that loses one gets a new one
                self.mark(Spot(owner, ATTRIBUTE, "_modules", layers), BIND | CONTENT)

    def switch(self, name: str, switch: Switch | None) -> None:
        if switch is not None:
            self.mark(Spot(None, SWITCH, switch, None, name), BIND)

    def new_buffer(self, owner: Spot, name: str) -> None:
        """One that the step may make, which has no value yet: a mean of the first batch."""
        there = own_of(owner.value).get("_buffers")
        if isinstance(there, dict) and there.get(name) is None:
            buffers = Spot(owner, ATTRIBUTE, "_buffers", there)
            self.mark(Spot(buffers, ITEM, name, None), BIND)

    # --- calls ---

    def call(self, frame: Frame, use: Use) -> None:
        steps = use.place
        if "out" in use.names:
            at = use.names.index("out") - len(use.names)
            self.escape(frame, use.arguments[at : at + 1 or None])
        self.callbacks(frame, use)
        if steps is None or (calls_in(steps) and not self.is_known(frame, steps)):
            self.escape(frame, use.arguments)
        elif steps[0] == SUPER:
            self.call_super(frame, steps, use)
        elif len(steps) > 1 and steps[-1][0] == ".":
            if steps[-1][1] == "__setattr__" and len(use.arguments) > 2:
                self.builtin(frame, "setattr", use)  # object.__setattr__(self, "n", 1)
            for owner in frame.resolve(steps[:-1]):
                self.method(frame, owner, steps[-1][1], use)
        else:
            spots = frame.resolve(steps)
            for spot in spots:
                self.called(frame, spot.value, use, spot)
            if not spots and len(steps) == 1:
                self.builtin(frame, steps[0], use)

    def escape(self, frame: Frame, arguments: tuple[Symbol | None, ...]) -> None:
        """Given to a function that is not known: it may write to it."""
        for symbol in items_of(arguments):
            if symbol is not None and symbol.kind != "constant":
                for spot in frame.resolve(symbol.steps):
                    self.fill(spot, CONTENT | EACH)

    def is_known(self, frame: Frame, steps: Steps) -> bool:
        return bool(frame.resolve(steps[:-1] if steps[-1][0] == "." else steps))

    def callbacks(self, frame: Frame, use: Use) -> None:
        """Functions that are given to a call: it may call them."""
        given = [s for s in items_of(use.arguments) if s is not None and s.kind != "constant"]
        if given and _is_elsewhere(frame, use.place):
            return
        for steps in [s.steps for s in given]:
            for spot in frame.resolve(steps):
                if isinstance(spot.value, _CALLBACKS) and not _is_locked(spot.value):
                    self.called(frame, spot.value, _HOOK, spot)
            if type(steps[-1]) is tuple and steps[-1][0] == ".":
                for owner in frame.resolve(steps[:-1]):
                    if _has_method(owner.value, steps[-1][1]) and not has_threads(owner.value):
                        self.method(frame, owner, steps[-1][1], _HOOK)

    def builtin(self, frame: Frame, name: str, use: Use) -> None:
        if name not in ("setattr", "delattr") or not use.arguments or use.arguments[0] is None:
            return
        attribute = use.arguments[1] if len(use.arguments) > 1 else None
        for owner in frame.resolve(use.arguments[0].steps):
            if attribute is not None and attribute.kind == "constant":
                self.store_attribute(owner, attribute.steps[0])
            else:
                self.store_attributes(owner)

    def store_attributes(self, owner: Spot) -> None:
        """By names that are not known."""
        own = MODULE_OWN if isinstance(owner.value, torch.nn.Module) else frozenset[str]()
        for key, value in islice(own_attributes(owner.value, own), ITEMS):
            if not isinstance(value, torch.nn.Module):
                self.store_attribute(owner, key)

    def bound(
        self,
        frame: Frame,
        function: types.FunctionType,
        use: Use,
        first: Spot | None,
        held: int = 0,
    ) -> list[dict[str, Spot]]:
        """What the arguments of a call, behind so many that the function has already, are
        called in it; in a loop, for each item.
        """
        code = function.__code__
        names = list(code.co_varnames[held : code.co_argcount + code.co_kwonlyargcount])
        given: dict[str, list[Spot]] = {}
        if first is not None and names:
            given[names.pop(0)] = [first]
        count = len(use.arguments) - len(use.names)
        pairs = [*zip(names, use.arguments[:count], strict=False)]
        pairs += zip(use.names, use.arguments[count:], strict=False)
        for name, symbol in pairs:
            if symbol is not None and symbol.kind != "constant":
                spots = frame.resolve(symbol.steps)
                if spots:
                    given[name] = spots[:ITEMS]
        count = max(map(len, given.values()), default=1)
        return [
            {n: spots[min(i, len(spots) - 1)] for n, spots in given.items()} for i in range(count)
        ]

    def call_super(self, frame: Frame, steps: Steps, use: Use) -> None:
        kind, first = frame.root("__class__"), next(iter(frame.given.values()), None)
        if kind is None or not isinstance(kind.value, type) or first is None or len(steps) != 2:
            return
        function = method_of(first.value, steps[1][1], kind.value)
        if function is not None:
            self.enter(frame, function, use, first)

    def method(self, frame: Frame, owner: Spot, name: str, use: Use) -> None:
        value = owner.value
        if is_stream(value):
            self.streams[id(value)] = value
            self.escape(frame, use.arguments[: name in _FILLS])  # rng.shuffle(x)
        elif isinstance(value, torch.Tensor):
            if writes(name):
                self.fill(owner)
        elif isinstance(value, CONTAINERS):
            if name not in _READS:
                grows = name in ("append", "extend") and isinstance(value, list)
                self.fill(owner, GROWS if grows else CONTENT)
            if type(value) not in CONTAINERS:
                self.object_method(frame, owner, name, use)
        elif is_array(value):
            if name in _ARRAY_FILLS:
                self.fill(owner)
        elif isinstance(value, torch.nn.Module):
            self.module(frame, owner, name, use)
        elif type(value).__name__ == "ufunc":
            self.escape(frame, use.arguments[: name == "at"])  # numpy.add.at(x, index, 1)
        else:
            self.object_method(frame, owner, name, use)

    def object_method(self, frame: Frame, owner: Spot, name: str, use: Use) -> None:
        value = owner.value
        if isinstance(value, types.ModuleType):
            found = vars(value).get(name)
            if found is not None:
                self.called(frame, found, use, None)
        elif isinstance(value, type):
            if name == "apply" and issubclass(value, torch.autograd.Function):
                self.autograd_function(frame, value)
            raw = in_class(value, name)
            inner = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
            if isinstance(inner, types.FunctionType):
                self.enter(frame, inner, use, owner if isinstance(raw, classmethod) else None)
        elif name in (own := own_of(value)) and not _is_of_call(own[name]):
            self.called(frame, own[name], use, None)
        elif not isinstance(value, OWN_RULES):
            function = method_of(value, name)
            if function is not None:
                self.enter(frame, function, use, owner, frame)
            else:
                self.object_method(frame, whole(type(value)), name, use)
                self.delegated(frame, owner, own, name, use)

    def delegated(
        self, frame: Frame, owner: Spot, own: dict[str, Any], name: str, use: Use
    ) -> None:
        """A wrapper's `__getattr__` looks for what it has not in an object that it keeps."""
        if in_class(type(owner.value), "__getattr__") is None:
            return
        for key, inner in islice(own.items(), ITEMS):
            if _has_method(inner, name):
                self.method(frame, Spot(owner, ATTRIBUTE, key, inner), name, use)

    def autograd_function(self, frame: Frame, kind: type) -> None:
        """`apply()`, and what the backward calls."""
        for name in ("forward", "setup_context", "backward", "vjp", "jvp"):
            raw = in_class(kind, name)
            inner = raw.__func__ if isinstance(raw, staticmethod) else None
            for function in wrapped(inner):
                self.visit(function, {}, caller=frame, library=frame.library)

    def called(self, frame: Frame, value: Any, use: Use, spot: Spot | None) -> None:
        value = undecorated(value)
        self.switch(*(set_by(value) or ("", None)))
        if isinstance(value, types.FunctionType):
            if _is_foreign_code(value, frame.library):
                self.foreign(frame, value.__name__, use)
            else:
                self.enter(frame, value, use, None, frame)
        elif isinstance(value, types.MethodType):
            owner = whole(value.__self__)
            self.method(frame, owner, value.__name__, use)
        elif isinstance(value, types.BuiltinFunctionType):
            owner = whole(value.__self__)
            if is_stream(owner.value) or isinstance(owner.value, CONTAINERS):
                self.method(frame, owner, value.__name__, use)  # random.random, note = list.append
            else:
                self.foreign(frame, value.__name__, use)
        elif isinstance(value, torch.nn.Module):
            self.module(frame, spot or whole(value), "forward", use)
        elif not isinstance(value, type):
            function, args, named = unwrap(value, (), {})
            if isinstance(function, types.FunctionType):
                first = [spot if a is value and spot is not None else whole(a) for a in args]
                self.enter_held(frame, function, use, first, named)
            elif type(value).__module__.startswith("numpy"):
                self.foreign(frame, value.__name__, use)  # one that dispatches

    def foreign(self, frame: Frame, name: str, use: Use) -> None:
        """torch.nn.init.zeros_(x), torch._foreach_mul_(list, 2), random.shuffle(list)"""
        if writes(name):
            frame.fills = frame.fills or any(map(is_unnamed, items_of(use.arguments)))
            self.escape(frame, use.arguments)
        elif name in _FILLS:
            self.escape(frame, use.arguments[:1])

    # --- modules ---

    def module(self, frame: Frame, spot: Spot, name: str, use: Use) -> None:
        value = spot.value
        first = use.arguments[0] if name == "register_buffer" and use.arguments else None
        if first is not None and first.kind == "constant" and isinstance(first.steps[0], str):
            self.new_buffer(spot, first.steps[0])
        if name in _LAYERS_CHANGE:
            self.layers_change(spot)
        if name in ("forward", "__call__"):
            if (id(value),) in self.seen:
                return
            self.seen.add((id(value),))
        parts = self.metrics(spot)
        if name not in ("forward", "__call__"):
            function = method_of(value, name)
            if function is not None:
                self.enter(frame, function, use, spot)
            elif name in (own := own_of(value)):
                self.called(frame, own[name], use, None)
            return
        for part in parts:
            own = own_of(part.value)
            for kind in _HOOKS:
                for hook in [*own.get(kind, {}).values()]:
                    self.called(frame, hook, _HOOK, None)
            for parameter in [*own.get("_parameters", {}).values()]:
                self.parameter_hooks(frame, parameter)
            forward = method_of(part.value, "forward")
            if forward is not None and not isinstance(own.get("_defaults"), dict):
                library = _top(forward) if own.get("_buffers") else ""
                for inner in wrapped(forward):
                    bound = self.bound(frame, inner, use, spot) if part is spot else [{}]
                    for given in bound:
                        given = given or dict(
                            zip(inner.__code__.co_varnames[:1], [part], strict=False)
                        )
                        self.visit(inner, given, True, library=library)

    def parameter_hooks(self, frame: Frame, parameter: Any) -> None:
        if type(parameter) is torch.nn.Parameter:  # another class may answer by code of its own
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                for hook in [*(getattr(parameter, kind, None) or {}).values()]:
                    self.called(frame, hook, _HOOK, None)

    def metrics(self, spot: Spot) -> list[Spot]:
        """The parts of a module; the metrics among them may change."""
        if id(spot.value) not in self.parts:
            parts = self.parts[id(spot.value)] = list(parts_of(spot))
            found = [part for part in parts if is_metric(part.value)]
            for part in found:
                self.metric(part)
            if found:
                self.collection(spot)
        return self.parts[id(spot.value)]

    def metric(self, spot: Spot) -> None:
        own = own_of(spot.value)
        for name in own["_defaults"]:
            at = Spot(spot, ATTRIBUTE, name, own.get(name))
            self.mark(at, BIND | FLOWS)
            self.fill(at)
        for name, value in own.items():
            if name in own["_defaults"]:
                continue
            # Wrappers keep tensors that are no states: the largest value so far.
            if name in _METRIC or type(value) in (int, float, torch.Tensor):
                self.mark(Spot(spot, ATTRIBUTE, name, value), BIND | FLOWS)

    def collection(self, spot: Spot) -> None:
        own = own_of(spot.value)
        for name in _COLLECTION:
            if name in own:
                self.mark(Spot(spot, ATTRIBUTE, name, own[name]), BIND)

    def found(self) -> Found:
        """Places that are marked, and what leads to them."""
        wanted = [bool(entry[3]) for entry in self.table]
        for i in range(len(self.table) - 1, -1, -1):
            parent = self.table[i][0]
            if wanted[i] and parent >= 0:
                wanted[parent] = True
        number: dict[int, int] = {-1: -1}
        places: list[Place] = []
        for i, (parent, kind, key, what, name) in enumerate(self.table):
            if wanted[i]:
                number[i] = len(places)
                places.append((number[parent], kind, key, what, name))
        return tuple(places), tuple(self.streams.values())


def _top(function: types.FunctionType) -> str:
    return str(function.__module__).partition(".")[0]


def _is_elsewhere(frame: Frame, steps: Steps | None) -> bool:
    """Does a function run what it is given in another thread, or later?"""
    if steps is None:
        return False
    last = steps[-1][1] if type(steps[-1]) is tuple else steps[-1]
    owners = frame.resolve(steps[:-1] if len(steps) > 1 else steps)
    return last in _ELSEWHERE or any(is_of_threads(owner.value) for owner in owners)


def _is_locked(function: Any) -> bool:
    """May several threads call it?"""
    while isinstance(function, partial):
        function = function.func
    return isinstance(function, types.MethodType) and has_threads(function.__self__)


def _has_attribute(container: Any, name: str) -> bool:
    """May a container have an attribute that is no item?"""
    if type(container) in CONTAINERS:
        return False
    return name in own_of(container) or in_class(type(container), "__setattr__") is _SETS


def _has_method(value: Any, name: str) -> bool:
    found = undecorated(in_class(value if isinstance(value, type) else type(value), name))
    if isinstance(value, (torch.Tensor, *CONTAINERS)) or is_stream(value):
        return found is not None  # what it does is known by its name
    return isinstance(found, (types.FunctionType, classmethod, staticmethod))


def _is_of_call(value: object) -> bool:
    """Put in the place of a method for the time of a call."""
    return type(value).__module__ == "oomkit._C" and type(value).__name__ == "_Interceptor"


def _is_foreign_code(function: types.FunctionType, library: str) -> bool:
    """Is it passed over? What a module of a library (`library`) does to itself goes with the
    buffers that it has: how far its table of positions reaches."""
    top = _top(function)
    return (top in LIBRARIES and top != library) or is_foreign_function(function)


def places(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], streams: bool, modules: list[Any]
) -> Found | None:
    """Where the step stores, as a table for the engine, and random generators that it calls.

    Args:
        func: the decorated callable, and ``args`` and ``kwargs`` of its call.
        streams: find all generators that its names lead to.
        modules: weak references to those that take part. They may run although the code does not
            show where.
    """
    try:
        return _places(func, args, kwargs, streams, modules)
    except MemoryError:
        raise
    except Exception:
        _log.debug("a step's plain state could not be looked at", exc_info=True)
        return None


def _places(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], streams: bool, modules: list[Any]
) -> Found | None:
    function, bound, named = unwrap(func, args, kwargs)
    if not isinstance(function, types.FunctionType):
        return None
    given = given_to(function, bound, named, args, kwargs)
    found = Places()
    for inner in wrapped(function):
        found.visit(inner, given_to(inner, bound, named, args, kwargs))
    found.run()
    unseen = Frame(function, {})
    for module in filter(None, (ref() for ref in modules)):
        if not _is_bare(module):
            found.module(unseen, whole(module), "forward", _HOOK)
    found.run()
    if streams:
        found.streams.update(streams_of(function, [s.value for s in given.values()]))
    return found.found() if found.table or found.streams else None


def _is_bare(module: torch.nn.Module) -> bool:
    """A layer of torch's without others in it and without hooks: its forward is not read."""
    own = own_of(module)
    kinds = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_defaults")
    forward = method_of(module, "forward")
    is_torchs = forward is not None and _top(forward) == "torch"
    return is_torchs and not any(map(own.get, kinds))


def given_to(
    function: types.FunctionType,
    bound: tuple[Any, ...],
    named: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Spot]:
    """The arguments of the step by name; the batch is the engine's."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    before = len(bound) - len(args)  # those of a partial, and the object of a method
    defaults = function.__defaults__ or ()
    given = {
        name: whole(value, name)
        for name, value in [
            *zip(names[len(names) - len(defaults) :], defaults, strict=False),
            *(function.__kwdefaults__ or {}).items(),
        ]
    }
    for index, (name, value) in enumerate(zip(names, bound, strict=False)):
        own = Spot(None, ARGUMENT, index - before, value, name)
        given[name] = own if index >= before else whole(value, name)
    for name, value in named.items():
        own = Spot(None, KEYWORD, name, value, name)
        given[name] = own if name in kwargs else whole(value, name)
    return {name: spot for name, spot in given.items() if not _is_batch(spot.value)}


def _is_batch(value: object) -> bool:
    """Tensors and containers of tensors are the batch's: rules of their own."""
    if isinstance(value, (list, tuple, dict)):
        inner = islice(dict.values(value) if isinstance(value, dict) else value, ITEMS)
        return any(is_array(v) or isinstance(v, (torch.Tensor, *CONTAINERS)) for v in inner)
    return isinstance(value, torch.Tensor) or is_array(value)
