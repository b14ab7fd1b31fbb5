"""How a vote goes from rank to rank: each gives a word, and all get the largest.

Ranks of one machine vote in memory that they share (``csrc/ranks``). With several machines the
ranks of each do so, then the first of each vote over gloo, and give the others of theirs what
came of it. Where no memory is to be had all vote over gloo.

What ranks of a machine tell each other of their steps, the first of each writes into the store of
the process group, where first ranks that wait look for those of other machines. They make them,
and so do the others of their machine. Without memory each rank writes and looks there for itself.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import mmap
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .others import PROCESS_DEAD, Others, error

FINE, TROUBLE, AGAIN, FATAL = 0, 1, 1 << 20, 1 << 40
"""Words. All came well; and one of them with trouble; one has failed; one cannot go on."""
TIGHT = 2
"""To be added to the first two, times how near memory is to its end in an update."""
ANY = 0
"""The matter of who votes on whatever the others vote on."""
NEVER = (1 << 63) - 1
"""No word is as large."""
_ENDED = range(6)
_CAME, _DEAD, _GONE, _LATE, _STOPPED, _BEHIND = _ENDED  # of csrc/ranks/vote_type.c
_TOLD = range(4)
TOLD, STOP, OTHERS, FAR = _TOLD
"""What becomes of a step that others are told of."""
_NUMBERS = 16
"""That a rank can give to be gathered."""
_NOTHING = -1
"""The word of who only waits for that of another."""
_LOST = 1 << 62
"""From here on, with its number: a rank that does not come."""
_LOOKS = 0.25
"""Seconds between two looks at what others have told; later more."""
_MOMENT = 0.002
"""Seconds between two looks at what ranks of other machines do together, by one who waits."""
_STEPS = 1024
"""Of another machine's that are still there to be read: as many as csrc/ranks/vote.h keeps."""
_RANKS = 1 << 16
_LEAST = -(1 << 62)
"""No matter is as small."""
_WAITED = {_LATE: "has not come to a vote", _STOPPED: "is stopped"}

Voted = tuple[int, int, bool]
"""The largest word, the first rank that gave it, and whether all voted on the same."""
Follow = Callable[[int], None]
Vote = Callable[[], int]
Meanwhile = Callable[[], bool]
"""What is done while a vote lasts: was there anything?"""


def table_bytes(size: int) -> int:
    """Of shared memory, for what is gathered of so many ranks."""
    return size * (_NUMBERS + 1) * 8


def memory_bytes(ranks: int, size: int) -> int:
    """Of what `ranks` of `size` share."""
    return (_C._Vote.bytes(ranks) + 7) // 8 * 8 + 2 * table_bytes(size)


def _check_numbers(numbers: list[float]) -> None:
    if len(numbers) > _NUMBERS:
        raise error(
            f"oomkit can gather {_NUMBERS} numbers of each rank, got {len(numbers)}"
            f"{_C.see('weight')}"
        )


def _packed(word: int, rank: int) -> int:
    """One number for both: of ranks with the largest word the first wins."""
    return word * _RANKS + _RANKS - 1 - rank


def _unpacked(packed: int) -> tuple[int, int]:
    return packed // _RANKS, _RANKS - 1 - packed % _RANKS


