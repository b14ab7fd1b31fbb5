"""The ranks of the default process group: they meet once, and vote from then on.

How a vote goes from rank to rank is in ``ways.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import json
import logging
import math
import mmap
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from . import parts
from .others import Others, error
from .ways import AGAIN, FATAL, FINE, Follow, Gloo, Nodes, Shared, memory_bytes

PROTOCOL = 7  # what ranks say to each other; grows when that changes
_SHARED = "/dev/shm"
_generations = itertools.count()
_COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object "
    "all_gather_single all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list "
    "gather gather_object monitored_barrier recv recv_object_list reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send send_object_list"
).split()
_FUNCTIONAL = (
    "all_gather_into_tensor_coalesced all_gather_tensor all_gather_tensor_autograd all_reduce "
    "all_reduce_coalesced all_to_all_single all_to_all_single_autograd broadcast permute_tensor "
    "reduce_scatter_tensor reduce_scatter_tensor_autograd reduce_scatter_tensor_coalesced"
).split()
_METHODS = (
    "_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced "
    "all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced allreduce "
    "allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier recv "
    "recv_anysource reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced scatter send"
).split()
_OF_GROUP = "ProcessGroup."
_LIBRARIES = frozenset({"torch", __name__.partition(".")[0]})
_POINT_TO_POINT = frozenset(
    {"recv", "recv_object_list", "send", "send_object_list"}
    | {_OF_GROUP + name for name in ("recv", "recv_anysource", "send")}
)
"""Which gloo closes the connections of where a wait for them comes to its limit."""
_LOOKS = datetime.timedelta(seconds=0.25)
"""Between two looks, in a collective of a step's own, for a rank that has failed in this call."""
_NO_LIMIT = datetime.timedelta(0)
_LEAVE = 0.05
"""Seconds without the interpreter's lock at the end of a program that had ranks. Threads of gloo
take it to free the tensors of a collective that is over, and where they still wait for it when the
interpreter goes down, torch 2.13 aborts: a job that was fine counts as failed."""
_ENDED = "its program has ended"
_present: World | None = None


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


def _differs(own: int, kind: dict[str, Any], told: list[Any]) -> tuple[str, int] | None:
    """What another rank has told of itself that is not this one's, and which rank it is."""
    for rank, other in enumerate(told):
        for what in ("oomkit", "protocol", "torch", "world", "job"):
            if other.get(what) != kind[what]:
                return (
                    f"oomkit expected the same {what} on all ranks: rank {own} has "
                    f"{kind[what]}, rank {rank} has {other.get(what)}",
                    rank,
                )
    return None


