"""Side effects that the code of a function shows: stores, deletes and ``next()``.

The instructions are followed in order with a stack of names, so that ``self.a.b += 1`` is
known to be an attribute of ``self``. What is not recognised is unknown, and not reported.
"""

from __future__ import annotations

import dis
import itertools
import sys
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Steps = tuple[Any, ...]  # a name, then (".", attribute) or ("[", key); ANY for any key
ANY = "..."
SUPER = "super()"


class Symbol(NamedTuple):
    """What an entry of the stack is known to be."""

    path: str
    kind: str  # "argument", "outer" (global or closure), "inner" (of either), "constant"
    steps: Steps = ()  # how it is reached; of a constant its value alone


@dataclass
class Effect:
    """One side effect: what the code changes, and where."""

    what: str
    path: str
    line: int
    function: str
    own: bool = True  # of the step itself, not of a function that it calls


Stack = list[Symbol | None]

_CONSTANT = Symbol("", "constant")
_NULL_ABOVE = sys.version_info >= (3, 13)  # what is called, or the NULL beside it
_SUPER = Symbol(SUPER, "inner", (SUPER,))
# Attributes whose assignment has rules of its own, or changes nothing that is kept.
_HANDLED = frozenset({"grad", "requires_grad", "training", "data"})
_NO_RESULT = frozenset({"POP_TOP", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "END_FOR"})
_DEAD = frozenset(
    {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE"}
    | {"RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
)


def is_augmented(i: dis.Instruction | None) -> bool:
    """a += b, in which a list or a tensor stays the same object."""
    return (
        i is not None
        and i.opname == "BINARY_OP"
        and i.argrepr.endswith("=")
        and i.argrepr not in ("==", "!=")
    )


class Reader:
    follows_augmented = False
    """Is what is augmented what it was before?"""

    def __init__(self, function: types.FunctionType, given: dict[str, Any]) -> None:
        self.function, self.given = function, given
        code = function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        self.arguments = set(code.co_varnames[:count])
        self.free = set(code.co_freevars)
        self.effects: list[Effect] = []
        self.methods: dict[bool, set[str]] = {False: set(), True: set()}  # by "of super()"
        self.super_of = "__class__"
        self.line = 0
        self.passed: dict[types.CodeType, dict[str, Symbol]] = {}  # to comprehensions

    # --- one function ---

    def read(self, code: types.CodeType, nested: bool = False) -> None:
        self.nested = nested
        self.names = dict(self.passed.get(code, {}))  # what locals are other names of
        instructions = list(dis.get_instructions(code))
        self.rebound: set[str] = set()  # arguments that are not what was given any more
        self.stack: Stack = []
        waiting: dict[int, tuple[Stack, dict[str, Symbol], set[str]]] = {}  # after a jump
        dead = False
        for earlier, instruction in itertools.pairwise([None, *instructions]):
            assert instruction is not None
            if instruction.offset in waiting:
                stack, names, rebound = waiting.pop(instruction.offset)
                self.merge(stack, dead)
                self.merge_names(names, rebound)
                self.rebound = rebound if dead else self.rebound & rebound
                dead = False
            if instruction.positions is not None and instruction.positions.lineno:
                self.line = instruction.positions.lineno
            before = list(self.stack)
            self.step(instruction)
            self.rebind(earlier, instruction)
            if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
                after, self.stack = self.stack, before
                self.generic(instruction, True)
                after_it = self.stack, dict(self.names), set(self.rebound)
                waiting.setdefault(instruction.argval, after_it)
                self.stack = after
            dead = instruction.opname in _DEAD
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self.read(inner, True)

    def rebind(self, earlier: dis.Instruction | None, i: dis.Instruction) -> None:
        if i.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            if not (self.follows_augmented and is_augmented(earlier)):
                stores = _variables(i.opname, i.argval)
                self.rebound.update(name for part, name in stores if part == "STORE")

    def merge(self, other: Stack, dead: bool) -> None:
        if dead or len(other) != len(self.stack):
            self.stack = list(other)
        else:
            both = zip(self.stack, other, strict=True)
            self.stack = [a if a == b else self.either(a, b) for a, b in both]

    def either(self, one: Symbol | None, other: Symbol | None) -> Symbol | None:
        """What comes out of two branches."""
        return None

    def merge_names(self, other: dict[str, Symbol], rebound: set[str]) -> None:
        """What locals are other names of where two branches meet: as in the later one."""

    def pop(self, count: int = 1) -> Stack:
        taken = self.stack[max(0, len(self.stack) - count) :]
        del self.stack[max(0, len(self.stack) - count) :]
        return [None] * (count - len(taken)) + taken

    def generic(self, instruction: dis.Instruction, jump: bool = False) -> None:
        """Only the depth of the stack is known."""
        argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        try:
            effect = dis.stack_effect(instruction.opcode, argument, jump=jump)
        except ValueError:
            effect = 0
        name = instruction.opname
        if effect < 0:
            self.pop(-effect)
        quiet = name in _NO_RESULT or name.startswith(("POP_JUMP", "STORE_", "DELETE_", "JUMP"))
        if effect <= 0 and not quiet and self.stack and _has_result(name):
            self.stack[-1] = None
        self.stack.extend([None] * max(0, effect))

    # --- one instruction ---

    def step(self, instruction: dis.Instruction) -> None:
        name, value = instruction.opname, instruction.argval
        special = getattr(self, "do_" + name.lower(), None)
        if special is not None:
            special(instruction)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"):
            self.stack.append(Symbol(repr(value), "constant", (value,)))
        elif name.startswith(("LOAD_FAST", "STORE_FAST")):
            self.fast(name, value)
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            self.stack.append(self.variable(value))
        elif name in ("STORE_GLOBAL", "STORE_DEREF"):
            self.store_name(name, value)
        elif name in ("DELETE_GLOBAL", "DELETE_DEREF"):
            if name == "DELETE_GLOBAL" or value in self.free:
                self.add(f"del {value}", value)
        else:
            self.generic(instruction)

    def variable(self, name: str) -> Symbol | None:
        if name in self.names:
            return self.names[name]
        if name in self.free:
            return Symbol(name, "outer", (name,))
        return self.argument(name, set() if self.nested else self.rebound)

    def argument(self, name: str, rebound: set[str]) -> Symbol | None:
        given = name in self.arguments and name not in rebound
        return Symbol(name, "argument", (name,)) if given else None

    def fast(self, opname: str, names: Any) -> None:
        for part, name in _variables(opname, names):
            if part == "LOAD":
                self.stack.append(
                    None if self.nested and name not in self.names else self.variable(name)
                )
            else:
                self.bind(name, self.pop()[0])

    def bind(self, name: str, value: Symbol | None) -> None:
        self.names.pop(name, None)
        if value is not None and value.kind in ("outer", "inner"):
            self.names[name] = value

    def do_load_global(self, instruction: dis.Instruction) -> None:
        symbol = Symbol(instruction.argval, "outer", (instruction.argval,))
        calls = instruction.arg is not None and instruction.arg & 1
        if calls and not _NULL_ABOVE:
            self.stack.append(None)
        self.stack.append(symbol)
        if calls and _NULL_ABOVE:
            self.stack.append(None)

    def do_load_attr(self, instruction: dis.Instruction) -> None:
        owner, name = self.pop()[0], instruction.argval
        self.methods[owner is not None and owner.path == SUPER].add(name)
        self.stack.append(self.inner(owner, f".{name}", (".", name)))
        method = instruction.opname == "LOAD_METHOD" or (
            dis.stack_effect(instruction.opcode, instruction.arg) > 0
        )
        if method:
            self.stack.append(None)

    do_load_method = do_load_attr

    def do_load_super_attr(self, instruction: dis.Instruction) -> None:
        """3.12: super().name in one instruction."""
        self.pop(3)
        self.stack.append(_SUPER)
        self.do_load_attr(instruction)
        if len(self.stack) and (instruction.arg or 0) & 1 and self.stack[-1] is not None:
            self.stack.append(None)

    def inner(self, owner: Symbol | None, key: str, step: Any) -> Symbol | None:
        if owner is None or owner.kind == "constant":
            return None
        return Symbol(owner.path + key, "inner", (*owner.steps, step))

    def item_of(self, owner: Symbol | None, key: Symbol | None) -> Symbol | None:
        known = key is not None and key.kind == "constant"
        path = f"[{key.path if key else ANY}]"
        return self.inner(owner, path, ("[", key.steps[0] if known and key else ANY))

    def do_binary_subscr(self, _: dis.Instruction) -> None:
        owner, key = self.pop(2)
        self.stack.append(self.item_of(owner, key))

    def do_binary_op(self, instruction: dis.Instruction) -> None:
        if instruction.argrepr == "[]":
            self.do_binary_subscr(instruction)
        else:
            self.pop(2)
            self.stack.append(None)

    def do_copy(self, instruction: dis.Instruction) -> None:
        at = instruction.arg or 1
        self.stack.append(self.stack[-at] if len(self.stack) >= at else None)

    def do_swap(self, instruction: dis.Instruction) -> None:
        at = instruction.arg or 2
        taken = self.pop(at)
        taken[0], taken[-1] = taken[-1], taken[0]
        self.stack.extend(taken)

    def do_precall(self, _: dis.Instruction) -> None:
        return None  # 3.11: the CALL after it takes the arguments

    def do_call(self, instruction: dis.Instruction) -> None:
        count = instruction.arg or 0
        taken = self.pop(count + 2)
        called = {s.path for s in taken[:2] if s is not None and s.kind == "outer"}
        if called == {"super"}:
            if count and taken[2] is not None:
                self.super_of = taken[2].path
            self.stack.append(_SUPER)
            return
        if "next" in called and count and "next" not in self.function.__globals__:
            source = taken[2]
            if source is not None and source.kind != "constant":
                self.add(f"next({source.path})", source.path)
        self.stack.append(None)

    # --- effects ---

    def store_name(self, opname: str, name: str) -> None:
        value = self.pop()[0]
        if opname == "STORE_DEREF" and name not in self.free:
            self.bind(name, value)
        elif value is None or value.kind != "constant":
            self.add(name, name)

    def do_store_attr(self, instruction: dis.Instruction) -> None:
        value, owner = self.pop(2)
        self.attribute(owner, instruction.argval, value, "")

    def do_delete_attr(self, instruction: dis.Instruction) -> None:
        self.attribute(self.pop()[0], instruction.argval, None, "del ")

    def attribute(self, owner: Symbol | None, name: str, value: Symbol | None, do: str) -> None:
        if owner is None or owner.kind == "constant" or name in _HANDLED:
            return
        if value is not None and value.kind == "constant":
            return  # the same in every micro-batch
        if not _has_rules(self.resolve(owner.path), name):
            self.add(f"{do}{owner.path}.{name}", f"{owner.path}.{name}")

    def do_store_subscr(self, _: dis.Instruction) -> None:
        value, owner, key = self.pop(3)
        if value is None or value.kind != "constant":
            self.item(owner, key, "")

    def do_delete_subscr(self, _: dis.Instruction) -> None:
        owner, key = self.pop(2)
        self.item(owner, key, "del ")

    def item(self, owner: Symbol | None, key: Symbol | None, do: str) -> None:
        if owner is None or owner.kind == "constant":
            return
        if owner.kind == "argument" and owner.path not in self.given:
            return  # the batch, which has rules of its own
        path = f"{owner.path}[{key.path if key else '...'}]"
        if "param_groups" not in path and not isinstance(self.resolve(owner.path), torch.Tensor):
            self.add(do + path, path)

    def resolve(self, path: str) -> Any:
        """The object at a path of plain attributes, or None. Runs no property."""
        name, *attributes = path.split(".")
        value = self.given.get(name, self.function.__globals__.get(name))
        cells = self.function.__closure__ or ()
        for free, cell in zip(self.function.__code__.co_freevars, cells, strict=False):
            if free == name:
                try:
                    value = cell.cell_contents
                except ValueError:
                    return None
        for attribute in attributes:
            own = getattr(value, "__dict__", {})
            parts = own.get("_modules", {}) if isinstance(value, torch.nn.Module) else {}
            value = own.get(attribute, parts.get(attribute))
        return value

    def add(self, what: str, path: str) -> None:
        self.effects.append(Effect(what, path, self.line, self.function.__name__))


def _variables(opname: str, names: Any) -> list[tuple[str, str]]:
    """What LOAD_FAST, STORE_FAST and the pairs of them in newer releases do, in order."""
    parts = [part for part in opname.split("_") if part in ("LOAD", "STORE")]
    return list(zip(parts, names if isinstance(names, tuple) else (names,), strict=False))


def _has_result(name: str) -> bool:
    return name not in ("NOP", "RESUME", "CACHE", "PRECALL", "KW_NAMES", "MAKE_CELL", "PUSH_NULL")


def _has_rules(owner: object, name: str) -> bool:
    """Tensors, optimizers, and what a module knows as its own are compared elsewhere."""
    if isinstance(owner, (torch.Tensor, torch.optim.Optimizer)):
        return True
    return isinstance(owner, torch.nn.Module) and any(
        name in getattr(owner, part) for part in ("_parameters", "_buffers", "_modules")
    )


def effects_of(function: types.FunctionType, given: dict[str, Any]) -> list[Effect]:
    """The side effects that a function's code shows, each once, in order.

    Args:
        function: the function; functions inside it are read too.
        given: its arguments by name, as far as they are objects of the user's own.
    """
    reader = Reader(function, given)
    reader.read(function.__code__)
    seen: dict[tuple[str, int], Effect] = {}
    for effect in reader.effects:
        seen.setdefault((effect.what, effect.line), effect)
    return list(seen.values())


def attributes_of(code: types.CodeType, name: str) -> list[str]:
    """The attributes that are read of a variable itself: of ``self.model.train()`` the model."""
    found: dict[str, None] = {}
    owner = None
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if owner == name:
                found[str(value)] = None
            owner = None
        elif operation.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
            owner = value[-1] if isinstance(value, tuple) else value
        elif operation not in ("CACHE", "EXTENDED_ARG"):
            owner = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(attributes_of(inner, name)))
    return list(found)


def methods_of(function: types.FunctionType) -> tuple[set[str], set[str], type | None]:
    """Attributes that a function's code reads: of ``super()`` (with the class whose it is),
    and of anything else."""
    reader = Reader(function, {})
    reader.read(function.__code__)
    kind = reader.resolve(reader.super_of) if reader.methods[True] else None
    return reader.methods[True], reader.methods[False], kind if isinstance(kind, type) else None
