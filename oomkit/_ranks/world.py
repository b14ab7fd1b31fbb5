"""The ranks of the default process group: they meet once, and vote from then on.

A vote is a word of each rank, of which all get the largest. On one machine it goes through
shared memory (``csrc/ranks``), else through a gloo group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C

PROTOCOL = 2  # what ranks say to each other; grows when that changes
FINE, TROUBLE, AGAIN, FATAL = 0, 1, 1 << 20, 1 << 40
"""Words. All came well; and one of them with trouble; one has failed; one cannot go on."""
NEVER = (1 << 63) - 1
"""No word is as large."""
_ENDED = range(6)
_CAME, _DEAD, _GONE, _LATE, _STOPPED, _BEHIND = _ENDED  # of csrc/ranks/vote_type.c
_TOLD = range(4)
TOLD, STOP, OTHERS, FAR = _TOLD
"""What becomes of a step that others are told of."""
_PROCESS_DEAD = 2  # of csrc/ranks/vote.h
_A_MOMENT = 1.0
"""Seconds in which a process that has closed its connections is gone."""
_LOST = ("peer", "timed out", "timeout", "connection")
"""Words of torch's errors of a collective that lacks a rank."""
_SHARED = "/dev/shm"
_NUMBERS = 16
"""That a rank can give to be gathered."""
_generations = itertools.count()
_COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object "
    "all_gather_single all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list "
    "gather gather_object monitored_barrier recv recv_object_list reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send send_object_list"
).split()
_FUNCTIONAL = (
    "all_gather_tensor all_gather_tensor_autograd all_reduce all_reduce_coalesced "
    "all_to_all_single all_to_all_single_autograd broadcast permute_tensor "
    "reduce_scatter_tensor reduce_scatter_tensor_autograd"
).split()
_present: World | None = None


def error(text: str, rank: int | None = None) -> _C.RankError:
    """The error of this rank about another one."""
    raised = _C.RankError(text)
    raised.rank = rank
    return raised


def _patience(group: Any) -> datetime.timedelta:
    """How long the user's process group lets one rank wait for another."""
    for device in group._device_types:
        try:
            found = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
        return found if isinstance(found, datetime.timedelta) else dist.default_pg_timeout
    return dist.default_pg_timeout


def _start() -> str:
    """Which start of its job this is: the store of `torchrun` may have keys of earlier ones. Its
    agents count starts each for itself, so that there is no such number on several machines."""
    found = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{start}/" if start is not None and found[0] == found[1] else ""


def _table_bytes(size: int) -> int:
    """Of shared memory, for what is gathered of so many ranks."""
    return size * (_NUMBERS + 1) * 8


