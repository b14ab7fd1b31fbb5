"""What is done while there is no memory, and what has to hold afterwards."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .fault import Outcome
from .fork import FAULTY, apart

OURS = frozenset({"MemoryError", "OutOfMemory", "OutOfMemoryError", "PartialUpdate"})
"""How a call may end: those of Python, of oomkit and of torch that say what it was."""


class Body:
    """One call. Its methods run in the stage (the process that forks), but for those that
    say otherwise."""

    name = ""
    limit = FAULTY
    """After which the call hangs."""
    total = 0
    """Allocations of the undisturbed call, where counting them takes too long."""
    lasting = True
    """Also with no memory at all from the fault on?"""
    rarer = 1
    """The stride of lasting faults is so many times that of single ones."""
    loaded = True
    """Is oomkit imported in the stage?"""

    def prepare(self) -> None:
        """Before anything is forked."""

    def armed(self) -> AbstractContextManager[Any]:
        """In the child, around the call."""
        return nullcontext()

    def call(self) -> Any:
        """In the child, without memory."""

    def after(self, outcome: Outcome, box: list[Any]) -> None:
        """In the child: whether all is as before, and what the next call gives. `box` has
        the result and the exception, and nothing else holds them."""

    def judge(self, outcome: Outcome) -> list[str]:
        """What is wrong with what `after` has found, beside what it knew itself."""
        return []

    def finish(self) -> None:
        """When all is done: what `prepare` has made outside of the process."""


class Plain(Body):
    """A function of no arguments whose result is a plain value, and the same each time."""

    def __init__(self, name: str, make: Callable[[], Callable[[], Any]], rarer: int = 1) -> None:
        self.name = name
        self.make = make
        self.rarer = rarer

    def prepare(self) -> None:
        self.function = self.make()
        answer = apart(lambda: (self.function(), self.function()))
        assert not answer.died, f"{self.name}: {answer.died}"
        self.first, self.second = answer.value

    def call(self) -> Any:
        return self.function()

    def after(self, outcome: Outcome, box: list[Any]) -> None:
        result, error = box
        if error is None:
            outcome.values = (result, self.function())
        else:
            outcome.values = (None, self.function())

    def judge(self, outcome: Outcome) -> list[str]:
        result, again = outcome.values
        wrong = []
        if outcome.error == "" and result != self.first:
            wrong.append(f"result {result!r:.200}, undisturbed {self.first!r:.200}")
        if again not in (self.first, self.second):
            wrong.append(f"then {again!r:.200}, undisturbed {self.first!r:.200}")
        return wrong


def alive() -> Counter[str]:
    """Objects of oomkit's types and tensors that were made since gc.freeze(), by type."""
    import torch

    gc.collect()
    kinds: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind.__module__.startswith("oomkit") or issubclass(kind, torch.Tensor):
            kinds[kind.__qualname__] += 1
    return kinds
