"""What `oomkit.chunks` needs of Python: where a loop's body goes on after its guarded block,
what the body did before it failed, and rows of a list.
"""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import weakref
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from .._code.body import Machine
from .._code.body_values import (
    ANY,
    MISSING,
    PART,
    UNKNOWN,
    Code,
    Found,
    Names,
    Store,
    Walk,
    value_of,
)

# What the interpreter does between a `with` block that has ended an exception and the next
# statement; none of it is the program's.
_CLEARING = frozenset(
    {"POP_TOP", "POP_EXCEPT", "NOP", "CACHE", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "TO_BOOL"}
)
# Generators of these yield each part once; what they count is rows that were handed out.
_PROGRESS = frozenset({"alive_progress", "click", "fastprogress", "progressbar", "rich", "tqdm"})
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
    """The instruction that asks for the next part when the exception at a block's end is ended
    there.

    `instruction` is the offset at which the block's ``__exit__`` is called with the
    exception, or of the `yield` that a generator waits in. -1 when any statement of the program
    comes before, or no loop.
    """
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    places = {i.offset: n for n, i in enumerate(instructions)}
    at = places.get(instruction, -1)
    if at < 0 or instructions[at].opname not in ("WITH_EXCEPT_START", "YIELD_VALUE"):
        return -1
    seen: set[int] = set()
    while at not in seen:
        seen.add(at)
        at += 1
        this = instructions[at]
        if this.opname in ("FOR_ITER", "SEND"):  # for part in parts, or yield from parts
            return this.offset
        if this.opname in _JUMPS or this.opname in _IF_TRUE:
            at = places[this.argval] - 1
        elif this.opname not in _CLEARING:
            at = _ends_block(instructions, at) - 1
            if at < 0:
                return -1
    return -1


# --- what has run for rows that are to be handed out again ---

_ADVICE = (
    "collect the part's results in locals and add them at the end of the block, or use oomkit.map()"
)


def _conflicts(walk: Walk, store: Store) -> bool:
    """Has the body read what it replaced?"""
    if not store.where:
        return any(path[0] == store.key for path in walk.reads)
    held = value_of(store.where)
    for path in walk.reads:
        for size in range(1, len(path) + 1):
            owner = path[:size]
            if owner != store.where and (held is MISSING or not _share(value_of(owner), held)):
                continue
            key = path[size][1] if size < len(path) and value_of(owner) is held else ANY
            if ANY in (key, store.key[1]) or key == store.key[1]:
                return True
    return False


def _share(one: Any, other: Any) -> bool:
    """Is it one thing, or do two tensors lie in one memory?"""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    return one is other


def _walked(
    code: Code, names: Names, loop: int, failed: int, block: int, kept: tuple[Any, ...]
) -> tuple[Walk, set[int], set[int]]:
    """All that the body from its FOR_ITER at `loop` changes; what ran before `failed`, and what
    since then until `block` was left.
    """
    for mixed in (False, True):
        walk = Walk(kept, mixed)
        machine = Machine(walk, code, names)
        stack = [UNKNOWN] * code.depth_at(loop)
        machine.run(loop + 1, [*stack, PART], {}, loop)
        if walk.mixed == mixed:
            break
    return walk, machine.ran_before(failed, loop), machine.ran_after(failed, block)


def body_done(
    code: CodeType, names: Names, loop: int, failed: int, block: int, kept: tuple[Any, ...]
) -> str:
    """What the body may have done that must not be done twice, and in which line; or ""."""
    read = Code(code)
    # a call of a Python function leaves the caller at the call's inline caches
    at = max(n for offset, n in read.places.items() if offset <= failed)
    try:
        places = read.places
        walk, before, since = _walked(read, names, places[loop], at, places[block], kept)
    except MemoryError:
        raise
    except Exception:  # the error of the program must not be replaced
        return f"line {read.lines[at]} is in a body that oomkit cannot read"
    if not before and at != read.places[loop] + 1:
        return f"what ran before line {read.lines[at]} is not known"
    before |= since
    ran = [f for f in walk.found if _has_run(f, at, before)]
    done = [(f.line or 0, f"{f.what} in line {f.line} may have run") for f in ran]
    done += [
        (s.line or 0, f"`{s.what}` may have changed in line {s.line}")
        for s in walk.stores
        if s.at in before and _conflicts(walk, s)
    ]
    return f"{min(done)[1]} before memory ran out" if done else ""


def _has_run(found: Found, failed: int, before: set[int]) -> bool:
    return found.at == failed if found.is_partial else found.at in before


Generators = tuple[tuple[object, FrameType, int], ...]


def _is_taker(outer: object) -> bool:
    kind = type(outer)
    return kind in (zip, map, filter) or (
        kind.__module__ == "itertools" and kind is not itertools.chain
    )


def _taken_by(parts: object) -> str:
    """What has taken parts out of this iterator for something else than a loop: a zip() goes on
    with its other iterators, an islice() counts, the function of a filter() has seen them."""
    found = gc.get_referrers(parts)
    found += [outer for one in found if type(one) is tuple for outer in gc.get_referrers(one)]
    names = [type(one).__name__ for one in found if _is_taker(one)]
    if not names:
        return ""
    name = names[0].strip("_").partition("_data")[0]  # _tee_dataobject
    return (
        f"the parts come through {name}(), which has gone on: give all of its batches to one "
        "chunks(), and loop over that"
    )


def _between(generators: Generators, held: tuple[Any, ...]) -> str:
    """What generators that the parts come through do but yield them, or ""."""
    for generator, frame, asked in generators:
        if generator is not None and (told := _taken_by(generator)):
            return told
        code, last = frame.f_code, frame.f_lasti
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _PROGRESS:
            continue
        told = _done(frame, asked, last, last, held) or ""
        if loop_after(code, last) != asked:
            told = "it is not `for part in parts: yield part`, and no more than that"
        if told:
            return f"the parts come through {code.co_name}(): {told}; loop over chunks() itself"
    return ""


def loop_judge(
    frame: FrameType,
    instruction: int,
    error: BaseException,
    parts: object,
    kept: tuple[Any, ...],
    generators: Generators,
) -> int | str:
    """The FOR_ITER that asks for the next part, once the block at whose end `frame` is has
    ended `error`; -1 where something else comes first. A text where the body has done, or may
    have done, what must not be done twice for the same rows. `kept`: what goes back with a
    part, and the batch.
    """
    code = frame.f_code
    loop = loop_after(code, instruction)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame is not frame:
        traceback = traceback.tb_next
    if loop < 0 or traceback is None:
        return loop
    if told := _taken_by(parts):  # before anything of ours refers to them
        return told
    held = (*(one() if isinstance(one, weakref.ref) else one for one in kept), parts)
    if told := _between(generators, held):
        return told
    done = _done(frame, loop, traceback.tb_lasti, instruction, held)
    return f"{done}, and would once more for these rows: {_ADVICE}" if done else loop


def _done(frame: FrameType, loop: int, last: int, block: int, held: tuple[Any, ...]) -> str | None:
    own, code = frame.f_locals, frame.f_code
    try:
        names = Names(own, frame.f_globals, frame.f_builtins)
        return body_done(code, names, loop, last, block, held)
    finally:
        if code.co_flags & inspect.CO_OPTIMIZED and isinstance(own, dict):
            own.clear()  # a copy, which would keep the locals' tensors


def cut_sequence(batch: Any, start: int, length: int) -> Any:
    return batch[start : start + length]
