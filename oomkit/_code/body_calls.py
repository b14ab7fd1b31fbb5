"""Calls in the body of a loop: which of them may be made once more for the same rows."""

from __future__ import annotations

import builtins
import gc
import io
import logging
import time
import types
import warnings
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import nn

from .. import _C
from .body_values import (
    ANY,
    EXIT,
    FRESH,
    ITEM,
    MISSING,
    OWN,
    SHALLOW,
    UNKNOWN,
    Kind,
    Names,
    Place,
    Unreadable,
    Value,
    Walk,
    attribute,
    inside,
    level,
    shown,
    value_of,
)

_CONTAINERS = (MutableSequence, MutableSet, MutableMapping)  # deque and Counter among them
_PLAIN = (int, float, complex, str, bytes, tuple, frozenset, range, slice, torch.Size)
_PLAIN += (torch.dtype, torch.device, type(None))  # type: ignore[assignment]
# Of containers, and the like of others: these change nothing.
_READS = frozenset(
    "get items keys values copy index count union intersection difference issubset isdisjoint"
    " issuperset symmetric_difference most_common elements total __len__ __contains__"
    " __getitem__".split()
)
_HOLDS = frozenset("get items values pop popleft popitem setdefault elements".split())
# In place, but the same the second time.
_REPLACES = frozenset({"copy_", "fill_", "zero_", "requires_grad_"})
_ARRAY_CHANGES = frozenset(
    "fill itemset partition put resize setfield setflags sort byteswap".split()
)
_MODULE_SETS = frozenset(
    "eval train zero_grad requires_grad_ to cpu cuda float half bfloat16 double".split()
)
# These give what the module has.
_MODULE_HAS = frozenset(
    "parameters named_parameters buffers named_buffers state_dict get_parameter get_buffer modules"
    " named_modules children named_children get_submodule".split()
)
_UPDATING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_UPDATES = frozenset({"step", "add_param_group", "load_state_dict"})
# What a value that is not known might be: a list, dictionary, set, queue, file, iterator.
_CHANGES = frozenset(
    "append appendleft extend extendleft insert pop popleft popitem remove discard add clear"
    " update subtract setdefault sort reverse rotate move_to_end send throw write writelines"
    " read readline readlines put put_nowait get_nowait push __next__ __setitem__ __iadd__"
    " __delitem__ difference_update intersection_update symmetric_difference_update".split()
)
_WHOLE = frozenset({"append", "appendleft", "add"})  # or not at all
_PURE = frozenset(
    "abs all any ascii bin bool callable chr dict dir divmod enumerate filter format frozenset"
    " getattr hasattr hash hex id isinstance issubclass iter len list map max min next oct ord"
    " pow range repr reversed round set slice sorted str sum tuple type zip".split()
)
_PICKS = frozenset({"getattr", "max", "min", "next"})
_TOLD = (warnings.warn, gc.collect, time.sleep, torch.manual_seed)  # leave nothing to count
_PURE_MODULES = ("math", "_operator", "operator", "itertools", "cmath", "_bisect", "copy")
_LAZY = Value(Kind.ITER, (), UNKNOWN)
_GENERATES = 0x2A0  # flags of generators and coroutines


def is_used_up(walk: Walk, value: Value) -> bool:
    """An iterator (a file, too) that was there before: who reads it has moved it."""
    if value.kind is not Kind.OUTER:
        return False
    held = value_of(value.path)
    return isinstance(held, Iterator | io.IOBase) and not walk.keeps(value)


def run_code(machine: Place, function: Value, given: list[Value]) -> Value:
    """A function that the body has made runs: what it changes, the body changes."""
    code, captured = function.extra
    if machine.depth >= 3:
        raise Unreadable
    env = dict(captured)
    for n, name in enumerate(code.co_varnames):
        env[name] = given[n] if n < min(code.co_argcount, len(given)) else UNKNOWN
    returned = machine.inner(code, machine.names, env, True)
    return _LAZY if code.co_flags & _GENERATES else returned


