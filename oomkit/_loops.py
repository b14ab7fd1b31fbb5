"""What `oomkit.chunks` needs of Python: where a loop's body goes on, and rows of a list."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType
from typing import Any

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


def cut_sequence(batch: Any, start: int, length: int) -> Any:
    return batch[start : start + length]
