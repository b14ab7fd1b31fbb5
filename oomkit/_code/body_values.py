"""Where the values of a loop's body come from: made by the body, or there before it.

No code of the program is run for it: names, attributes and items are looked up as they lie in
dictionaries, slots and lists.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from enum import IntEnum
from types import CodeType
from typing import Any, NamedTuple

from torch import nn


class Kind(IntEnum):
    CONST = 0  # `extra` is it
    FRESH = 1  # made in the body, and so is what is in it
    SHALLOW = 2  # made in the body; what is in it may have been there before
    PART = 3  # the part that the loop has handed out
    ITEM = 4  # something in it
    OUTER = 5  # what `path` led to before the body
    UNKNOWN = 6
    CODE = 7  # a function made in the body; `extra` is its code
    BOUND = 8  # the method extra[1] of the value extra[0]
    ITER = 9  # an iterator of values like `extra`
    EXIT = 10  # what a `with` statement calls, and a logger
    NULL = 11


class Value(NamedTuple):
    kind: Kind
    path: tuple[Any, ...] = ()
    extra: Any = None


FRESH, SHALLOW, PART = Value(Kind.FRESH), Value(Kind.SHALLOW), Value(Kind.PART)
ITEM, UNKNOWN, NULL = Value(Kind.ITEM), Value(Kind.UNKNOWN), Value(Kind.NULL)
EXIT = Value(Kind.EXIT)
OWN = (Kind.CONST, Kind.FRESH, Kind.SHALLOW, Kind.ITER)
MISSING = object()
ANY = object()  # a key that is not known
_LONGEST = 8  # path
_OFTEN = 24  # that one instruction is looked at


class Unreadable(Exception):
    """The code has something that is not known here."""


class Names:
    """What the names of a function stand for when it is looked at."""

    def __init__(self, own: Any, others: dict[str, Any], built_in: Any) -> None:
        self.own, self.others = own, others
        self.built_in = built_in if isinstance(built_in, dict) else vars(built_in)

    def get(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        return self.others.get(name, self.built_in.get(name, MISSING))


def attribute(owner: Any, name: str) -> Any:
    """An attribute, without running code of the program; else MISSING."""
    mine = getattr(owner, "__dict__", None)
    if isinstance(mine, dict) or isinstance(owner, type):
        if isinstance(mine, dict) and name in mine:
            return mine[name]
        for table in ("_modules", "_parameters", "_buffers"):
            if isinstance(owner, nn.Module) and name in mine.get(table, ()):  # type: ignore[union-attr]
                return mine[table][name]  # type: ignore[index]
    found = inspect.getattr_static(owner, name, MISSING)
    if isinstance(found, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(found, owner)
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    if isinstance(found, types.MemberDescriptorType):
        return found.__get__(owner)
    return MISSING if hasattr(type(found), "__get__") and _computes(found) else found


def _computes(found: Any) -> bool:
    return not isinstance(found, types.FunctionType | types.BuiltinFunctionType)


def value_of(path: tuple[Any, ...]) -> Any:
    """What a path leads to now; MISSING where that cannot be known."""
    if not path:
        return MISSING
    names, name = path[0]
    value = names.get(name)
    for by, key in path[1:]:
        if value is MISSING or key is ANY:
            return MISSING
        if by == "attr":
            value = attribute(value, key)
        elif isinstance(value, dict):
            value = dict.get(value, key, MISSING)
        elif isinstance(value, list | tuple) and isinstance(key, int):
            value = value[key] if -len(value) <= key < len(value) else MISSING
        else:
            value = MISSING
    return value


def shown(path: tuple[Any, ...]) -> str:
    text = str(path[0][1])
    for by, key in path[1:]:
        text += f".{key}" if by == "attr" else "[...]" if key is ANY else f"[{key!r}]"
    return text


def item(value: Value, mixed: bool) -> Value:
    """One of the things in a value."""
    kind = value.kind
    if kind is Kind.ITER:
        return value.extra  # type: ignore[no-any-return]
    if kind is Kind.OUTER:
        return inside(value, "item", ANY)
    if kind in (Kind.PART, Kind.ITEM):
        return ITEM
    return FRESH if kind is Kind.CONST or (kind is Kind.FRESH and not mixed) else UNKNOWN


def inside(value: Value, by: str, key: Any) -> Value:
    if value.kind is Kind.OUTER:
        if len(value.path) >= _LONGEST:
            return UNKNOWN
        return Value(Kind.OUTER, (*value.path, (by, key)))
    return FRESH if value.kind in (Kind.CONST, Kind.FRESH) else UNKNOWN


def key_of(value: Value, env: dict[str, Value]) -> Any:
    """The constant that a key is, or what the name of it stands for; else ANY."""
    key = value.extra if value.kind is Kind.CONST else MISSING
    if value.kind is Kind.OUTER:
        key = value_of(value.path)
    return key if isinstance(key, str | int | float | bool | type(None)) else ANY


def merged(one: Value, other: Value) -> Value:
    if one == other:
        return one
    if one.kind is other.kind is Kind.ITER:
        return Value(Kind.ITER, (), merged(one.extra, other.extra))
    if one.kind is other.kind is Kind.BOUND and one.extra[1] == other.extra[1]:
        return Value(Kind.BOUND, (), (merged(one.extra[0], other.extra[0]), one.extra[1]))
    if one.kind in OWN and other.kind in OWN and Kind.ITER not in (one.kind, other.kind):
        return FRESH if max(one.kind, other.kind) < Kind.SHALLOW else SHALLOW
    if {one.kind, other.kind} == {Kind.PART, Kind.ITEM}:
        return ITEM
    if Kind.OUTER in (one.kind, other.kind) and one.kind is not other.kind:
        return one if one.kind is Kind.OUTER else other
    return UNKNOWN


class Found(NamedTuple):
    """A change of something that was there before the body."""

    at: int  # which instruction
    what: str
    line: int | None
    is_partial: bool = False  # the instruction may have made it though it failed


class Store(NamedTuple):
    """Something is replaced by something else: harmless unless the body has read it."""

    at: int
    where: tuple[Any, ...]  # of the container; a name's is empty
    key: Any
    what: str
    line: int | None


class State(NamedTuple):
    stack: list[Value]
    env: dict[str, Value]  # names that the body has set


_STACK_ONLY = frozenset(
    "NOP CACHE RESUME EXTENDED_ARG PRECALL KW_NAMES MAKE_CELL COPY_FREE_VARS JUMP_FORWARD"
    " JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP JUMP_NO_INTERRUPT NOT_TAKEN"
    " SETUP_ANNOTATIONS".split()
)
# Operations that take values, change none, and push as many as their effect says, at most one.
_PLAIN = frozenset(
    "UNARY_POSITIVE UNARY_NEGATIVE UNARY_NOT UNARY_INVERT BUILD_TUPLE BUILD_LIST BUILD_SET"
    " BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING BUILD_SLICE COMPARE_OP IS_OP CONTAINS_OP"
    " FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE LIST_TO_TUPLE TO_BOOL"
    " BUILD_INTERPOLATION BUILD_TEMPLATE LOAD_ASSERTION_ERROR LOAD_COMMON_CONSTANT"
    " LOAD_BUILD_CLASS IMPORT_NAME IMPORT_FROM GET_LEN MATCH_MAPPING MATCH_SEQUENCE MATCH_KEYS"
    " MATCH_CLASS CHECK_EXC_MATCH CHECK_EG_MATCH PUSH_EXC_INFO CALL_INTRINSIC_1"
    " CALL_INTRINSIC_2 GET_AWAITABLE GET_AITER GET_ANEXT SEND END_SEND".split()
)
_TAKES = frozenset(
    "POP_TOP POP_EXCEPT RETURN_VALUE RAISE_VARARGS RERAISE END_FOR POP_ITER END_ASYNC_FOR"
    " PREP_RERAISE_STAR CLEANUP_THROW".split()
)
_ENDS = frozenset("RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE WITH_EXCEPT_START".split())
_GOES = frozenset(
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP JUMP_NO_INTERRUPT".split()
)


def level(values: list[Value]) -> Value:
    return FRESH if all(v.kind in (Kind.CONST, Kind.FRESH) for v in values) else SHALLOW


class Code:
    """A function's instructions, and where each of them may go on."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        self.places = {i.offset: n for n, i in enumerate(self.instructions)}
        self.lines: list[int | None] = []
        line: int | None = code.co_firstlineno
        for i in self.instructions:
            line = i.positions.lineno if i.positions and i.positions.lineno else line
            self.lines.append(line)
        self.handlers = [
            (e.start, e.end, self.places[e.target], e.depth, int(e.lasti))
            for e in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        ]

    def handlers_of(self, at: int) -> Iterator[tuple[int, int, int]]:
        offset = self.instructions[at].offset
        for start, end, target, depth, lasti in self.handlers:
            if start <= offset < end:
                yield target, depth, lasti

    def goes_on(self, at: int) -> list[tuple[int, bool]]:
        """(which instruction, by a jump?)"""
        i = self.instructions[at]
        ways: list[tuple[int, bool]] = []
        if i.opname not in _ENDS and i.opname not in _GOES:
            ways.append((at + 1, False))
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            ways.append((self.places[i.argval], True))
        return [w for w in ways if w[0] < len(self.instructions)]

    def depth_at(self, wanted: int) -> int:
        """How many values are on the stack before an instruction."""
        depths, todo = {0: 0}, [0]
        while todo:
            at = todo.pop()
            i = self.instructions[at]
            for to, jumps in self.goes_on(at):
                effect = dis.stack_effect(i.opcode, i.arg, jump=jumps)
                if to not in depths:
                    depths[to] = max(0, depths[at] + effect)
                    todo.append(to)
            for to, depth, lasti in self.handlers_of(at):
                if to not in depths:
                    depths[to] = depth + lasti + 1
                    todo.append(to)
        if wanted not in depths:
            raise Unreadable
        return depths[wanted]


