"""What all calls that are agreed on have in common: their votes, and how they are left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from .. import _C
from . import matters
from .others import error, is_lost
from .ways import AGAIN, FATAL, FINE, TIGHT, TROUBLE, Follow
from .world import World

PATIENCE = 5.0
"""Seconds that an error waits for ranks that are in a collective, or may begin one."""


class Call:
    """One call of a step."""

    sharded = False
    """Its model is sharded: it is put back before anything else is, by `back()`."""
    stopped = False
    """Another rank has failed, which ended the present attempt by an error."""
    updated = False
    """The call has ended, with all its updates made."""
    trouble = False
    committed = False
    tight = 0
    """How near memory was to its end in an update of some rank, as in csrc/ranks/agree.h."""
    settled = False
    """The updates of all ranks are known to have worked."""
    lost = False
    """Or it is known that one has not, for good."""
    told = False
    """The others, that this rank cannot go on, or this rank by them."""
    own = ""
    """A collective of the step's own that was made."""
    weighs = False
    """It has something to vote on at its begin."""
    reducing = False
    """Collectives are its model's."""

    def __init__(self, world: World, step: object) -> None:
        self.world = world
        self.step = step
        world.begin(self.sharded)
        self.eased = step in world.at_ease
        """All ranks came through its last call without trouble."""

    # ---- told by the engine, in C

    def attempt_begins(self) -> int:
        """Micro-batches, from the first one on, for real or for a proof."""
        return 0

    def micro_begins(self) -> int:
        """One of them, for real or for a proof."""
        return 0

    def proof_begins(self) -> int:
        """Runs of this step that are compared come now; nobody updates before they end."""
        return 0

    def proof_ends(self) -> int:
        return 0

    def back(self) -> int:
        return 0

    def own_collective(self, name: str) -> bool:
        """The step is about to make one itself, as the other ranks are, if none has failed.
        True: it is to be left out."""
        return False

    def own_collective_made(self) -> None:
        """It is made, or has failed."""

    def is_models(self) -> bool:
        """Are collectives that are made now the models', or their hooks'?"""
        return False

    def weigh(self, items: list[float]) -> list[float]:
        """With ``global_weight=``: what this rank's losses, means of so many items, count in a
        mean over ranks that is to be one over the items of all."""
        self.weighs = True
        every = self.world.gather(items, self.matter(matters.WEIGHTS))
        for rank, counted in enumerate(every):
            if len(counted) != len(items):
                raise self.cannot(
                    f"weight= returns {len(items)} numbers here and {len(counted)} on rank {rank}"
                )
            if 0.0 in counted:
                raise self.cannot(f"weight= counts nothing in the batch of rank {rank}")
        totals = [sum(counted) for counted in zip(*every, strict=True)]
        return [self.world.size * n / total for n, total in zip(items, totals, strict=True)]

    # ---- votes

    def matter(self, matter: int) -> int:
        return self.world.calls << 8 | matter

    def vote(self, word: int, matter: int) -> int:
        self.told = True  # unless the vote comes to its end
        largest = self.cast(word, self.matter(matter))
        self.told = False
        return largest

    def cast(self, word: int, matter: int) -> int:
        return self.world.vote(word, matter)

    def asks(self, word: int, matter: int) -> bool:
        """Vote; must this attempt begin again?"""
        return self.vote(word, matter) >= AGAIN

    def agreed_commit(self, tight: int = 0) -> bool:
        """Have all come to the update, which here is `tight`, or to the end?"""
        largest = self.vote((TROUBLE if self.trouble else FINE) + tight * TIGHT, matters.COMMIT)
        if largest >= AGAIN:
            return False
        if largest % TIGHT == TROUBLE:
            self.world.at_ease.discard(self.step)
        elif not self.eased:
            self.world.at_ease.add(self.step)
        self.committed, self.tight = True, largest // TIGHT
        return True

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The same, told when a closure has returned that computes the gradients of an update."""

        def computes() -> Any:
            computed = closure()
            _C._commits()
            return computed

        return computes

    @property
    def unsettled(self) -> bool:
        """Are updates made that are to be voted on, and were not yet?"""
        return self.committed and self.tight > 0 and not self.settled

    def settle(self) -> int:
        """Have the updates of all ranks worked, where one was tight? 1: all are taken back."""
        if not self.unsettled:
            return 0
        self.lost = True  # unless the vote comes to its end
        largest = self.vote(FINE, matters.UPDATED)
        self.lost = False
        if largest >= AGAIN:
            return 1
        self.settled = True
        return 0

    def opens_again(self) -> None:
        """A backward after updates that all have made: more of them follow it on all ranks."""
        self.settled = False

    def settle_first(self) -> None:
        """The same before a collective, to which a rank whose update has failed does not come. One
        that an update makes itself (ZeroRedundancyOptimizer) says nothing of what is left of it,
        so that the vote after it comes all the same. From its first one on it is not repeated."""
        inside = _C._updates()
        if inside and not (self.committed and _C._shares_update()):
            return
        if self.unsettled:
            if self.settle():
                self.stop()
            self.settled = not inside

    def takes_back(self, exception: BaseException) -> bool:
        """With this error the call ends: is its update taken back, as on other ranks?"""
        return self.lost or (self.unsettled and not _is_broken(exception))

    def is_over(self, exception: BaseException) -> bool:
        """Was this an error of the step's own, after the updates of all? One from within them, or
        between two, leaves this rank's parameters apart from those of others."""
        over = self.committed and not self.unsettled and self.updated
        return over and not _is_broken(exception)

    def not_come(self) -> None:
        """All begin again: neither vote on the update has been."""
        self.committed = self.settled = self.lost = False
        self.tight = 0

    def stop(self) -> NoReturn:
        """Ends this rank's attempt, for another one has failed."""
        self.stopped = True
        raise _C.SplitError(
            "another rank has failed, so this attempt ends and starts again. Do not catch "
            f"oomkit's errors in the step{_C.see('let-errors-pass')}"
        )

    def cannot(self, why: str) -> _C.RankError:
        """The error of a rank that cannot go on; the others are told."""
        self.told = True
        self.world.give_up(why, self.matter(matters.COMMIT))
        return self.failure(why)

    def failure(self, why: str) -> _C.RankError:
        """That error, of which the others know."""
        return error(
            f"rank {self.world.rank} cannot continue: {why}{_C.see('rank-failed')}", self.world.rank
        )

    @contextlib.contextmanager
    def owing(self) -> Iterator[None]:
        """A rank that has no memory for what it owes the others cannot go on: those that look at
        words or vote are told; one that waits inside torch ends with this rank's process."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as failed:
            why = "it has no memory for the zeros that it owes to the others' reduction"
            raise self.cannot(f"{why}: {failed}") from failed

    def fails_with(self, follow: Follow) -> None:
        """This rank cannot go on; till the others come to a vote it takes part in what they do."""
        self.world.vote(FATAL, self.matter(matters.COMMIT), follow, PATIENCE)

    def misses(self) -> None:
        """Another rank has failed, and does not come to the collective that this one waits in: it
        waits for a vote, if it has one due."""
        if not self.committed and self.is_waited_for():
            self.vote(FINE, matters.COMMIT)

    def is_waited_for(self) -> bool:
        """Does a rank that cannot go on wait for the others' votes?"""
        return True

    def is_lost(self, exception: BaseException) -> bool:
        """Is it of a collective that lacks a rank, and not of the rows of a micro-batch?"""
        return is_lost(exception)

    def note(self, exception: BaseException) -> str:
        """An error leaves the call, and tells of who is missed. What others are told of it."""
        if isinstance(exception, _C.RankError):
            self.told = True
        else:
            self.world.note(exception)
        return f"{type(exception).__name__}: {exception}"


def _is_broken(exception: BaseException) -> bool:
    """Is it of those after which everything is as it was, or as the error says?"""
    return isinstance(exception, _C.OomkitError | MemoryError | torch.OutOfMemoryError)


def refuse_in_parts(cannot: Callable[[str], Any], name: str) -> Any:
    """The error where a step that is split makes a collective itself."""
    return cannot(
        f"its step calls torch.distributed.{name}(), which all ranks make once, in micro-batches "
        "or in what is compared, so that it can neither be split nor begin again: do that outside "
        "the step, or after the update in its last micro-batch, with verify=False"
    )
