"""What the code of a function does to what its names lead to: stores, fills and calls.

Nothing here looks at an object: one code object is read once for all of its functions. What
the stores and calls mean is found out in ``_plain_state``.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .bytecode import ANY, SUPER, Reader, Steps, Symbol, is_augmented

STORE, FILL, CALL = "store", "fill", "call"
_KNOWN: dict[int, tuple[weakref.ref[types.CodeType], Uses]] = {}
_CODES = 1000  # remembered
# Methods whose result leads to what their object holds, and functions that pass it on.
_LEADS = frozenset({"items", "values", "get", "setdefault", "pop", "popitem", "popleft"})
_PASSES = frozenset({"enumerate", "reversed", "list", "tuple", "iter", "sorted"})
_PICKS = frozenset({"min", "max", "next"})
_RESULTS = _PASSES | _PICKS | {"getattr", "globals", "type", "zip"}
# Kinds of symbols whose steps are those of what is looped over at once: zip(), enumerate(zip()).
ZIP, COUNTED = "zip", "counted"
_ZIPPED = (ZIP, COUNTED)
GLOBALS = "globals"
# The step from what is called to what it returns; its key: the method's name or "", arguments.
RETURNED = "()"
GOT = ("get",)  # the key of what get() gives out of a dictionary, or an object of the program
_CALLS = 2  # in one path
_DICT = (".", "__dict__")
_SLICE = Symbol("slice", "constant", (ANY,))
# The code of a function that is called where it is made.
CODE = "code"
_COMPREHENSIONS = frozenset({"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
# Names that end like those of torch's functions that write in place, and write to gradients
# or flags only.
NEUTRAL = frozenset({"clip_grad_norm_", "clip_grad_value_", "requires_grad_", "unscale_"})


class _Built(tuple[Symbol | None, ...]):
    """The items of a tuple or list that the code makes; None for those that are not known."""


class Either(tuple[Steps, ...]):
    """The only step of what is one of several paths."""


_ALTERNATIVES = 8


def _paths(symbol: Symbol | None) -> tuple[Steps, ...]:
    if symbol is None or symbol.kind == "constant" or symbol.kind in _ZIPPED:
        return ()
    return symbol.steps[0] if isinstance(symbol.steps[0], Either) else (symbol.steps,)


def _one_of(symbols: Iterable[Symbol | None]) -> Symbol | None:
    paths = dict.fromkeys(path for symbol in symbols for path in _paths(symbol))
    if not paths or len(paths) > _ALTERNATIVES:
        return None
    return Symbol("", "inner", next(iter(paths)) if len(paths) == 1 else (Either(paths),))


def calls_in(steps: Steps) -> int:
    """How many calls lie on a path."""
    if isinstance(steps[0], Either):
        return max(map(calls_in, steps[0]))
    return sum(type(step) is tuple and step[0] == RETURNED for step in steps)


def is_unnamed(symbol: Symbol | None) -> bool:
    """May it be something that no name of the program leads to?"""
    return symbol is None or (symbol.kind != "constant" and calls_in(symbol.steps) > 0)


def _built(symbol: Symbol | None) -> _Built | None:
    value = symbol.steps[0] if symbol is not None and symbol.kind == "constant" else None
    return value if isinstance(value, _Built) else None


def items_of(arguments: Iterable[Symbol | None]) -> Iterator[Symbol | None]:
    """What is passed to a call, also in a tuple or a list that is made for it."""
    for symbol in arguments:
        items = _built(symbol)
        if items is None:
            yield symbol
        else:
            yield from items_of(items)


class Use(NamedTuple):
    """One store, fill or call, in the order of the code."""

    kind: str
    place: Steps | None  # what is stored to, filled or called; None: a local
    arguments: tuple[Symbol | None, ...] = ()
    names: tuple[str, ...] = ()  # of the last arguments


class Uses(NamedTuple):
    """What one code object shows."""

    uses: tuple[Use, ...]
    loads: tuple[Steps, ...]  # everything that the code comes to by names
    returns: tuple[Steps, ...]
    fills_locals: bool  # something that is no name was written to in place


def writes(name: str) -> bool:
    """Is it called like one of torch's functions that write in place?"""
    return name.endswith("_") and not name.endswith("__") and name not in NEUTRAL