class Walk:
    """All that was found in a body, over the functions that it calls."""

    def __init__(self, kept: tuple[Any, ...], mixed: bool = False) -> None:
        self.kept = kept  # what goes back with a part, and the batch itself
        self.mixed = mixed  # something that was there is put into what the body made
        self.found: set[Found] = set()
        self.stores: set[Store] = set()
        self.reads: set[tuple[Any, ...]] = set()

    def is_kept(self, value: Any) -> bool:
        return any(value is one for one in self.kept)

    def keeps(self, value: Value) -> bool:
        """Does what `value` leads to go back, by itself or with what it is a part of?"""
        if self.is_kept(value_of(value.path)):
            return True
        owners = (value_of(value.path[:n]) for n in range(1, len(value.path)))
        return any(self.is_kept(o) and hasattr(type(o), "load_state_dict") for o in owners)


class Place:
    """Where in the body, or in a function that it calls, the walk is."""

    def __init__(
        self, walk: Walk, code: Code, names: Names, within: Place | None, is_inline: bool
    ) -> None:
        self.walk, self.code, self.names = walk, code, names
        # a function that the body calls: all is said of the call
        self.place = -1 if within is None else within.here
        self.depth: int = 0 if within is None else within.depth + 1
        # of code of the body itself it matters, too, what it did before it failed
        self.is_inline: bool = is_inline and (within is None or within.is_inline)
        self.at = 0

    def inner(self, code: CodeType, names: Names, env: dict[str, Value], is_inline: bool) -> Value:
        """Walks a function that is called here. What it returns."""
        raise NotImplementedError  # where code is walked: body.py, which has this file under it

    @property
    def line(self) -> int | None:
        return self.code.lines[self.at]

    @property
    def here(self) -> int:
        return self.at if self.place < 0 else self.place

    def found(self, what: str, fails: bool = False) -> None:
        """`what` changes something. `fails`: it may have done so when it failed, too."""
        self.walk.found.add(Found(self.here, what, self.line))
        if self.is_inline and (fails or self.place >= 0):
            self.walk.found.add(Found(self.here, what, self.line, True))

    def stored(self, where: tuple[Any, ...], key: Any, what: str) -> None:
        self.walk.stores.add(Store(self.here, where, key, what, self.line))

    def read(self, value: Value) -> None:
        """The body looks at what is in `value`."""
        if value.kind is Kind.OUTER:
            self.walk.reads.add(value.path)
        elif value.kind is Kind.BOUND:
            self.read(value.extra[0])