class Shared:
    """Ranks of one machine, in memory that they share."""

    shared = True

    def __init__(
        self, others: Others, patience: datetime.timedelta, memory: mmap.mmap, epoch: int
    ) -> None:
        self.others, self.patience = others, patience
        self.ranks = others.here
        self._memory = memory
        self._gathered = 0
        processes = [tuple(others.told[rank]["process"]) for rank in self.ranks]
        own = self.ranks.index(others.rank)
        self.own = _C._Vote(memory, len(self.ranks), own, epoch, processes)
        others.vote = self.own

    def tell(self, step: int, stop: int) -> int:
        return self.own.tell(step, stop)

    def vote(self, word: int, matter: int, follow: Follow | None, seconds: float) -> Voted:
        ended, largest, rank, same = self.own.cast(word, matter, seconds)
        while ended == _BEHIND and follow is not None:
            follow(largest)
            ended, largest, rank, same = self.own.go_on(seconds)
        if ended != _CAME:
            raise self._missing(ended, rank)
        return largest, self.ranks[rank], bool(same)

    def matter(self) -> int:
        """Of the last vote: what some rank has voted on."""
        return max(self.own.tag(local) for local in range(len(self.ranks)))

    def give_up(self, matter: int) -> None:
        self.own.cast(FATAL, matter, 0.0)

    def _missing(self, ended: int, local: int) -> _C.RankError:
        rank = self.ranks[local]
        said = self.others.said(rank)
        how = {
            _DEAD: "is dead",
            _GONE: "has left",
            _LATE: f"has not come for {self.patience}",
            _STOPPED: f"is stopped, and has not come for {self.patience}",
        }[ended]
        self.others.saw(rank, how, ended == _LATE)
        text = f"{self.others.process(rank)} {how}{f': {said}' if said else ''}"
        return error(f"{text}{_C.see('rank-failed')}", rank)

    # ---- numbers of each

    def gather(self, numbers: list[float], vote: Vote) -> list[list[float]]:
        self.put(numbers)
        vote()
        return self.rows()

    def _row(self, rank: int) -> memoryview:
        # Two tables: who is one round ahead cannot write what another one still reads.
        size = table_bytes(len(self.others.told))
        begin = len(self._memory) - 2 * size + self._gathered % 2 * size
        return memoryview(self._memory)[begin + rank * table_bytes(1) :][: table_bytes(1)]

    def put(self, numbers: list[float]) -> None:
        """This rank's, for the others of this machine."""
        _check_numbers(numbers)
        self._gathered += 1
        filled = [float(len(numbers)), *numbers, *[0.0] * (_NUMBERS - len(numbers))]
        struct.pack_into(f"={_NUMBERS + 1}d", self._row(self.others.rank), 0, *filled)

    def rows(self) -> list[list[float]]:
        found = []
        for rank in range(len(self.others.told)):
            count, *row = struct.unpack(f"={_NUMBERS + 1}d", self._row(rank))
            found.append(row[: int(count)])
        return found

    def table(self) -> torch.Tensor:
        """What has been put, of all, to be written to as well."""
        size = len(self.others.told)
        rows = [torch.frombuffer(self._row(rank), dtype=torch.float64) for rank in range(size)]
        return torch.stack(rows)

    def fill(self, table: torch.Tensor) -> None:
        for rank, row in enumerate(table.tolist()):
            struct.pack_into(f"={_NUMBERS + 1}d", self._row(rank), 0, *row)


class Steps:
    """Those that ranks which share no memory make together: each place of them, a machine or a
    rank, tells of its own in the store of the process group."""

    def __init__(self, others: Others, place: int, places: int) -> None:
        self._others = others
        self._place = place
        self._elsewhere = [other for other in range(places) if other != place]
        self._votes = 0
        self._made = 0  # since the last one

    def _at(self) -> tuple[int, int]:
        return self._votes, self._made

    def made(self, step: int, tells: bool) -> None:
        if tells:
            self._others.write_step(self._place, self._made % _STEPS, self._at(), step)
        self._made += 1

    def voted(self) -> None:
        self._votes, self._made = self._votes + 1, 0

    def found(self) -> int | None:
        """The next one, if another place has begun it."""
        for place in self._elsewhere:
            at, step = self._others.read_step(place, self._made % _STEPS)
            if at == self._at():
                return step
            if at[0] == self._votes and at[1] > self._made:
                raise error(f"ranks elsewhere are too far ahead{_C.see('distributed')}")
        return None