def _looked_into(machine: Place, function: Any, given: list[Value]) -> None:
    """Of a function of the program whose result nobody takes: what does it change?"""
    code = function.__code__
    if machine.depth >= 2 or code.co_flags & _GENERATES:
        raise Unreadable
    cells = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        cells[name] = _in_cell(cell)
    names = Names(cells, function.__globals__, builtins)
    env = {}
    for n, name in enumerate(code.co_varnames):
        is_plain = n < code.co_argcount and n < len(given)
        env[name] = given[n] if is_plain else UNKNOWN
    machine.inner(code, names, env, False)


def _in_cell(cell: Any) -> Any:
    found = gc.get_referents(cell)
    return found[0] if found else MISSING


def judge(
    machine: Place,
    callee: Value,
    given: list[Value],
    named: tuple[str, ...] | None,
    is_dropped: bool,
) -> Value:
    """What the call returns; what it may have changed is noted."""
    call = _Call(machine, callee, given, named, is_dropped)
    for value in given:
        if value is not call.by_name.get("out"):
            call.passed(value)
    if callee.kind is Kind.EXIT:
        return UNKNOWN
    if callee.kind is Kind.CODE:
        return run_code(machine, callee, given)
    if callee.kind is Kind.OUTER and callee.path[-1][0] == "attr":
        owner = Value(Kind.OUTER, callee.path[:-1])
        if value_of(callee.path) is MISSING:
            callee = Value(Kind.BOUND, (), (owner, callee.path[-1][1]))
    if callee.kind is Kind.BOUND:
        return call.method(*callee.extra)
    if callee.kind is Kind.OUTER:
        return call.of(value_of(callee.path), shown(callee.path))
    if callee.kind is not Kind.FRESH and (is_dropped or "out" in call.by_name):
        call.changes("()")
    return UNKNOWN


