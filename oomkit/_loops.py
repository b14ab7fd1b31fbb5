"""What `oomkit.chunks` needs of Python: where a loop's body goes on after its guarded block,
what the body did before it failed, and rows of a list.
"""

from __future__ import annotations

import dis
import gc
import inspect
from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinMethodType, CodeType, FrameType
from typing import Any, NamedTuple

import torch

# What the interpreter does between a `with` block that has ended an exception and the next
# statement; none of it is the program's.
_CLEARING = frozenset(
    {"POP_TOP", "POP_EXCEPT", "NOP", "CACHE", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "TO_BOOL"}
)
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP"})
_IF_TRUE = frozenset({"POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE"})


def _ends_block(instructions: list[dis.Instruction], at: int) -> int:
    """Behind the call of ``__exit__`` with three times None, of a block around; else -1."""
    for _ in range(3):
        if not (instructions[at].opname == "LOAD_CONST" and instructions[at].argval is None):
            return -1
        at += 1
    if instructions[at].opname == "PRECALL":
        at += 1
    return at + 1 if instructions[at].opname == "CALL" else -1


@lru_cache(maxsize=256)
def loop_after(code: CodeType, instruction: int) -> int:
    """The FOR_ITER that is next when the exception at a block's end is ended there.

    `instruction` is the offset at which the block's ``__exit__`` is called with the
    exception. -1 when any statement of the program comes before, or no loop.
    """
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    places = {i.offset: n for n, i in enumerate(instructions)}
    at = places.get(instruction, -1)
    if at < 0 or instructions[at].opname != "WITH_EXCEPT_START":
        return -1
    seen: set[int] = set()
    while at not in seen:
        seen.add(at)
        at += 1
        this = instructions[at]
        if this.opname == "FOR_ITER":
            return this.offset
        if this.opname in _JUMPS or this.opname in _IF_TRUE:
            at = places[this.argval] - 1
        elif this.opname not in _CLEARING:
            at = _ends_block(instructions, at) - 1
            if at < 0:
                return -1
    return -1


# --- what has run for rows that are to be handed out again ---