class Gloo:
    """Ranks of a gloo group."""

    shared = False
    follows = False
    """Ranks tell each other of the steps that they make together."""

    def __init__(self, others: Others, patience: datetime.timedelta, group: Any) -> None:
        self.others, self.patience = others, patience
        self.steps = Steps(others, others.rank, len(others.told))
        self._group = group
        self._pending: list[Any] = []
        self._matter = ANY

    def tell(self, step: int, stop: int) -> int:
        if self.follows:
            self.steps.made(step, tells=True)
        return TOLD

    def _elsewhere(self, follow: Follow) -> bool:
        """Make the next step that another rank has begun, if there is one."""
        step = self.steps.found()
        if step is not None:
            follow(step)
        return step is not None

    def vote(self, word: int, matter: int, follow: Follow | None, seconds: float) -> Voted:
        meanwhile = None
        if follow is not None and self.follows:
            meanwhile = functools.partial(self._elsewhere, follow)
        try:
            return self.largest(word, self.others.rank, matter, True, meanwhile)
        finally:
            self.steps.voted()

    def largest(
        self, word: int, rank: int, matter: int, same: bool, meanwhile: Meanwhile | None = None
    ) -> Voted:
        """The same of a word that is another rank's, who may have been at odds already."""
        both = (_LEAST, _LEAST) if matter == ANY else (matter + (not same), -matter)
        given = torch.tensor([_packed(word, rank), *both])
        self._wait(self._group.allreduce([given], _of(dist.ReduceOp.MAX)), meanwhile)
        packed, self._matter, least = given.tolist()
        return *_unpacked(packed), self._matter in (-least, _LEAST)

    def matter(self) -> int:
        return self._matter

    def give_up(self, matter: int) -> None:
        self.steps.voted()
        self.post(self.others.rank, matter)

    def post(self, rank: int, matter: int) -> None:
        """That a rank cannot go on; it waits for nobody."""
        given = torch.tensor([_packed(FATAL, rank), matter, -matter])
        with contextlib.suppress(RuntimeError):
            work = self._group.allreduce([given], _of(dist.ReduceOp.MAX))
            self._pending.append((work, given))

    def gather(self, numbers: list[float], vote: Vote) -> list[list[float]]:
        _check_numbers(numbers)
        vote()
        size = len(self.others.told)
        table = torch.zeros(size, _NUMBERS + 1, dtype=torch.float64)
        table[self.others.rank, : len(numbers) + 1] = torch.tensor([len(numbers), *numbers])
        return [row[1 : int(row[0]) + 1] for row in self.sum(table).tolist()]

    def sum(self, table: torch.Tensor) -> torch.Tensor:
        self._wait(self._group.allreduce([table], _of(dist.ReduceOp.SUM)))
        return table

    def _wait(self, work: Any, meanwhile: Meanwhile | None = None) -> None:
        """Until it is done, or somebody is seen to be missing."""
        until = time.monotonic() + self.patience.total_seconds()
        look = _LOOKS if meanwhile is None else _MOMENT
        asks = time.monotonic() + _LOOKS
        while True:
            over = work.is_completed()  # then it has not only taken longer than one look
            try:
                work.wait(datetime.timedelta(seconds=look))
                return
            except RuntimeError as failed:
                now = time.monotonic()
                asked = now >= asks and self.others.is_asked()
                if over or now >= until or asked:
                    raise self.others.missed(failed) from failed
            if meanwhile is None:
                look = min(2 * look, 1.0)
            elif not meanwhile() and now >= asks:
                asks = now + _LOOKS


def _of(operation: Any) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = operation
    return options


