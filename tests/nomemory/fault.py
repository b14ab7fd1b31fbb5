"""One call while the interpreter's memory runs out, and what came of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import witness

try:
    from _testcapi import remove_mem_hooks, set_nomemory

    MISSING = ""
except ImportError:  # some distributions leave it out of their Python
    MISSING = "this Python has no _testcapi, whose set_nomemory() makes its allocations fail"

FOREVER = 0
NEVER = 2**30


@dataclass
class Fault:
    """From the n-th allocation on: one of them, or (`once=False`) all."""

    nth: int
    once: bool = True

    def __str__(self) -> str:
        return f"allocation {self.nth}{'' if self.once else ' and all after it'}"


@dataclass
class Outcome:
    error: str = ""
    """The type's name; empty for a call that returned."""
    text: str = ""
    notes: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Frames of the traceback, the innermost last."""
    unraisable: list[str] = field(default_factory=list)
    reached: bool = False
    """Was the n-th allocation reached at all? Only known of `once=False`."""
    wrong: list[str] = field(default_factory=list)
    values: Any = None
    """What the body has measured after it, to be compared outside."""


def frames_of(error: BaseException) -> tuple[str, ...]:
    """The last few, as file:line in function."""
    found = traceback.extract_tb(error.__traceback__)
    return tuple(f"{f.filename}:{f.lineno} in {f.name}" for f in found[-4:])


def describe(outcome: Outcome, error: BaseException) -> None:
    outcome.error = type(error).__name__
    outcome.text = str(error)
    outcome.notes = tuple(getattr(error, "__notes__", ()))
    outcome.where = frames_of(error)


def suffer(call: Callable[[], Any], fault: Fault, outcome: Outcome) -> tuple[Any, Any]:
    """Calls it without memory: (its result, its exception)."""
    result = error = None
    spent = False

    def unraisable(args: Any) -> None:
        kind = getattr(args.exc_type, "__name__", "?")
        outcome.unraisable.append(f"{kind}: {args.exc_value} in {args.object!r:.80}")

    before, sys.unraisablehook = sys.unraisablehook, unraisable
    stop = fault.nth + 1 if fault.once else FOREVER
    witness.begin(set_nomemory, fault.nth, stop)
    try:
        try:
            result = call()
        except BaseException as caught:
            error = caught
        bytearray(1)  # not in a free list: fails where everything does
    except MemoryError:
        spent = True
    finally:
        remove_mem_hooks()
    sys.unraisablehook = before
    outcome.reached = spent
    if error is not None:
        describe(outcome, error)
    return result, error