class _Uses(Reader):
    """Follows the stack as the reader of effects does, and notes all of it."""

    follows_augmented = True

    def __init__(self, code: types.CodeType) -> None:
        super().__init__(types.FunctionType(code, {}, None, None, _cells(code)), {})
        self.uses: list[Use] = []
        self.loads: dict[Steps, None] = {}
        self.returns: dict[Steps, None] = {}
        self.keywords: tuple[str, ...] = ()
        self.fills_locals = False
        self.read(code)

    def read(self, code: types.CodeType, nested: bool = False) -> None:
        self.code = code
        super().read(code, nested)

    def note(self, kind: str, place: Symbol | None, *rest: Any) -> None:
        paths = _paths(place)
        for steps in paths or ((None,) if kind == CALL else ()):
            self.uses.append(Use(kind, steps, *rest))

    def generic(self, instruction: dis.Instruction, jump: bool = False) -> None:
        if instruction.opname == "FOR_ITER" and not jump and self.stack:
            self.stack.append(self.stack[-1])  # what is iterated over leads to its items
            return
        super().generic(instruction, jump)

    def variable(self, name: str) -> Symbol | None:
        symbol = super().variable(name)
        return self.load(symbol)

    def load(self, symbol: Symbol | None) -> Symbol | None:
        for path in _paths(symbol):
            if not calls_in(path):
                self.loads.setdefault(path)
        return symbol

    def either(self, one: Symbol | None, other: Symbol | None) -> Symbol | None:
        return None if one is None or other is None else _one_of([one, other])

    def merge_names(self, other: dict[str, Symbol], rebound: set[str]) -> None:
        for name in self.names.keys() | other.keys():
            one = self.names.get(name) or self.argument(name, self.rebound)
            two = other.get(name) or self.argument(name, rebound)
            if one is not None and two is not None and one != two:
                self.names[name] = _one_of([one, two]) or one

    def do_load_global(self, instruction: dis.Instruction) -> None:
        super().do_load_global(instruction)
        self.load(Symbol(instruction.argval, "outer", (instruction.argval,)))

    def inner(self, owner: Symbol | None, key: str, step: Any) -> Symbol | None:
        if owner is None or owner.kind == "constant" or owner.kind in _ZIPPED:
            return None
        return self.load(_one_of(Symbol("", "inner", (*path, step)) for path in _paths(owner)))

    def bind(self, name: str, value: Symbol | None) -> None:
        self.names.pop(name, None)
        if (items := _built(value)) is not None:
            value = Symbol("", "constant", (_Built((*items, None)),))  # it may get more
        if value is not None and (value.kind != "constant" or items is not None):
            self.names[name] = value

    def item_of(self, owner: Symbol | None, key: Symbol | None) -> Symbol | None:
        if key is _SLICE:
            return owner
        key = None if _built(key) is not None else key  # x[i, j]
        if (items := _built(owner)) is not None:
            return _one_of(items)
        name = key.steps[0] if key is not None and key.kind == "constant" else None
        if owner is not None and isinstance(name, str):
            if owner.kind != "constant" and owner.steps[-1] == _DICT:
                return self.inner(owner._replace(steps=owner.steps[:-1]), "", (".", name))
            if owner.kind == GLOBALS:
                return self.load(Symbol(name, "outer", (name,)))
        return super().item_of(owner, key)

    # --- instructions ---

    def do_build_slice(self, instruction: dis.Instruction) -> None:
        self.pop(instruction.arg or 2)
        self.stack.append(_SLICE)

    def do_binary_slice(self, _: dis.Instruction) -> None:
        self.stack.append(self.pop(3)[0])  # 3.12

    def do_match_keys(self, _: dis.Instruction) -> None:
        of, keys = self.stack[-2:] if len(self.stack) > 1 else (None, None)
        known = keys.steps[0] if keys is not None and keys.kind == "constant" else ()
        items = [self.item_of(of, Symbol("", "constant", (key,))) for key in known]
        self.stack.append(Symbol("", "constant", (_Built(items),)))

    def do_return_value(self, _: dis.Instruction) -> None:
        value = self.pop()[0]
        for path in () if self.nested else _paths(value):
            self.returns.setdefault(path)

    def do_get_iter(self, _: dis.Instruction) -> None:
        of = self.pop()[0]
        self.stack.append(of if of is not None and of.kind in _ZIPPED else self.item_of(of, None))

    def do_unpack_sequence(self, instruction: dis.Instruction) -> None:
        of, count = self.pop()[0], instruction.arg or 0
        self.stack.extend(reversed(self.unpacked(of, count)))

    def unpacked(self, of: Symbol | None, count: int) -> list[Symbol | None]:
        """What a tuple leads to, from the first item on."""
        if (items := _built(of)) is not None:
            return [*items, *[None] * count][:count]
        if of is None or of.kind == "constant":
            return [None] * count
        if of.kind == COUNTED:
            return [None, Symbol("", ZIP, of.steps), *[None] * count][:count]
        if of.kind == ZIP:
            return [self.item_of(each, None) for each in [*of.steps, *[None] * count][:count]]
        if of.steps[-1] == ("[", ANY):  # of what is looped over: a dict's keys are no places
            return [of] * count
        return [self.item_of(of, Symbol(str(i), "constant", (i,))) for i in range(count)]

    def do_binary_op(self, instruction: dis.Instruction) -> None:
        owner = self.stack[-2] if len(self.stack) > 1 else None
        super().do_binary_op(instruction)
        if is_augmented(instruction):
            self.note(FILL, owner)
            self.stack[-1:] = [owner]

    def do_before_with(self, _: dis.Instruction) -> None:
        manager = self.pop()[0]
        for name in ("__enter__", "__exit__"):
            method = self.inner(manager, "", (".", name))
            if method is not None:
                self.note(CALL, method)
        self.stack += [None, manager]  # what most of them return

    def do_kw_names(self, instruction: dis.Instruction) -> None:
        self.keywords = self.code.co_consts[instruction.arg or 0]

    def do_call(self, instruction: dis.Instruction) -> None:
        count = instruction.arg or 0
        taken = self.pop(count + 2)
        called = next((s for s in taken[:2] if s is not None), None)
        if called is not None and called.kind == CODE:
            if taken[1] is not None:
                self.passed[called.steps[0]] = {".0": taken[1]}
            self.stack.append(None)
            return
        names, self.keywords = self.keywords, ()
        self.note(CALL, called, tuple(taken[2:]), names)
        self.updates(called, names, len(taken) - 2 > len(names))
        self.stack.append(self.result(called, taken[2:]))

    def updates(self, called: Symbol | None, names: tuple[str, ...], others: bool) -> None:
        """x.__dict__.update(n=1)"""
        steps = () if called is None else called.steps
        if steps[-2:] == (_DICT, (".", "update")):
            for name in names:
                self.note(STORE, Symbol("", "inner", (*steps[:-2], (".", name))))
            if others:
                self.note(FILL, Symbol("", "inner", steps[:-1]))

    def do_make_function(self, instruction: dis.Instruction) -> None:
        """A comprehension goes over what it is called with."""
        code = self.pop(1 + ((instruction.arg or 0) & 15).bit_count())[-1]
        value = code.steps[0] if code is not None and code.kind == "constant" else None
        comprehends = isinstance(value, types.CodeType) and value.co_name in _COMPREHENSIONS
        self.stack.append(Symbol("", CODE, (value,)) if comprehends else None)

    def do_call_kw(self, instruction: dis.Instruction) -> None:
        """3.13: the names of the keywords are on the stack."""
        names = self.pop()[0]
        known = names is not None and names.kind == "constant"
        self.keywords = tuple(names.steps[0]) if known and names else ()
        self.do_call(instruction)

    def do_build_tuple(self, instruction: dis.Instruction) -> None:
        items = _Built(self.pop(instruction.arg)) if instruction.arg else _Built()
        self.stack.append(Symbol("", "constant", (items,)))  # by which nothing is stored

    do_build_list = do_build_tuple

    def built_further(self, at: int, item: Symbol | None) -> None:
        items = _built(self.stack[-at]) if len(self.stack) >= at else None
        if items is not None:
            self.stack[-at] = Symbol("", "constant", (_Built((*items, item)),))

    def do_list_extend(self, instruction: dis.Instruction) -> None:
        self.pop()
        self.built_further(instruction.arg or 1, None)  # f(self, *args): what is before it stays

    def do_list_append(self, instruction: dis.Instruction) -> None:
        self.built_further(instruction.arg or 1, self.pop()[0])  # 3.12: comprehensions are inlined

    def do_list_to_tuple(self, _: dis.Instruction) -> None:
        return None

    def do_call_intrinsic_1(self, instruction: dis.Instruction) -> None:
        if "LIST_TO_TUPLE" not in instruction.argrepr:  # 3.12
            self.pop()
            self.stack.append(None)

    def do_call_function_ex(self, instruction: dis.Instruction) -> None:
        taken = self.pop(2 + ((instruction.arg or 0) & 1))
        below = self.pop()[0]  # NULL, or what is called with NULL above it
        called = taken[0] if taken[0] is not None else below
        self.note(CALL, called, tuple(_built(taken[1]) or taken[1:]))
        self.stack.append(None)

    def result(self, called: Symbol | None, given: list[Symbol | None]) -> Symbol | None:
        if called is None or called.kind == "constant":
            return None
        if isinstance(called.steps[0], Either):
            alone = [Symbol("", "inner", path) for path in _paths(called)]
            return _one_of(self.result(each, given) for each in alone)
        if called.steps == ("super",):
            return Symbol(SUPER, "inner", (SUPER,))
        last = called.steps[-1]
        if isinstance(last, tuple) and last[0] == ".":
            return self.result_of_method(called, last[1], given)
        if len(called.steps) == 1 and isinstance(last, str) and last in _RESULTS:
            return self.result_of_builtin(last, given)
        return self.returned(called.steps, "", given)

    def result_of_method(
        self, called: Symbol, name: str, given: list[Symbol | None]
    ) -> Symbol | None:
        owner = Symbol("", "inner", called.steps[:-1])
        if name == "get":
            return self.inner(owner, "", ("[", GOT))
        if name in _LEADS:
            return owner if name in ("items", "values") else self.item_of(owner, None)
        if name == "choice" and given:
            return self.item_of(given[0], None)  # random.choice(list)
        if writes(name):
            return owner  # x.mul_(2).add_(1)
        return self.returned(owner.steps, name, given)

    def result_of_builtin(self, name: str, given: list[Symbol | None]) -> Symbol | None:
        first = given[0] if given else None
        if name == "zip":
            return Symbol("", ZIP, tuple(given)) if given else None
        if name == "globals":
            return Symbol("", GLOBALS, ("globals()",))
        if first is None or (first.kind == "constant" and _built(first) is None):
            return None
        if name == "getattr" and len(given) > 1 and given[1] and first.kind != "constant":
            key = given[1].steps[0] if given[1].kind == "constant" else None
            found = self.inner(first, "", (".", key)) if isinstance(key, str) else None
            return _one_of([found, *given[2:]])  # or its default
        if name == "type" and len(given) == 1:
            return self.inner(first, "", (".", "__class__"))
        if name in _PICKS:
            return self.item_of(first, None)
        if name in _PASSES:
            counts = name == "enumerate" and first.kind == ZIP
            return Symbol("", COUNTED, first.steps) if counts else first
        return None

    def returned(self, steps: Steps, name: str, given: list[Symbol | None]) -> Symbol | None:
        """What a function gives back, with the arguments that are no results themselves: paths
        stay short."""
        if calls_in(steps) >= _CALLS:
            return None
        known = (None if is_unnamed(s) or s is None or s.kind == "constant" else s for s in given)
        paths = tuple(None if s is None or s.kind in _ZIPPED else s.steps for s in known)
        return Symbol("", "inner", (*steps, (RETURNED, (name, paths))))

    def do_load_attr(self, instruction: dis.Instruction) -> None:
        owner = self.stack[-1] if self.stack else None
        if is_unnamed(owner) and writes(instruction.argval):
            self.fills_locals = True
        super().do_load_attr(instruction)

    do_load_method = do_load_attr

    # --- stores ---

    def do_store_subscr(self, _: dis.Instruction) -> None:
        _value, owner, key = self.pop(3)
        self.item(owner, key, "")

    def store_name(self, opname: str, name: str) -> None:
        value = self.pop()[0]
        if opname == "STORE_DEREF" and name not in self.free:
            self.bind(name, value)
        else:
            self.note(STORE, Symbol(name, "outer", (name,)))

    def add(self, what: str, path: str) -> None:
        if what.startswith("del "):
            self.note(STORE, Symbol(path, "outer", (path,)))

    def attribute(self, owner: Symbol | None, name: str, value: Symbol | None, do: str) -> None:
        for path in _paths(owner):
            self.note(STORE, Symbol("", "inner", (*path, (".", name))))

    def item(self, owner: Symbol | None, key: Symbol | None, do: str) -> None:
        if owner is not None and (owner.kind == GLOBALS or owner.steps[-1:] == (_DICT,)):
            at = self.item_of(owner, key)
            if at is not None and at.steps[-1] != ("[", ANY):
                self.note(STORE, at)
                return
        self.note(FILL, owner)


def _cells(code: types.CodeType) -> tuple[types.CellType, ...]:
    return tuple(types.CellType() for _ in code.co_freevars)


def uses_of(code: types.CodeType) -> Uses:
    """What a code object shows; the answer is remembered as long as the code lives."""
    known = _KNOWN.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    reader = _Uses(code)
    uses = Uses(
        tuple(dict.fromkeys(reader.uses)),
        tuple(reader.loads),
        tuple(reader.returns),
        reader.fills_locals,
    )
    if len(_KNOWN) >= _CODES:
        _KNOWN.clear()
    _KNOWN[id(code)] = (weakref.ref(code), uses)
    return uses


__all__ = [
    "ANY",
    "CALL",
    "FILL",
    "GOT",
    "NEUTRAL",
    "RETURNED",
    "STORE",
    "SUPER",
    "Either",
    "Use",
    "Uses",
    "calls_in",
    "is_unnamed",
    "items_of",
    "uses_of",
    "writes",
]