# Of plain lists and their kin; calling them twice for the same rows leaves these in twice.
_GROWS = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
# Of tensors; copy_() and the like are the same the second time.
_ADDS = frozenset({"add_", "sub_", "mul_", "div_", "index_add_", "scatter_add_", "addcmul_"})
_COUNTS = frozenset({"update", "subtract"})  # of a Counter
_NAMES = frozenset({"STORE_FAST", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"})
_STORES = _NAMES | {"STORE_ATTR"}
_METHODS = _GROWS | _ADDS | _COUNTS | {"__next__"}


_CALLS = {"__next__": "next({})", "__call__": "{}()"}


class _Done(NamedTuple):
    """Something that the body did: `path` is what it changed, by which method if any."""

    path: tuple[Any, ...]
    method: str
    line: int | None


def _path(instructions: list[dis.Instruction], at: int) -> tuple[Any, ...]:
    """A name, attributes and (keys,) that lead to what is on the stack after `at`."""
    steps: list[Any] = []
    while True:
        this = instructions[at]
        if this.opname == "LOAD_ATTR":
            steps.append(str(this.argval))
        elif this.opname == "BINARY_SUBSCR" or this.argrepr == "[]":
            at -= 1
            key = instructions[at]
            if key.opname == "LOAD_CONST":
                steps.append((key.argval,))
            elif key.opname in _LOADS:
                steps.append((None, str(key.argval)))
            else:
                return ()
        else:
            break
        at -= 1
    if this.opname not in _LOADS:
        return ()
    return str(this.argval), *reversed(steps)


def _of_itself(instructions: list[dis.Instruction], at: int) -> bool:
    """Is what the instruction at `at` stores in a name made of what was in it?"""
    store = instructions[at]
    line = store.positions.lineno if store.positions else None
    while at > 0 and line is not None:
        at -= 1
        this = instructions[at]
        if this.positions is None or (this.positions.lineno or 0) < line:
            return False
        if this.opname in _LOADS and this.argval == store.argval:
            return True
    return False


def _call_of(instructions: list[dis.Instruction], at: int) -> int:
    """The offset of the call that the method loaded at `at` is for; -1 where unknown."""
    begin = instructions[at].positions
    for later in instructions[at + 1 :]:
        place = later.positions
        if later.opname.startswith("CALL") and begin is not None and place is not None:
            if begin.lineno is None or begin.col_offset is None:
                return -1
            if (place.lineno, place.col_offset) == (begin.lineno, begin.col_offset):
                return later.offset
    return -1


def _stored(instructions: list[dis.Instruction], at: int) -> str:
    """The name that the result of the operation at `at` is stored under, or ""."""
    at += 1
    while instructions[at].opname in ("SWAP", "COPY", "ROT_TWO", "ROT_THREE"):
        at += 1
    if instructions[at].opname == "STORE_SUBSCR":
        return "[...]"
    return str(instructions[at].argval) if instructions[at].opname in _STORES else ""


@lru_cache(maxsize=256)
def _done(code: CodeType, loop: int, failed: int) -> tuple[_Done, ...]:
    """What the body from its FOR_ITER at `loop` did before the instruction that failed."""
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    end = failed
    for i in instructions:  # a loop in the body: its later lines may have run, too
        if i.opname.startswith("JUMP_BACKWARD") and i.offset > failed:
            if loop < i.argval <= failed:
                end = max(end, i.offset)
    found: list[_Done] = []
    fresh: set[str] = set()  # made by this very body
    line: int | None = None
    for at, i in enumerate(instructions):
        line = i.positions.lineno if i.positions and i.positions.lineno else line
        if not loop <= i.offset <= end:
            continue
        if i.opname == "BINARY_OP" and i.argrepr.endswith("="):
            name = _stored(instructions, at)
            if name and name not in fresh:
                # a list may hold the first half of what failed
                found.append(_Done((name,), "extend" if i.offset == failed else "", line))
        elif i.opname in ("LOAD_METHOD", "LOAD_ATTR") and i.argval in _METHODS:
            path, call = _path(instructions, at - 1), _call_of(instructions, at)
            # extend() of what failed half-way has put the first half in
            is_done = 0 <= call <= end and (call != failed or str(i.argval)[:6] == "extend")
            if path and path[0] not in fresh and is_done:
                found.append(_Done(path, str(i.argval), line))
        elif i.opname in _LOADS and i.argval not in fresh:
            call = _call_of(instructions, at)
            if i.argval == "next" and 0 <= call <= end:
                path = _path(instructions, at + 1)
                if path and path[0] not in fresh:
                    found.append(_Done(path, "__next__", line))
            elif 0 <= call <= end and call != failed:
                found.append(_Done((str(i.argval),), "__call__", line))
        elif i.opname in _NAMES:
            before = instructions[at - 1]
            if before.opname == "BINARY_OP" and before.argrepr.endswith("="):
                continue
            if i.argval in fresh or before.opname == "FOR_ITER":
                fresh.add(str(i.argval))
            elif _of_itself(instructions, at):
                found.append(_Done((str(i.argval),), "", line))
            elif i.opname == "STORE_FAST":
                fresh.add(str(i.argval))
    return tuple(found)


def _value(frame: FrameType, path: tuple[Any, ...]) -> Any:
    names = frame.f_locals

    def named(name: str) -> Any:
        return names[name] if name in names else frame.f_globals.get(name)

    try:
        value = named(path[0])
        for step in path[1:]:
            if isinstance(step, str):
                value = getattr(value, "__dict__", {}).get(step)
                continue
            key = named(step[1]) if len(step) > 1 else step[0]
            if isinstance(value, dict):
                value = dict.get(value, key)
            elif isinstance(value, (list, tuple)) and isinstance(key, int):
                value = value[key] if -len(value) <= key < len(value) else None
            else:
                value = None
    finally:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(names, dict):
            names.clear()  # a copy, which would keep the locals' tensors
    return value


def _shown(path: tuple[Any, ...]) -> str:
    text = str(path[0])
    for step in path[1:]:
        if isinstance(step, str):
            text += "." + step
        else:
            text += f"[{step[1]}]" if len(step) > 1 else f"[{step[0]!r}]"
    return text


def _counts_twice(value: Any, method: str) -> bool:
    """Does calling this method of `value` twice for the same rows matter?"""
    if method == "__call__":  # a bound method under a name of its own
        owner = getattr(value, "__self__", None)
        return isinstance(value, BuiltinMethodType) and _counts_twice(owner, value.__name__)
    if method == "__next__":
        return isinstance(value, Iterator)
    if method in _ADDS:
        return isinstance(value, torch.Tensor)
    if method in _COUNTS:
        return isinstance(value, Counter)
    return method in _GROWS and isinstance(value, (list, deque))


def _paired(parts: object) -> bool:
    """Is the loop's iterator a zip() or map() of this one and others, which would go on?"""
    for referrer in gc.get_referrers(parts):
        if isinstance(referrer, (zip, map)):
            return True
        if type(referrer) is tuple and any(
            isinstance(outer, (zip, map)) for outer in gc.get_referrers(referrer)
        ):
            return True
    return False


def loop_judge(
    frame: FrameType, instruction: int, error: BaseException, parts: object
) -> int | str:
    """The FOR_ITER that asks for the next part, once the block at whose end `frame` is has
    ended `error`; -1 where something else comes first. A text where the body has done what
    must not be done twice for the same rows.
    """
    code = frame.f_code
    loop = loop_after(code, instruction)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame is not frame:
        traceback = traceback.tb_next
    if loop < 0 or traceback is None:
        return loop
    for done in _done(code, loop, traceback.tb_lasti):
        what = _shown(done.path)
        if not done.method:
            return f"`{what}` may have changed in line {done.line} before memory ran out"
        if _counts_twice(_value(frame, done.path), done.method):
            call = _CALLS.get(done.method, "{}.{}()").format(what, done.method)
            return f"`{call}` in line {done.line} may have run before memory ran out"
    if _paired(parts):
        return "the parts come through zip() or map(), whose other iterators have gone on"
    return loop


def cut_sequence(batch: Any, start: int, length: int) -> Any:
    return batch[start : start + length]