class Nodes:
    """Ranks of several machines: those of each in memory, then the first of each over gloo."""

    shared = False
    follows = False
    """Ranks tell each other of the steps that they make together, also over machines."""

    def __init__(self, others: Others, within: Shared, leaders: Gloo) -> None:
        self.others = others
        self.within, self.leaders = within, leaders
        self.leads = others.here[0] == others.rank
        self.steps = Steps(others, others.nodes.index(others.here), len(others.nodes))

    def tell(self, step: int, stop: int) -> int:
        if not self.follows:
            return TOLD
        told = self.within.tell(step, stop)
        if told == TOLD:
            self.steps.made(step, tells=self.leads)
        return told

    def _elsewhere(self, follow: Follow) -> bool:
        """Make the next step that ranks of another machine have begun, if there is one."""
        step = self.steps.found()
        # Others of this machine are told of it by this rank alone: who has left the round that it
        # waits in would not make it. Where that may be, it is made in the next one.
        if step is None or not self.within.own.hold():
            return False
        try:
            follow(step)
        finally:
            self.within.own.release()
        return True

    def vote(self, word: int, matter: int, follow: Follow | None, seconds: float) -> Voted:
        follow = follow if self.follows else None
        try:
            try:
                voted = self._here(word, matter, seconds, follow)
            except _C.RankError as missed:
                if self.leads and missed.rank is not None:
                    self.leaders.post(missed.rank, matter)
                raise
            if voted[0] >= FATAL and follow is None:  # the others need nothing of ours
                if self.leads:
                    self.leaders.post(voted[1], matter)
                return voted
            return self._over(voted, matter, seconds, follow)
        finally:
            self.steps.voted()

    def _over(self, voted: Voted, matter: int, seconds: float, follow: Follow | None) -> Voted:
        """The same of all machines, which the first rank here learns and tells."""
        word, failure = _NOTHING, None
        meanwhile = None if follow is None else functools.partial(self._elsewhere, follow)
        if self.leads:
            try:
                matter = self.within.matter()
                largest, rank, same = self.leaders.largest(*voted[:2], matter, voted[2], meanwhile)
                matter, word = self.leaders.matter(), _packed(largest, rank) * 2 + same
            except _C.RankError as missed:
                failure = missed
                self.others.relay(str(missed).partition(_C.see("rank-failed"))[0])
                word = _LOST + (0 if missed.rank is None else missed.rank + 1)
        try:
            told, leader, _ = self._here(word, matter, 2 * seconds + 10.0, follow)
        except _C.RankError as missed:
            raise (failure or missed) from None
        if failure is not None:
            raise failure
        if told >= _LOST:
            text = self.others.relayed(leader)
            raise error(
                f"{text}{_C.see('rank-failed')}", told - _LOST - 1 if told > _LOST else None
            )
        return *_unpacked(told // 2), bool(told % 2)

    def matter(self) -> int:
        return self.within.matter()

    def _here(self, word: int, matter: int, seconds: float, follow: Follow | None) -> Voted:
        """A vote of this machine alone, which ends when ranks of another one miss somebody."""
        until = time.monotonic() + seconds
        looks = follow is not None and self.leads  # at other machines, again and again
        rest = _MOMENT if looks else _LOOKS
        asks = time.monotonic() + _LOOKS
        ended, largest, rank, same = self.within.own.cast(word, matter, rest, True)
        while ended == _BEHIND or (ended in (_LATE, _STOPPED) and time.monotonic() < until):
            if ended == _BEHIND and follow is not None:
                follow(largest)
            elif not (looks and follow is not None and self._elsewhere(follow)):
                due = time.monotonic() >= asks
                self._check(ended, self.within.ranks[rank], due)
                asks += _LOOKS if due else 0.0
                rest = rest if looks else min(2 * rest, 1.0)
            ended, largest, rank, same = self.within.own.go_on(rest)
        if ended != _CAME:
            raise self.within._missing(ended, rank)
        return largest, self.within.ranks[rank], bool(same)

    def _check(self, ended: int, missing: int, asks: bool) -> None:
        """Is a rank of this machine that has not come not to be waited for?"""
        if _C._Vote.look(*self.others.told[missing]["process"]) == PROCESS_DEAD:
            raise self.within._missing(_DEAD, self.within.ranks.index(missing))
        if asks and self.others.is_asked() and not self.others.has_answered(missing):
            self.others.saw(missing, _WAITED[ended], ended == _LATE)
            raise self.others.missed("ranks of another machine miss a rank")

    def give_up(self, matter: int) -> None:
        self.steps.voted()
        self.within.give_up(matter)
        if self.leads:
            self.leaders.give_up(matter)

    def gather(self, numbers: list[float], vote: Vote) -> list[list[float]]:
        self.within.put(numbers)
        vote()
        if self.leads:
            table = self.within.table()
            for rank in range(len(table)):
                if rank not in self.others.here:
                    table[rank] = 0.0
            self.within.fill(self.leaders.sum(table))
        vote()
        return self.within.rows()