def _node() -> str:
    """Ranks with the same one can share memory, and see each other's processes."""
    names = [socket.gethostname(), sys.platform]
    for path in ("/proc/sys/kernel/random/boot_id",):
        with contextlib.suppress(OSError):
            names.append(Path(path).read_text(encoding="ascii").strip())
    for space in ("pid", "mnt"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/ns/{space}"))
    return "/".join(names)


def _largest() -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


class World:
    """The default process group, as one rank sees it."""

    def __init__(self, group: Any, version: str) -> None:
        self.group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.patience = _patience(group)
        self.calls = 0
        self.at_ease: weakref.WeakSet[Any] = weakref.WeakSet()
        """Steps whose last call all ranks came through without trouble, to its update or end."""
        self.thread = 0
        self.present: Any = None
        """What the call that runs agrees on, or None."""
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"oomkit/{_start()}{next(_generations)}"
        self._said = False
        self._vote: _C._Vote | None = None
        self._memory: mmap.mmap | None = None
        self._gathered = 0
        self._gloo: Any = None
        self._pending: list[Any] = []
        self._hello(version)
        self._connect()
        atexit.register(_ends, weakref.ref(self), os.getpid())

    # ---- meeting

    def _hello(self, version: str) -> None:
        """Everybody tells who he is, and looks whether all others are of the same kind."""
        own = {
            "oomkit": version,
            "protocol": PROTOCOL,
            "torch": torch.__version__,
            "world": self.size,
            "node": _node(),
            "process": [os.getpid(), _C._Vote.started(os.getpid())],
        }
        self._store.set(f"{self._key}/{self.rank}", json.dumps(own))
        keys = [f"{self._key}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, self.patience)
        except Exception as failed:  # of torch's own kinds, which depend on the store
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise error(
                f"oomkit waited for the first decorated call of rank(s) {silent} of "
                f"{self.size} for {self.patience}: decorate the step with auto_batch on all "
                "ranks, with the same version of oomkit"
                f"{_C.see('distributed')}",
                silent[0] if silent else None,
            ) from failed
        self.others = [json.loads(self._store.get(key)) for key in keys]
        for rank, other in enumerate(self.others):
            for what in ("oomkit", "protocol", "torch", "world"):
                if other.get(what) != own[what]:
                    raise error(
                        f"oomkit expected the same {what} on all ranks: rank {self.rank} has "
                        f"{own[what]}, rank {rank} has {other.get(what)}"
                        f"{_C.see('distributed')}",
                        rank,
                    )

    def _connect(self) -> None:
        """Shared memory where all ranks can have it, else a gloo group of their own."""
        memory = None
        if len({other["node"] for other in self.others}) == 1:
            memory = self._share()
        if memory is not None:
            buffer, epoch = memory
            self._memory = buffer
            processes = [tuple(other["process"]) for other in self.others]
            self._vote = _C._Vote(buffer, self.size, self.rank, epoch, processes)
        else:
            self._gloo = dist.new_group(backend="gloo", timeout=self.patience)

    def _share(self) -> tuple[mmap.mmap, int] | None:
        """The memory and its epoch, or None where some rank could not map it."""
        size = (_C._Vote.bytes(self.size) + 7) // 8 * 8 + 2 * _table_bytes(self.size)
        path, buffer, epoch = "", None, 0
        with contextlib.suppress(OSError, ValueError):  # then all use gloo
            if self.rank == 0:
                epoch = secrets.randbits(63)
                path, buffer = self._make(size, epoch)
        if self.rank == 0:
            self._store.set(f"{self._key}/memory", json.dumps([path, epoch]))
        else:
            path, epoch = json.loads(self._get("memory"))
            with contextlib.suppress(OSError, ValueError):
                buffer = self._map(path, size)
        self._store.set(f"{self._key}/{self.rank}/mapped", "1" if buffer is not None else "0")
        all_have = all(self._get(f"{rank}/mapped") == b"1" for rank in range(self.size))
        if self.rank == 0 and path:
            with contextlib.suppress(OSError):
                os.unlink(path)  # nobody else can open it, and nothing is left behind
        return (buffer, epoch) if all_have and buffer is not None else None

    def _make(self, size: int, epoch: int) -> tuple[str, mmap.mmap]:
        job = os.environ.get("TORCHELASTIC_RUN_ID", "job")
        name = "".join(c for c in job if c.isalnum())[:32]
        path = f"{_SHARED}/oomkit-{name}-{os.getuid()}-{epoch:016x}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # not later, by a signal
            buffer = mmap.mmap(file, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        _C._Vote.prepare(buffer, self.size, epoch)
        return path, buffer

    def _map(self, path: str, size: int) -> mmap.mmap:
        file = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(file, size)
        finally:
            os.close(file)

    def _get(self, name: str) -> bytes:
        key = f"{self._key}/{name}"
        self._store.wait([key], self.patience)
        return bytes(self._store.get(key))

    def begin(self) -> None:
        """A call that is agreed on: what was said in an earlier one is past."""
        self.calls += 1
        if self._said:
            self.say("")
            self._said = False

    # ---- voting

    @property
    def shared(self) -> bool:
        """Do votes go through shared memory?"""
        return self._vote is not None

    def tell(self, step: int, stop: int) -> int:
        """This rank is about to make a step together with all others, before the next vote."""
        return TOLD if self._vote is None else self._vote.tell(step, stop)

    def vote(
        self,
        word: int,
        matter: int,
        follow: Callable[[int], None] | None = None,
        patience: float | None = None,
    ) -> int:
        """The largest word of all ranks.

        Args:
            word: this rank's.
            matter: what is voted on: must be the same on all, unless one has failed.
            follow: makes a step that others have told of, and tells of it.
            patience: seconds to wait, if not as long as the process group lets ranks wait.

        Raises:
            RankError: a rank cannot go on, does not come, or votes on something else.
        """
        if self._vote is None:
            largest, rank, same = self._vote_by_gloo(word, matter)
        else:
            seconds = self.patience.total_seconds() if patience is None else patience
            ended, largest, rank, alike = self._vote.cast(word, matter, seconds)
            while ended == _BEHIND and follow is not None:
                follow(largest)
                ended, largest, rank, alike = self._vote.go_on(seconds)
            same = bool(alike)
            if ended != _CAME:
                raise self._missing(ended, rank)
        if largest >= FATAL:
            if rank == self.rank:
                return largest
            raise error(
                f"rank {rank} cannot continue: {self.said(rank)}{_C.see('rank-failed')}", rank
            )
        if largest < AGAIN and not same:
            raise error(
                f"ranks are in different calls or at different places of one (rank {self.rank} "
                f"in call {self.calls}): decorated steps must be called alike on all ranks"
                f"{_C.see('distributed')}"
            )
        return largest

    def gather(self, numbers: list[float], matter: int) -> list[list[float]]:
        """Those of each rank, in a vote of its own: at most 16."""
        if len(numbers) > _NUMBERS:
            raise error(
                f"oomkit can gather {_NUMBERS} numbers of each rank, got {len(numbers)}"
                f"{_C.see('weight')}"
            )
        if self._memory is None:
            self.vote(FINE, matter)
            table = torch.zeros(self.size, _NUMBERS + 1, dtype=torch.float64)
            table[self.rank, : len(numbers) + 1] = torch.tensor([len(numbers), *numbers])
            self._gloo.allreduce([table]).wait()
            return [row[1 : int(row[0]) + 1] for row in table.tolist()]
        # Two tables: who is one round ahead cannot write what another one still reads.
        self._gathered += 1
        tables = _table_bytes(self.size)
        begin = len(self._memory) - 2 * tables + self._gathered % 2 * tables
        row = struct.Struct(f"={_NUMBERS + 1}d")
        filled = [float(len(numbers)), *numbers, *[0.0] * (_NUMBERS - len(numbers))]
        row.pack_into(self._memory, begin + self.rank * row.size, *filled)
        self.vote(FINE, matter)
        found = [row.unpack_from(self._memory, begin + r * row.size) for r in range(self.size)]
        return [list(one[1 : int(one[0]) + 1]) for one in found]

    def _vote_by_gloo(self, word: int, matter: int) -> tuple[int, int, bool]:
        # One number for word and rank: the first rank with the largest word wins.
        given = torch.tensor([word * 65536 + 65535 - self.rank, matter, -matter])
        try:
            self._gloo.allreduce([given], _largest()).wait()
        except RuntimeError as failed:
            raise error(
                f"a rank does not come to a vote: {failed}{_C.see('rank-failed')}"
            ) from failed
        packed, most, least = given.tolist()
        return packed >> 16, 65535 - packed % 65536, most == -least

    def _missing(self, ended: int, rank: int) -> _C.RankError:
        process = self.others[rank]["process"][0]
        said = self.said(rank)
        why = {
            _DEAD: f"rank {rank} (process {process}) is dead",
            _GONE: f"rank {rank} (process {process}) has left",
            _LATE: f"rank {rank} (process {process}) has not come for {self.patience}",
            _STOPPED: f"rank {rank} (process {process}) is stopped, and has not come for "
            f"{self.patience}",
        }[ended]
        return error(f"{why}{f': {said}' if said else ''}{_C.see('rank-failed')}", rank)

    def give_up(self, text: str, matter: int) -> None:
        """Vote that this rank cannot go on, and wait for nobody."""
        self.say(text)
        if self._vote is not None:
            self._vote.cast(FATAL, matter, 0.0)
            return
        given = torch.tensor([FATAL * 65536 + 65535 - self.rank, matter, -matter])
        with contextlib.suppress(RuntimeError):
            work = self._gloo.allreduce([given], _largest())
            self._pending.append((work, given))

    # ---- words

    def say(self, text: str, gone: bool = False) -> None:
        """For the others to read when they miss this rank."""
        self._said = True
        if self._vote is not None:
            self._vote.say(text, gone)
        elif not gone:
            with contextlib.suppress(Exception):  # a store that is gone has no readers
                self._store.set(f"{self._key}/{self.rank}/said", text[:2000])

    def said(self, rank: int) -> str:
        if self._vote is not None:
            return self._vote.said(rank)
        with contextlib.suppress(Exception):
            key = f"{self._key}/{rank}/said"
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode()
        return ""

    def absent(self) -> list[str]:
        """What can be seen of others that have failed, in words."""
        found = []
        for rank, other in enumerate(self.others):
            if rank == self.rank:
                continue
            pid, started = other["process"]
            said = self.said(rank)
            seen = _C._Vote.look(pid, started) if self.shared else 0
            if seen:
                how = "dead" if seen == _PROCESS_DEAD else "stopped"
                found.append(f"rank {rank} (process {pid}) is {how}: {said}".rstrip(": "))
            elif said:
                found.append(f"rank {rank} said: {said}")
        return found

    def note(self, exception: BaseException) -> None:
        """Adds the same to an error that a collective may have ended by. The connections of a
        process are closed before it can be seen that it is dead."""
        found = self.absent()
        until = time.monotonic() + _A_MOMENT
        text = str(exception).lower()
        while not found and any(word in text for word in _LOST) and time.monotonic() < until:
            time.sleep(0.005)
            found = self.absent()
        for line in found:
            exception.add_note(f"oomkit: {line}{_C.see('rank-failed')}")


def _ends(world: weakref.ref[World], process: int) -> None:
    """The program has come to its end; a child of it that was forked says nothing."""
    own = world()
    if own is not None and os.getpid() == process:
        own.say(own.said(own.rank) or "its program has ended", gone=True)


_warned: set[tuple[str, int]] = set()


def _look(name: str, where: int) -> None:
    """A collective outside of calls that are agreed on: ranks may have different numbers of parts,
    so that one would wait for another that does not come."""
    text = f"torch.distributed.{name}()"
    if where >= 2:
        raise _C.SplitError(
            f"auto_batch cannot run {text} in a function that is split on this rank: other ranks "
            "may have another number of micro-batches; call it after the function, on its "
            f"result{_C.see('distributed')}"
        )
    if where == 1 and (name, where) not in _warned:
        _warned.add((name, where))
        warnings.warn(
            f"oomkit: {text} is called inside a part of chunks() or map(): ranks may have "
            "different numbers of parts, and one would wait for another; call it after the loop"
            f"{_C.see('distributed')}",
            _C.OomkitWarning,
            stacklevel=4,
        )


def watch() -> None:
    """Have collectives tell of their calls."""
    for name in _COLLECTIVES:
        _watch(dist, name)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    for name in _FUNCTIONAL:
        _watch(functional, name)


def _watch(module: Any, name: str) -> None:
    """Have a function of torch.distributed tell of its calls inside a call that is agreed on."""
    plain = getattr(module, name, None)
    if plain is None or hasattr(plain, "_oomkit_plain"):
        return

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        world = _present
        agreement = None if world is None else world.present
        if world is None or agreement is None:
            _look(name, _C._where())
            return plain(*args, **kwargs)
        if threading.get_ident() != world.thread and not agreement.reducing:
            return plain(*args, **kwargs)
        if agreement.own_collective(name):
            return None if module is dist else args[0]
        try:
            return _C.exempt(lambda: plain(*args, **kwargs))  # the others are in it
        finally:
            agreement.own_collective_made()

    collective._oomkit_plain = plain  # type: ignore[attr-defined]
    setattr(module, name, collective)


def meet() -> World:
    """The present default group; its ranks meet in the first call of each."""
    global _present
    group = dist.distributed_c10d._get_default_group()
    if _present is None or _present.group() is not group:
        version = sys.modules[__name__.partition(".")[0]].__version__
        _present = World(group, version)
        watch()
    _present.thread = threading.get_ident()
    return _present
