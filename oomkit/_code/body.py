"""What the body of a loop did before memory ran out, read from its code.

The code is walked with values that say where each one comes from (`oomkit._code.body_values`).
Whatever may have changed something that was there before the body is found, unless it is shown
to be harmless: what is not known counts as a change. `oomkit._code.body_calls` judges the calls.
"""

from __future__ import annotations

import dis
from collections import deque
from typing import Any

import torch

from . import body_calls as _body_calls
from .body_values import (
    _ENDS,
    _OFTEN,
    _PLAIN,
    _STACK_ONLY,
    _TAKES,
    ANY,
    EXIT,
    FRESH,
    ITEM,
    MISSING,
    NULL,
    OWN,
    PART,
    SHALLOW,
    UNKNOWN,
    Code,
    Kind,
    Names,
    Place,
    State,
    Unreadable,
    Value,
    Walk,
    inside,
    item,
    key_of,
    level,
    merged,
    shown,
    value_of,
)

_IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset, bool, type(None))
_DEEPEST = 3  # functions within functions
_AWAITS = 3  # the argument of RESUME behind an `await`


class Machine(Place):
    """Walks one function's code from an instruction on."""

    def __init__(
        self,
        walk: Walk,
        code: Code,
        names: Names,
        *,
        within: Place | None = None,
        is_inline: bool = True,
    ) -> None:
        super().__init__(walk, code, names, within, is_inline)
        self.returned: Value | None = None
        self.states: dict[int, State] = {}
        self.after: dict[int, set[int]] = {}
        self.keywords: tuple[str, ...] = ()

    def inner(self, code: Any, names: Names, env: dict[str, Value], is_inline: bool) -> Value:
        inner = Machine(self.walk, Code(code), names, within=self, is_inline=is_inline)
        inner.run(0, [], env, -1)
        return inner.returned or UNKNOWN

    # --- walking ---

    def run(self, start: int, stack: list[Value], env: dict[str, Value], stop: int) -> None:
        todo = deque([start])
        self.states[start] = State(stack, env)
        often: dict[int, int] = {}
        while todo:
            at = todo.popleft()
            if at == stop:
                continue
            often[at] = often.get(at, 0) + 1
            if often[at] > _OFTEN:
                raise Unreadable
            self.at = at
            state = self.states[at]
            ways = [(to, self._next(at, state, jumps)) for to, jumps in self.code.goes_on(at)]
            if not ways:
                self._next(at, state, False)
            for target, depth, lasti in self.code.handlers_of(at):
                if len(state.stack) < depth:
                    raise Unreadable
                ways.append(
                    (target, State(state.stack[:depth] + [UNKNOWN] * (lasti + 1), state.env))
                )
            for to, new in ways:
                self.after.setdefault(at, set()).add(to)
                if self._flows(to, new):
                    todo.append(to)

    def _flows(self, to: int, new: State) -> bool:
        old = self.states.get(to)
        if old is None:
            self.states[to] = State(list(new.stack), dict(new.env))
            return True
        if len(old.stack) != len(new.stack):
            raise Unreadable
        stack = [merged(a, b) for a, b in zip(old.stack, new.stack, strict=True)]
        env = {
            name: merged(value, new.env[name]) for name, value in old.env.items() if name in new.env
        }
        if stack == old.stack and env == old.env:
            return False
        self.states[to] = State(stack, env)
        return True

    def ran_before(self, failed: int, head: int) -> set[int]:
        """Which instructions may have run to their end before the one that failed."""
        before: dict[int, set[int]] = {}
        for at, ways in self.after.items():
            for to in ways:
                before.setdefault(to, set()).add(at)
        seen: set[int] = set()
        todo = [failed]
        while todo:
            for at in before.get(todo.pop(), ()):
                if at not in seen and at != head:
                    seen.add(at)
                    todo.append(at)
        return seen

    def ran_after(self, failed: int, block: int) -> set[int]:
        """Which instructions may have run since, in handlers that let the error pass.

        `block` ends it.
        """
        ways: dict[int, set[int]] = {}
        ends: set[int] = set()
        todo = [target for target, _, _ in self.code.handlers_of(failed)]
        while todo:
            at = todo.pop()
            if at in ways:
                continue
            i = self.code.instructions[at]
            ways[at] = {to for to, _ in self.code.goes_on(at)}
            if i.opname == "RERAISE" or (i.opname == "RAISE_VARARGS" and not i.arg):
                ends.add(at)
                ways[at] = {target for target, _, _ in self.code.handlers_of(at)}
            elif at == block:
                ends.add(at)
                ways[at] = set()
            elif i.opname == "WITH_EXCEPT_START":
                ways[at] = {at + 1}
            todo.extend(ways[at])
        seen: set[int] = set()
        found = ends
        while found:
            seen |= found
            found = {at for at, to in ways.items() if to & found} - seen
        return seen

    # --- one instruction ---

    def _next(self, at: int, state: State, jumps: bool) -> State:
        i = self.code.instructions[at]
        stack, env = list(state.stack), dict(state.env)
        name = i.opname
        if name in _STACK_ONLY:
            if name == "KW_NAMES":
                self.keywords = self.code.code.co_consts[i.arg or 0]
            return State(stack, env)
        handler = getattr(self, "_op_" + name.lower(), None)
        if handler is not None:
            handler(i, stack, env, jumps)
        elif name.startswith("LOAD_FAST") or name in _LOADS:
            self._load(i, stack, env)
        elif name.startswith("STORE_FAST") or name in _STORES:
            self._store(i, stack, env)
        elif name.startswith("DELETE_") and name not in ("DELETE_SUBSCR", "DELETE_ATTR"):
            env[str(i.argval)] = UNKNOWN
        elif name in _PLAIN or name in _TAKES or name in _ENDS or "JUMP" in name:
            self._plain(i, stack, jumps)
        else:
            raise Unreadable
        return State(stack, env)

    def _plain(self, i: dis.Instruction, stack: list[Value], jumps: bool) -> None:
        effect = dis.stack_effect(i.opcode, i.arg, jump=jumps)
        pushes = 0 if i.opname in _TAKES or i.opname in _ENDS else max(effect, 1)
        if "JUMP" in i.opname:
            pushes = 0
        taken = [stack.pop() for _ in range(pushes - effect)]
        for value in taken:
            if i.opname != "POP_TOP":
                self.read(value)
            if i.opname not in ("POP_TOP", "BUILD_TUPLE"):
                self._escapes(value)
        stack.extend([_made(i.opname, taken)] * pushes)

    def _escapes(self, value: Value) -> None:
        """A value goes where it is not followed: a function of the body may run there."""
        if value.kind is Kind.CODE:
            _body_calls.run_code(self, value, [UNKNOWN] * 8)

    def _load(self, i: dis.Instruction, stack: list[Value], env: dict[str, Value]) -> None:
        if i.opname == "LOAD_GLOBAL" and (i.arg or 0) & 1:
            stack.append(NULL)
        for name in i.argval if isinstance(i.argval, tuple) else (i.argval,):
            value = env.get(name, Value(Kind.OUTER, ((self.names, name),)))
            stack.append(value)
            if i.opname == "LOAD_FAST_AND_CLEAR":
                env[name] = UNKNOWN

    def _store(self, i: dis.Instruction, stack: list[Value], env: dict[str, Value]) -> None:
        names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
        if i.opname == "STORE_FAST_LOAD_FAST":
            self._store_name(names[0], stack.pop(), env)
            stack.append(env.get(names[1], Value(Kind.OUTER, ((self.names, names[1]),))))
            return
        for name in names:
            self._store_name(name, stack.pop(), env)

    def _store_name(self, name: str, value: Value, env: dict[str, Value]) -> None:
        own = ((self.names, name),)
        if value.path == own:
            env.pop(name, None)
            return
        env[name] = value
        code = self.code.code
        if self.place < 0 or (name not in code.co_varnames and name not in code.co_cellvars):
            self.stored((), (self.names, name), name)

    # --- values ---

    def _op_push_null(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        stack.append(NULL)

    def _op_return_value(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        value = stack.pop()
        self.returned = value if self.returned is None else merged(self.returned, value)
        self._escapes(value)

    def _op_return_const(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        self._op_return_value(i, [FRESH], env, jumps)

    def _op_return_generator(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        stack.append(UNKNOWN)  # what is sent first

    def _op_load_const(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        stack.append(Value(Kind.CONST, (), i.argval))

    _op_load_small_int = _op_load_const

    def _op_copy(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        stack.append(stack[-i.arg])

    def _op_swap(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        stack[-1], stack[-i.arg] = stack[-i.arg], stack[-1]

    def _op_get_iter(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        value = stack.pop()
        self.read(value)
        self._escapes(value)
        if _body_calls.is_used_up(self.walk, value):
            self.found(f"`next({shown(value.path)})`")
        new = (
            value if value.kind is Kind.ITER else Value(Kind.ITER, (), item(value, self.walk.mixed))
        )
        stack.append(new)

    def _op_for_iter(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        if not jumps:
            stack.append(item(stack[-1], self.walk.mixed))
        elif dis.stack_effect(i.opcode, i.arg, jump=True) < 0:
            stack.pop()
        else:
            stack.append(UNKNOWN)

    def _op_unpack_sequence(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        value = stack.pop()
        self.read(value)
        count = dis.stack_effect(i.opcode, i.arg) + 1
        held = value_of(value.path)
        if value.kind is Kind.OUTER and type(held) in (list, tuple):
            stack.extend(inside(value, "item", n) for n in reversed(range(count)))
            return
        one = PART if value == PART else item(value, self.walk.mixed)
        stack.extend([one] * count)

    def _op_unpack_ex(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        value = stack.pop()
        self.read(value)
        count = dis.stack_effect(i.opcode, i.arg) + 1
        one = PART if value == PART else item(value, self.walk.mixed)
        stack.extend([one] * count)

    def _op_before_with(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        self.read(stack.pop())
        stack.extend([EXIT, UNKNOWN])

    _op_before_async_with = _op_before_with

    def _op_load_special(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        self.read(stack.pop())
        stack.extend([EXIT, NULL])

    def _op_make_function(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        code = stack.pop()
        for _ in range(-dis.stack_effect(i.opcode, i.arg)):
            stack.pop()
        if code.kind is not Kind.CONST:
            raise Unreadable
        stack.append(Value(Kind.CODE, (), (code.extra, tuple(env.items()))))

    def _op_set_function_attribute(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        function = stack.pop()
        stack[-1] = function

    def _op_yield_value(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        following = self.code.instructions[self.at + 1]
        if following.opname != "RESUME" or (following.arg or 0) & 3 != _AWAITS:
            if not self.code.code.co_name.startswith("<"):
                self.found("`yield`")
        stack[-1] = UNKNOWN

    # --- attributes and items ---

    def _op_load_attr(self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool) -> None:
        owner, name = stack.pop(), str(i.argval)
        is_method = i.opname == "LOAD_METHOD" or (
            dis.stack_effect(i.opcode, i.arg) == 1 if i.opname == "LOAD_ATTR" else False
        )
        if is_method:
            stack.extend([Value(Kind.BOUND, (), (owner, name)), NULL])
            return
        known = env.get(_slot(owner, name), None) if owner.path else None
        if owner.kind in (Kind.PART, Kind.ITEM):
            stack.append(ITEM)
        elif known is not None:
            stack.append(known)
        elif owner.kind is Kind.OUTER:
            stack.append(inside(owner, "attr", name))
        else:
            stack.append(FRESH if owner.kind in (Kind.FRESH, Kind.CONST) else UNKNOWN)

    _op_load_method = _op_load_attr

    def _op_binary_subscr(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        key, owner = stack.pop(), stack.pop()
        self.read(key)
        if owner.kind is Kind.OUTER:
            new = inside(owner, "item", key_of(key, env))
        else:
            new = item(owner, self.walk.mixed)
        stack.append(new)

    def _op_binary_slice(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        for _ in range(2):
            self.read(stack.pop())
        stack.append(item(stack.pop(), self.walk.mixed))

    def _op_store_attr(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        owner, value = stack.pop(), stack.pop()
        self._put(owner, "attr", str(i.argval), value)
        if owner.path:
            env[_slot(owner, str(i.argval))] = value if value.kind is not Kind.OUTER else UNKNOWN

    def _op_store_subscr(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        key, owner, value = stack.pop(), stack.pop(), stack.pop()
        self.read(key)
        self._put(owner, "item", key_of(key, env), value)

    def _op_store_slice(
        self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool
    ) -> None:
        for _ in range(2):
            self.read(stack.pop())
        owner, value = stack.pop(), stack.pop()
        self._put(owner, "item", ANY, value)

    def _put(self, owner: Value, by: str, key: Any, value: Value) -> None:
        """`owner.key = value` or `owner[key] = value`."""
        self.read(value)
        self._escapes(value)
        if owner.kind in OWN or owner.kind is Kind.PART:
            self.walk.mixed |= value.kind not in (Kind.CONST, Kind.FRESH)
            return
        if owner.kind is not Kind.OUTER:
            self.found("an assignment")
            return
        held = value_of(owner.path)
        if self.walk.keeps(owner):
            return
        text = shown((*owner.path, (by, key)))
        # A key that is another one for other rows leaves the first one's entry behind; rows of
        # a tensor or an array are written again.
        if key is ANY and not _has_rows(held):
            self.found(f"`{text} = ...`", fails=True)
        self.stored(owner.path, (by, key), text)

    def _op_delete_subscr(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        if i.opname == "DELETE_SUBSCR":
            self.read(stack.pop())
        owner = stack.pop()
        if owner.kind not in OWN and owner.kind is not Kind.PART:
            self.found(f"`del {_shown(owner)}`")

    _op_delete_attr = _op_delete_subscr

    # --- operations ---

    def _op_binary_op(self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool) -> None:
        if i.argrepr == "[]":
            self._op_binary_subscr(i, stack, env, jumps)
            return
        other, one = stack.pop(), stack.pop()
        self.read(one)
        self.read(other)
        self._escapes(other)
        stack.append(level([one, other]))
        if not i.argrepr.endswith("="):
            return
        if one.kind in OWN or one.kind is Kind.PART:
            self.walk.mixed |= level([other]).kind is Kind.SHALLOW
            stack[-1] = one if one.kind is not Kind.CONST else FRESH
            return
        held = value_of(one.path)
        if held is not MISSING and isinstance(held, _IMMUTABLE):
            return
        if one.kind is Kind.OUTER and self.walk.keeps(one):
            return
        what = f"`{_shown(one)} {i.argrepr} ...`"
        self.found(what, fails=not isinstance(held, torch.Tensor))

    def _onto(self, i: Any, stack: list[Value], count: int) -> None:
        for _ in range(count):
            value = stack.pop()
            self.read(value)
            self._escapes(value)
            if value.kind not in (Kind.CONST, Kind.FRESH):
                stack[-i.arg] = SHALLOW if stack[-i.arg].kind in OWN else stack[-i.arg]

    def _op_list_append(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        self._onto(i, stack, 1)

    _op_set_add = _op_list_extend = _op_set_update = _op_list_append
    _op_dict_merge = _op_dict_update = _op_list_append

    def _op_map_add(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        self.read(stack.pop())
        self._onto(i, stack, 1)

    # --- calls ---

    def _op_call(self, i: Any, stack: list[Value], env: dict[str, Value], jumps: bool) -> None:
        named: tuple[str, ...] = self.keywords
        self.keywords = ()
        if i.opname == "CALL_KW":
            names = stack.pop()
            named = names.extra if names.kind is Kind.CONST else ()
        taken = [stack.pop() for _ in range(i.arg + 2)][::-1]
        given = [v for v in taken if v.kind is not Kind.NULL]
        stack.append(self._called(given[0], given[1:], named))

    _op_call_kw = _op_call

    def _op_call_function_ex(self, i: Any, stack: list[Value], env: Any, jumps: bool) -> None:
        count = 1 - dis.stack_effect(i.opcode, i.arg)
        given = [v for v in [stack.pop() for _ in range(count)][::-1] if v.kind is not Kind.NULL]
        stack.append(self._called(given[0], given[1:], None))

    def _called(self, callee: Value, given: list[Value], named: tuple[str, ...] | None) -> Value:
        instructions = self.code.instructions
        is_dropped = instructions[self.at + 1].opname == "POP_TOP"
        return _body_calls.judge(self, callee, given, named, is_dropped)


_UNKNOWN = frozenset("SEND END_SEND GET_AWAITABLE IMPORT_NAME IMPORT_FROM".split())
_LOADS = frozenset("LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_CLASSDEREF LOAD_CLOSURE".split())
_STORES = frozenset("STORE_GLOBAL STORE_NAME STORE_DEREF".split())


def _slot(owner: Value, name: str) -> str:
    return repr([(by, key) if n else key for n, (by, key) in enumerate(owner.path)]) + "." + name


def _shown(value: Value) -> str:
    return shown(value.path) if value.path else "..."


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value).__module__.partition(".")[0] == "numpy"


def _made(operation: str, taken: list[Value]) -> Value:
    return UNKNOWN if operation in _UNKNOWN else level(taken)