class _Call:
    """One call in the body."""

    def __init__(
        self,
        machine: Place,
        callee: Value,
        given: list[Value],
        named: tuple[str, ...] | None,
        is_dropped: bool,
    ) -> None:
        self.machine, self.given = machine, given
        self.is_dropped, self.is_starred = is_dropped, named is None
        named = named or ()
        first = len(given) - len(named)
        self.by_name = dict(zip(named, given[first:], strict=True)) if named else {}
        inputs = _inputs_of_ufunc(callee)
        if inputs is not None and first > inputs:
            self.by_name["out"] = given[inputs]  # np.add(one, other, out)

    # --- what is noted ---

    def changes(self, name: str, fails: bool = False) -> None:
        self.machine.found(f"`{name}`" if name.endswith(")") else f"`{name}()`", fails)

    def passed(self, value: Value) -> None:
        """A value is given to the call."""
        machine = self.machine
        machine.read(value)
        if value.kind is Kind.CODE:
            run_code(machine, value, [UNKNOWN] * 8)
        elif is_used_up(machine.walk, value):
            self.changes(f"next({shown(value.path)})", fails=True)
        elif value.kind is Kind.OUTER and value.path[-1][0] == "attr":
            owner = Value(Kind.OUTER, value.path[:-1])
            self._passed_method(owner, value.path[-1][1], value_of(value.path))
        elif value.kind is Kind.OUTER:
            self._passed_method(value, "", value_of(value.path))

    def _passed_method(self, owner: Value, name: str, held: Any) -> None:
        if isinstance(held, types.BuiltinMethodType):
            holder, name = held.__self__, held.__name__
        else:
            holder = value_of(owner.path) if name and held is MISSING else MISSING
        if isinstance(holder, _CONTAINERS + (io.IOBase,)) and name not in _READS:
            self.changes(f"{shown(owner.path)}.{name}" if name else shown(owner.path), fails=True)

    # --- methods ---

    def method(self, owner: Value, name: str) -> Value:
        kind = owner.kind
        if kind in OWN or kind is Kind.PART:
            if kind is Kind.PART:
                return ITEM if name in _HOLDS else SHALLOW
            self.machine.walk.mixed |= name not in _READS and level(self.given) is SHALLOW
            return FRESH if kind is not Kind.SHALLOW else UNKNOWN if name in _HOLDS else SHALLOW
        if kind is Kind.OUTER:
            held = value_of(owner.path)
            found = MISSING
            if isinstance(held, types.ModuleType | type):
                found = attribute(held, name)
            text = f"{shown(owner.path)}.{name}"
            if found is not MISSING:
                return self.of(found, text)
            return self.on(owner, held, name, text)
        if kind is Kind.EXIT:
            return UNKNOWN
        if kind is Kind.ITEM and _is_in_place(name):
            return ITEM  # tensors of the batch have versions
        return self._unknown(name, ITEM if kind is Kind.ITEM else UNKNOWN)

    def _unknown(self, name: str, result: Value, text: str = "") -> Value:
        is_flag = name == "requires_grad_"  # the same the second time
        if (self.is_dropped and not is_flag) or name in _CHANGES or _writes(name):
            self.changes(text or f"....{name}", fails=name in _CHANGES - _WHOLE)
        return result

    def on(self, owner: Value, held: Any, name: str, text: str) -> Value:
        """A method of `held`, which was there before."""
        walk = self.machine.walk
        if walk.keeps(owner) or isinstance(held, logging.Logger):
            return UNKNOWN
        if isinstance(held, _PLAIN):
            return SHALLOW
        if isinstance(held, torch.Tensor):
            return self._tensor(owner, name, text)
        if _is_array(held):
            self.machine.read(owner)
            if name in _ARRAY_CHANGES:
                self.changes(text)
            self._out(text)
            return owner
        if isinstance(held, _CONTAINERS):
            return self._container(owner, held, name, text)
        if isinstance(held, Iterator | io.IOBase):
            self.changes(text, fails=True)
            return UNKNOWN
        self.machine.read(owner)
        if isinstance(held, nn.Module):
            if self.is_dropped and name not in _MODULE_SETS:
                self.changes(text)
            return UNKNOWN if name in _MODULE_HAS else FRESH
        if isinstance(held, _UPDATING) and name in _UPDATES:
            self.changes(text)
        if held is MISSING:
            return self._unknown(name, UNKNOWN, text)
        if self.is_dropped:
            self._dropped(held, name, owner, text)
        return UNKNOWN

    def _dropped(self, held: Any, name: str, owner: Value, text: str) -> None:
        method = attribute(held, name)
        if isinstance(method, types.MethodType):
            self._looked_into(method.__func__, [owner, *self.given], text)
        else:
            self.changes(text)

    def _looked_into(self, function: Any, given: list[Value], text: str) -> None:
        try:
            _looked_into(self.machine, function, given)
        except Unreadable:
            self.changes(text)

    def _tensor(self, owner: Value, name: str, text: str) -> Value:
        if name in _REPLACES:
            self.machine.stored(owner.path, ("item", ANY), text + "()")
        elif _is_in_place(name):
            self.changes(text)
        else:
            self.machine.read(owner)
        self._out(text)
        return owner

    def _container(self, owner: Value, held: Any, name: str, text: str) -> Value:
        if name == "setdefault" and len(self.given) == 2 and level(self.given[1:]) is FRESH:
            return inside(owner, "item", ANY)
        if name not in _READS:
            self.changes(text, fails=name not in _WHOLE)
            return UNKNOWN
        self.machine.read(owner)
        return inside(owner, "item", ANY)

    # --- functions ---

    def _out(self, text: str, replaces: bool = True) -> None:
        """out= and inplace= of torch's and numpy's functions; of others nothing is known."""
        out = self.by_name.get("out")
        if out is not None and out.kind not in OWN:
            if out.kind is Kind.OUTER and replaces:
                self.machine.stored(out.path, ("item", ANY), f"{text}(out=...)")
            else:
                self.changes(f"{text}(out=...)")
        if "inplace" in self.by_name and any(v.kind is Kind.OUTER for v in self.given):
            self.changes(f"{text}(inplace=...)")

    def of(self, held: Any, text: str) -> Value:
        """A call of `held`, which was there before."""
        home = _home(held)
        self._out(text, home in ("torch", "numpy"))
        if self.machine.walk.is_kept(held):
            return UNKNOWN
        if isinstance(held, types.BuiltinMethodType) and not isinstance(
            held.__self__, types.ModuleType | type(None) | type
        ):
            return self._bound(held.__self__, held.__name__, text)
        if isinstance(held, types.MethodType):
            return self._bound(held.__self__, held.__func__.__name__, text)
        if isinstance(held, type):
            return level(self.given)
        if held is print:
            if "file" in self.by_name or self.is_starred:
                self.changes(f"{text}(file=...)")
            return FRESH
        if any(held is one for one in _TOLD):
            return UNKNOWN
        if home == "logging":
            return EXIT
        if home == "torch" or isinstance(held, nn.Module):
            return self._of_torch(held, text)
        if isinstance(held, types.BuiltinFunctionType):
            return self._builtin(held, home, text)
        if self.is_dropped:
            if isinstance(held, types.FunctionType):
                self._looked_into(held, self.given, text)
            elif not isinstance(held, _C.Step):
                self.changes(text)
        return FRESH if isinstance(held, _C.Step) else UNKNOWN

    def _bound(self, owner: Any, name: str, text: str) -> Value:
        """A bound method that was made before."""
        names = Names({"owner": owner}, {}, builtins)
        return self.on(Value(Kind.OUTER, ((names, "owner"),)), owner, name, text)

    def _of_torch(self, held: Any, text: str) -> Value:
        out = self.by_name.get("out")
        given = [v for v in self.given if v.kind is Kind.OUTER and v is not out]
        changed = [v for v in given if _is_memory(value_of(v.path))]
        name = str(getattr(held, "__name__", ""))
        if _is_in_place(name) and (given or (name[:1] == "_" and level(self.given) is not FRESH)):
            self.changes(text)
        if self.is_dropped and (isinstance(held, nn.Module) or given):
            self.changes(text)
        return UNKNOWN if changed and not isinstance(held, nn.Module) else FRESH

    def _builtin(self, held: Any, home: str, text: str) -> Value:
        name = held.__name__
        if home == "builtins" and name in _PICKS and level(self.given) is not FRESH:
            return UNKNOWN  # one of the things in it
        if home == "builtins" and name in _PURE or home in _PURE_MODULES and name[:1] != "i":
            if name in ("setitem", "delitem", "insort_left", "insort_right"):
                self.changes(text)
            return level(self.given)
        given = [v for v in self.given if v.kind in (Kind.OUTER, Kind.UNKNOWN)]
        if any(not isinstance(value_of(v.path), _PLAIN) for v in given):
            self.changes(text, fails=True)
        elif self.is_dropped:
            self.changes(text)
        return UNKNOWN


def _inputs_of_ufunc(callee: Value) -> int | None:
    """How many arguments of an element-wise function of numpy's are not what it writes to."""
    held = value_of(callee.path)
    if callee.kind is Kind.BOUND:
        owner = value_of(callee.extra[0].path)
        held = attribute(owner, callee.extra[1]) if isinstance(owner, types.ModuleType) else None
    return int(held.nargs - held.nout) if type(held).__name__ == "ufunc" else None


def _home(held: Any) -> str:
    """The package that a callable is from."""
    module = getattr(held, "__module__", None) or type(held).__module__
    return str(module).partition(".")[0]


def _is_array(held: Any) -> bool:
    return type(held).__module__ == "numpy" and hasattr(held, "dtype")


def _writes(name: str) -> bool:
    return _is_in_place(name) and name != "requires_grad_"


def _is_memory(held: Any) -> bool:
    return isinstance(held, torch.Tensor) or _is_array(held)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and (not name.startswith("_") or name.startswith("_foreach_"))