class World:
    """The default process group, as one rank sees it."""

    def __init__(self, group: Any, version: str) -> None:
        self.group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.patience = _patience(group)
        self._seconds = self.patience.total_seconds()
        self.calls = 0
        self.at_ease: weakref.WeakSet[Any] = weakref.WeakSet()
        """Steps whose last call all ranks came through without trouble, to its update or end."""
        self.apart: weakref.WeakSet[Any] = weakref.WeakSet()
        """Steps with collectives of their own in a backward, beside which no reduction runs."""
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models of DistributedDataParallel that calls were agreed on over."""
        self.thread = 0
        self.present: Any = None
        """What the call that runs agrees on, or None."""
        self.hooked: Any = None
        """The reducer whose hook, which makes any number of collectives, runs in any thread."""
        self.kept: Any = None
        """Parts of the others' reductions that they had not come to when a call ended."""
        self._makes = False
        """A collective of the step's own is made now, in this call's thread."""
        self._later: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those of the step's own that are waited for later."""
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"oomkit/{_start()}{next(_generations)}"
        self.others = self._hello(version)
        self._way = self._connect()
        _C.rank_is(self.rank)
        atexit.register(_ends, weakref.ref(self), os.getpid())

    # ---- meeting

    def _hello(self, version: str) -> Others:
        """Everybody tells who he is, and looks whether all others are of the same kind."""
        own = {
            "oomkit": version,
            "protocol": PROTOCOL,
            "torch": torch.__version__,
            "world": self.size,
            "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
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
        told = [json.loads(self._store.get(key)) for key in keys]
        differs = _differs(self.rank, own, told)
        self._all_alike(differs)
        return Others(self.rank, told, self._store, self._key)

    def _all_alike(self, differs: tuple[str, int] | None) -> None:
        """Nobody begins a collective before all have seen that all are of one kind: what one has
        told of itself another may have read before somebody else's took its place."""
        self._store.set(f"{self._key}/{self.rank}/alike", differs[0] if differs else "")
        if differs is not None:
            raise error(f"{differs[0]}{_C.see('distributed')}", differs[1])
        for rank in range(self.size):
            why = self._get(f"{rank}/alike").decode(errors="replace")
            if why:
                raise error(f"rank {rank} cannot continue: {why}{_C.see('distributed')}", rank)

    def _connect(self) -> Shared | Gloo | Nodes:
        """Shared memory where the ranks of each machine can have it, else a gloo group of all."""
        nodes = self.others.nodes
        memory = self._share()
        if memory is None:
            group = dist.new_group(backend="gloo", timeout=self.patience)
            return Gloo(self.others, self.patience, group)
        within = Shared(self.others, self.patience, *memory)
        if len(nodes) == 1:
            return within
        first = [node[0] for node in nodes]
        group = dist.new_group(first, backend="gloo", timeout=self.patience)
        return Nodes(self.others, within, Gloo(self.others, self.patience, group))

    def _share(self) -> tuple[mmap.mmap, int] | None:
        """The memory and its epoch, or None where some rank could not map it."""
        here = self.others.here
        size = memory_bytes(len(here), self.size)
        path, buffer, epoch = "", None, 0
        with contextlib.suppress(OSError, ValueError):  # then all use gloo
            if self.rank == here[0]:
                epoch = secrets.randbits(63)
                path, buffer = self._make(size, epoch)
        if self.rank == here[0]:
            self._store.set(f"{self._key}/{self.rank}/memory", json.dumps([path, epoch]))
        else:
            path, epoch = json.loads(self._get(f"{here[0]}/memory"))
            with contextlib.suppress(OSError, ValueError):
                buffer = self._map(path, size)
        try:
            self._store.set(f"{self._key}/{self.rank}/mapped", "1" if buffer is not None else "0")
            all_have = all(self._get(f"{rank}/mapped") == b"1" for rank in range(self.size))
        finally:  # also where a rank does not come
            if self.rank == here[0] and path:
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
        _C._Vote.prepare(buffer, len(self.others.here), epoch)
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

    def enters(self) -> None:
        """A call in this thread."""
        self.thread = threading.get_ident()

    def begin(self, follows: bool) -> None:
        """A call that is agreed on, of a model that is sharded or of another one."""
        if not isinstance(self._way, Shared):
            self._way.follows = follows
        self.calls += 1
        self.others.call = self.calls
        self._later.clear()

    # ---- voting

    @property
    def shared(self) -> bool:
        """Do all ranks share memory?"""
        return self._way.shared

    @property
    def machines(self) -> int:
        return len(self.others.nodes)

    @property
    def way(self) -> str:
        """How votes go: "Shared", "Nodes" or "Gloo"."""
        return type(self._way).__name__

    def tell(self, step: int, stop: int) -> int:
        """This rank is about to make a step together with all others, before the next vote."""
        return self._way.tell(step, stop)

    def vote(
        self,
        word: int,
        matter: int,
        follow: Follow | None = None,
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
        seconds = self._seconds if patience is None else patience
        largest, rank, same = self._way.vote(word, matter, follow, seconds)
        if largest >= FATAL:
            if rank == self.rank:
                return largest
            why = self.others.known(rank)
            raise error(f"rank {rank} cannot continue: {why}{_C.see('rank-failed')}", rank)
        if largest < AGAIN and not same:
            raise error(
                f"ranks are in different calls or at different places of one (rank {self.rank} "
                f"in call {self.calls}): decorated steps must be called alike on all ranks"
                f"{_C.see('distributed')}"
            )
        return largest

    def voted_on(self) -> int:
        """The matter of the last vote, in which this rank voted on any."""
        return self._way.matter()

    def gather(self, numbers: list[float], matter: int) -> list[list[float]]:
        """Those of each rank, in a vote of its own: at most 16."""
        return self._way.gather(numbers, lambda: self.vote(FINE, matter))

    def give_up(self, text: str, matter: int) -> None:
        """Vote that this rank cannot go on, and wait for nobody."""
        self.say(text)
        self._way.give_up(matter)

    # ---- collectives of a step's own

    def make(self, name: str, make: Callable[[], Any]) -> Any:
        """One of them, in which the others are, outside the budget."""
        self._makes = name not in _POINT_TO_POINT
        try:
            made = _C.exempt(make)
        finally:
            self._makes = False
        if isinstance(made, dist.Work):
            self._later.add(made)
        return made

    def wait(self, work: Any, plain: Callable[..., Any], limit: datetime.timedelta) -> Any:
        """For one of them, for as long as `limit`, if that is not 0. Gloo has no means to end what
        a rank does not come to: so a rank that waits looks for others that have failed in this
        call, before the update of all, and ends by their error."""
        groups = dist.distributed_c10d._world.pg_map
        ours = threading.get_ident() == self.thread and (self._makes or work in self._later)
        if not ours or any(dist.get_backend(group) != "gloo" for group in groups):
            return plain(work, limit)
        until = time.monotonic() + (limit.total_seconds() or math.inf)
        while True:
            over = work.is_completed()  # then an error is its own, and not that it takes longer
            try:
                return plain(work, min(limit, _LOOKS) if limit else _LOOKS)
            except RuntimeError:
                if over or time.monotonic() >= until:
                    raise
            failed = self.others.failed()
            if failed is not None:
                self.present.misses()
                raise error(
                    f"rank {failed[0]} cannot continue: {failed[1]}{_C.see('rank-failed')}",
                    failed[0],
                )

    # ---- words

    def say(self, text: str) -> None:
        """For the others to read when they miss this rank."""
        self.others.say(text)

    def note(self, exception: BaseException) -> None:
        """Adds to an error that a collective may have ended by who is missing."""
        self.others.note(exception)


def _ends(world: weakref.ref[World], process: int) -> None:
    """The program has come to its end; a child of it that was forked says nothing."""
    if os.getpid() == process:
        time.sleep(_LEAVE)
    own = world()
    if own is not None and os.getpid() == process:
        failed = getattr(sys, "last_value", None)  # which nobody has caught
        how, other = _ENDED, own.others.failed()
        if failed is None and other is not None and other[1] != _ENDED:  # in a last update, say
            logging.getLogger("oomkit").error(
                "rank %d has failed in the last step: %s%s", *other, _C.see("rank-failed")
            )
        if failed is not None:
            how += f" after {type(failed).__name__}: {failed}"
        own.others.ends(own.others.said(own.rank) or how, failed)


def _look(name: str, where: int) -> None:
    """A collective outside of calls that are agreed on: ranks may have different numbers of parts,
    so that one would wait for another that does not come."""
    if where >= 2:
        text = f"torch.distributed.{name}()"
        raise _C.SplitError(
            f"auto_batch cannot run {text} in a function that is split on this rank: other ranks "
            "may have another number of micro-batches; call it after the function, on its "
            f"result{_C.see('distributed')}"
        )
    if where == parts.IN_PART:
        parts.function(name)


def watch() -> None:
    """Have collectives tell of their calls."""
    for name in _COLLECTIVES:
        _watch(dist, name)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    for name in _FUNCTIONAL:
        # Of torch 2.13, where the other calls it.
        single = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
        _watch(functional, single if hasattr(functional, single) else name)
    for name in _METHODS:
        _watch(dist.ProcessGroup, name)
        _leave_to_subclasses(name)
    _watch_waits()
    parts.watch()


def _asks_itself() -> bool:
    """Has torch, or oomkit, called a method of a group? What they do by it is told of already."""
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES


def _leave_to_subclasses(name: str) -> None:
    """A group of a class in Python, whose method of C++ looks for one in Python to call: it is not
    ours. pybind11 looks whether the frame it is called from has that name, and the same self."""
    watched: Any = getattr(dist.ProcessGroup, name, None)
    plain = getattr(watched, "_oomkit_plain", None)
    if plain is None or watched.__code__.co_name == name:
        return

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not dist.ProcessGroup or _asks_itself():
            return plain(self, *args, **kwargs)
        return watched(self, *args, **kwargs)

    made: Any = method
    made.__code__ = made.__code__.replace(co_name=name)
    made._oomkit_plain = plain
    setattr(dist.ProcessGroup, name, made)


def _watch_waits() -> None:
    """Have ranks that wait in a collective of the step's own look at the others."""
    work: Any = dist.Work
    plain = work.wait
    if hasattr(plain, "_oomkit_plain"):
        return

    @functools.wraps(plain)
    def wait(self: Any, timeout: datetime.timedelta = _NO_LIMIT) -> Any:
        world = _present
        if type(self) is not work or world is None or world.present is None:
            return plain(self, timeout)
        return world.wait(self, plain, timeout)

    wait._oomkit_plain = plain  # type: ignore[attr-defined]
    work.wait = wait


def _watch(module: Any, name: str) -> None:
    """Have a function of torch.distributed tell of its calls inside a call that is agreed on."""
    plain = getattr(module, name, None)
    if plain is None or hasattr(plain, "_oomkit_plain"):
        return
    is_method = module is dist.ProcessGroup
    told = _OF_GROUP + name if is_method else name

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        world = _present
        agreement = None if world is None else world.present
        if world is not None and world.hooked is not None and (module is dist or is_method):
            given = (*args[is_method:], *kwargs.values(), None)[0]
            tensor = given[0] if isinstance(given, (list, tuple)) and given else given
            ours = threading.get_ident() == world.thread
            return world.hooked.hook_makes(tensor, lambda: plain(*args, **kwargs), ours)
        if world is None or agreement is None:
            _look(told, _C._where())
            return plain(*args, **kwargs)
        if threading.get_ident() != world.thread and not agreement.reducing:
            return plain(*args, **kwargs)
        if agreement.own_collective(told):
            return None if module is dist else args[0]
        try:
            if agreement.is_models():
                return _C.exempt(lambda: plain(*args, **kwargs))
            return world.make(told, lambda: plain(*args, **kwargs))
        finally:
            agreement.own_collective_made()

    collective._oomkit_plain = plain  # type: ignore[attr-defined]
    setattr(module, name, collective)


def present() -> World | None:
    """That of the present default group, if its ranks have met."""
    group = None if _present is None else _present.group()
    return _present if group is not None and group is dist.group.WORLD else None


def meet() -> World:
    """The present default group; its ranks meet in the first call of each."""
    global _present
    group = dist.distributed_c10d._get_default_group()
    if _present is None or _present.group() is not group:
        version = sys.modules[__name__.partition(".")[0]].__version__
        _present = World(group, version)
        watch()
    _present.enters()
    return _present
