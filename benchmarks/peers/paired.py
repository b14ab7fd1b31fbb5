"""Steady speed beside the oracle's, in one process.

Two processes that run the same program differ by several per cent for as long as they live
(where their pages lie in the caches), which is more than what is to be told apart. So blocks
of the contender's own steps and blocks of the oracle's steps take turns on the same model,
optimizer and batches, each pair in random order. The oracle's run between two batches of the
contender's program, without the budget: what the contender left alive must not stop them.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

import oomkit

from .adapters import fixed

if TYPE_CHECKING:
    from .watch import Watch


class Block(NamedTuple):
    seconds: float
    rows: int


Pair = tuple[Block, Block]  # the contender's, the oracle's


class Paired:
    """Made anew when a contender begins again: what it did before was a search."""

    def __init__(self, watch: Watch, plan: tuple[int, int]) -> None:
        self.watch, self.plan = watch, plan
        self.random = random.Random()
        self.pairs: list[Pair] = []
        self.began: tuple[int, float] | None = None  # the contender's block: step, time
        self.theirs: Block | None = None  # the oracle's, where it came first

    def turn(self) -> None:
        """Between two of the contender's batches."""
        watch, steps = self.watch, self.watch.course.steps
        length = watch.work.block
        if self.began is not None:
            first, start = self.began
            if len(steps) - first < length:
                return
            mine = Block(watch.now() - start, sum(step.rows for step in steps[first:]))
            done = self.done()
            theirs = self.theirs or self.block(range(done - length, done))
            self.pairs.append((mine, theirs))
            self.began = self.theirs = None
        done = self.done()
        if done + length > watch.work.steps:
            return  # no whole block is left
        if self.random.random() < 0.5:
            self.theirs = self.block(range(done, done + length))
        self.began = len(steps), watch.now()

    def done(self) -> int:
        """Batches whose rows the contender has trained on."""
        work = self.watch.work
        rows = sum(step.rows for step in self.watch.course.steps if not step.ooms)
        rows += work.rows * sum(1 for step in self.watch.course.steps if step.ooms)
        return min(rows // work.rows, work.steps)

    def block(self, numbers: range) -> Block:
        """The oracle's steps on these batches; to the contender no time passes."""
        watch, work = self.watch, self.watch.work
        begun, hidden = time.process_time(), watch.hidden
        model = watch.model()
        optimizer = None if watch.optimizer is None else watch.optimizer()
        clean = all(p.grad is None for p in model.parameters())
        watch.quiet = True
        with oomkit.limit_memory(2**50, device="cpu"):
            start = watch.now()
            for number in numbers:
                batch = work.batch(number)
                if optimizer is None:
                    watch.result(number, fixed.predict(work, model, batch[0], self.plan))
                else:
                    fixed.step(work, model, optimizer, batch, self.plan)
            seconds = watch.now() - start
            if clean and optimizer is not None:
                optimizer.zero_grad()  # as the contender left it
        watch.quiet = False
        watch.hidden = hidden + time.process_time() - begun
        return Block(seconds, work.rows * len(numbers))
