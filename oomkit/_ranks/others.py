"""The other ranks: who they are, what they have said last, and which of them are missing.

On this machine a rank can be seen to have died. Of one on another machine it is known what it has
said, or what its neighbours there have seen of it; of one that nobody has seen, that it does not
answer. For that who misses a rank asks all, in the store, and who waits for anything answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any

from .. import _C

PROCESS_DEAD = 2  # of csrc/ranks/vote.h
_A_MOMENT = 1.0
"""Seconds in which a process that has closed its connections is gone."""
_ANSWERS, _ALL_ANSWER = 3.0, 15.0
"""Seconds in which ranks of other machines that wait for somebody answer, and in which they do
where more than one does not."""
_LOST = ("peer", "timed out", "timeout", "connection")
"""Words of torch's errors of a collective that lacks a rank."""


def error(text: str, rank: int | None = None) -> _C.RankError:
    """The error of this rank about another one."""
    raised = _C.RankError(text)
    raised.rank = rank
    return raised


class Others:
    """All ranks, as one of them sees them.

    Args:
        rank: its own.
        told: what each has told of itself when they met.
        store: of the process group, with all keys below `key`.
    """

    def __init__(self, rank: int, told: list[Any], store: Any, key: str) -> None:
        self.rank = rank
        self.told = told
        self._store = store
        self._key = key
        self.call = 0
        """Which one it is that is agreed on now, counted by each rank."""
        self.vote: _C._Vote | None = None
        """In which ranks of this machine read each other's last words."""
        nodes: dict[str, list[int]] = {}
        for other, one in enumerate(told):
            nodes.setdefault(one["node"], []).append(other)
        self.nodes = list(nodes.values())
        """Ranks by machine; the first of each leads it."""
        self.here = nodes[told[rank]["node"]]
        """Ranks of this machine."""
        self._names: dict[int, int] = {}
        """Of numbers that this rank has kept."""

    def process(self, rank: int) -> str:
        return f"rank {rank} (process {self.told[rank]['process'][0]})"

    # ---- words

    def say(self, text: str, gone: bool = False) -> None:
        """For the others to read when they miss this rank. They may come to it when this one's
        program has caught the error and is in its next call, so that nothing takes it away."""
        text = f"{self.call} {text}"
        if self.vote is not None:
            self.vote.say(text, gone)
        if not gone and (self.vote is None or len(self.nodes) > 1):
            self._tell(f"{self.rank}/said", text[:2000])

    def ends(self, text: str, failed: BaseException | None) -> None:
        """Its program ends, by an error or not. One that it has by another rank says nothing of
        this one."""
        if failed is not None and not isinstance(failed, _C.RankError) and not is_lost(failed):
            self.say(text)
            self.saw(self.rank, "is dead")
        self.say(text, gone=True)

    def said(self, rank: int, before: int = 1) -> str:
        """Its last words, in this call or in so many before it."""
        if self.vote is not None and rank in self.here:
            words = self.vote.said(self.here.index(rank))
        else:
            words = self._told(f"{rank}/said")
        call, _, text = words.partition(" ")
        return text if call and int(call) >= self.call - before else ""

    def _tell(self, name: str, text: str) -> None:
        with contextlib.suppress(Exception):  # a store that is gone has no readers
            self._store.set(f"{self._key}/{name}", text)

    def _told(self, name: str) -> str:
        key = f"{self._key}/{name}"
        with contextlib.suppress(Exception):
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode(errors="replace")
        return ""

    # ---- steps that ranks of several machines make together

    def write_step(self, machine: int, place: int, at: tuple[int, int], step: int) -> None:
        """Of a machine, told by its first rank: `at` says which it is, `place` where it goes."""
        self._store.set(f"{self._key}/steps/{machine}/{place}", f"{at[0]} {at[1]} {step}")

    def read_step(self, machine: int, place: int) -> tuple[tuple[int, int], int]:
        """The last one that is there; (-1, -1) is before all."""
        key = f"{self._key}/steps/{machine}/{place}"
        if not self._store.check([key]):
            return (-1, -1), 0
        vote, made, step = map(int, self._store.get(key).split())
        return (vote, made), step

    # ---- numbers that are too long for a step

    def keep(self, number: int, bits: int) -> int:
        """A name of so many bits, by which all ranks find that number from now on. Who has the
        same number gets the same name."""
        if number not in self._names:
            text = f"{number:x}"
            name = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            while True:
                name %= 1 << bits
                # The first that comes has it, and what another one has there stays for ever.
                if self._store.compare_set(self._number(name), "", text) == text.encode():
                    break
                name += 1
            self._names[number] = name
        return self._names[number]

    def kept(self, name: int) -> int:
        """What some rank has kept under that name."""
        return int(self._store.get(self._number(name)), 16)

    def _number(self, name: int) -> str:
        return f"{self._key}/numbers/{name:x}"

    # ---- who is missing

    def saw(self, rank: int, how: str, late: bool = False) -> None:
        """What this rank has seen of a neighbour is told to those who cannot see it."""
        if len(self.nodes) > 1:
            self._tell(f"{rank}/{'late' if late else 'seen'}", f"{self.process(rank)} {how}")

    def relay(self, text: str) -> None:
        """An error of a leader, whose neighbours are to have it, too."""
        self._tell(f"{self.rank}/relayed", text)

    def relayed(self, leader: int) -> str:
        return (
            self._told(f"{leader}/relayed") or "a rank of another machine does not come to a vote"
        )

    def known(self, rank: int) -> str:
        """Why it does not go on."""
        return self.said(rank) or self._told(f"{rank}/seen")

    def _every(self) -> list[int]:
        return [rank for rank in range(len(self.told)) if rank != self.rank]

    def absent(self) -> list[tuple[int, str]]:
        """Others that have failed, and what is known of it."""
        found = []
        for rank in self._every():
            said = self.said(rank)
            seen = self._look(rank) if rank in self.here else self._told(f"{rank}/seen")
            if seen:
                found.append((rank, f"{seen}: {said}".rstrip(": ")))
            elif self.said(rank, 0) and not self.has_answered(rank):
                found.append((rank, f"rank {rank} said: {said}"))
        return found

    def failed(self) -> tuple[int, str] | None:
        """One that has told of an error in this call, and which."""
        for rank in self._every():
            said = self.said(rank, 0)
            if said:
                return rank, said
        return None

    def _look(self, rank: int) -> str:
        pid, started = self.told[rank]["process"]
        state = _C._Vote.look(pid, started)
        if not state or ((len(self.nodes) > 1 or self.vote is None) and self.has_answered(rank)):
            return ""  # who has answered has left by the same error
        how = "is dead" if state == PROCESS_DEAD else "is stopped"
        self.saw(rank, how)
        return f"{self.process(rank)} {how}"

    def is_asked(self) -> bool:
        """Does anybody miss a rank?"""
        return self._told("missing") != ""

    def has_answered(self, rank: int) -> bool:
        return self._told(f"{rank}/here") != ""

    def _silent(self) -> list[int]:
        """Ranks of other machines from which nobody has answered; where their neighbours
        have, these would have seen it."""
        found = []
        for node in self.nodes:
            if node is not self.here and not any(map(self.has_answered, node)):
                found += node
        return found

    def search(self) -> tuple[list[tuple[int, str]], list[int]]:
        """Ranks that have failed, as soon as there are any, or are late, or do not answer."""
        many = len(self.nodes) > 1
        if many or self.vote is None:
            self._tell(f"{self.rank}/here", "1")
            self._tell("missing", "1")
        begin = time.monotonic()
        found, waits = self.absent(), _ANSWERS if many else _A_MOMENT
        while not found and time.monotonic() < begin + waits:
            time.sleep(0.02 if many else 0.005)
            found = self.absent()
            if many and waits < _ALL_ANSWER and time.monotonic() >= begin + waits:
                waits = _ALL_ANSWER if len(self._silent()) > 1 else waits
        if many and not found:
            late = [(rank, self._told(f"{rank}/late")) for rank in self._every()]
            found = [(rank, text) for rank, text in late if text and not self.has_answered(rank)]
        return found, [] if found or not many else self._silent()

    def missed(self, why: object) -> _C.RankError:
        """The error of a vote to which somebody does not come."""
        found, silent = self.search()
        if found:
            rank, text = found[0]
            return error(f"{text}{_C.see('rank-failed')}", rank)
        if silent:
            one = silent[0] if len(silent) == 1 else None
            return error(f"{_silence(silent)}: {why}{_C.see('rank-failed')}", one)
        return error(f"a rank does not come to a vote: {why}{_C.see('rank-failed')}")

    def note(self, exception: BaseException) -> None:
        """Adds the same to an error that a collective may have ended by. The connections of a
        process are closed before it can be seen that it is dead."""
        found, silent = self.search() if is_lost(exception) else (self.absent(), [])
        lines = [line for _, line in found] + ([_silence(silent)] if silent else [])
        for line in lines:
            exception.add_note(f"oomkit: {line}{_C.see('rank-failed')}")


def is_lost(exception: BaseException) -> bool:
    """Does a collective end so that lacks a rank?"""
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(word in text for word in _LOST)


def _silence(ranks: list[int]) -> str:
    names = " and ".join(f"rank {rank}" for rank in ranks)
    return f"{names} of another machine {'does' if len(ranks) == 1 else 'do'} not answer"
