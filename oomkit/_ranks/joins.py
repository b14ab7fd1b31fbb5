"""Inside ``join()`` of DistributedDataParallel: ranks that have no more batches take part in what
the others agree on.

A forward begins with collectives that ranks which have left shadow, in a loop of torch's. A call
that is agreed on makes them once, before its first attempt, and says in one of them that it is
one. A rank that has left then goes where the others go: it votes that all is well, whatever on,
takes part with zeros in their reductions, and is back in torch's loop when all have come to the
update, or to the end without one. Their last vote tells it whether gradients are still to be
reduced, and whether their next forward begins with a broadcast of buffers. Where an update is
tight one more vote follows it, unless join() has other objects in it as well, as an optimizer whose
update is made together with those that have left. Ranks that share memory tell those who have left
of a reduction as they begin it; others vote before each one, so that none overlaps with a backward.

All ranks must have begun one such call over a model before one of them leaves. Of other models
torch's hook is left as it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, _JoinConfig
from torch.nn.parallel import distributed as ddp

from .. import _C
from . import matters, private
from .call import Call
from .private import REDUCER
from .reducer import Reducer
from .ways import AGAIN, ANY, FINE, NEVER, TIGHT, TROUBLE
from .world import World, meet, present

LAST = frozenset({matters.COMMIT, matters.START, matters.PROOF})
"""The matter of the last vote: before the update, or at the end of a call without reductions,
whose caller has a backward to run, or has not."""
BROADCASTS = 16
"""To be added to it: the next forward begins with a broadcast of buffers."""
_AGREED = float(1 << 20)
"""In place of torch's 1 or 0: a call that is agreed on."""
_BUSY = float(1 << 12)
"""In place of torch's 0: a rank that has left, and takes part in more than the model's affairs."""
_LEFT = "inside join() a rank has left before the first decorated call of all ranks"
_USED = {
    ddp.DistributedDataParallel: "_check_and_sync_module_buffers _match_all_reduce_for_bwd_pass "
    "_match_unused_params_allreduce",
    ddp._DDPJoinHook: "ddp main_hook",
    Join: "_get_num_nonjoined_procs _join_hooks notify_join_context",
    REDUCER: "_push_all_rebuilt_params _set_forward_pass_work_handle",
}
"""What is private in torch, and used here."""
_met: weakref.WeakKeyDictionary[Any, weakref.ref[World]] = weakref.WeakKeyDictionary()
"""Models over which all ranks of a world have begun a call."""
_alone: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Models, and the join() in which calls over them are not agreed on."""


def _has_met(model: Any) -> World | None:
    world, met = present(), _met.get(model)
    return world if met is not None and met() is world else None


class Joined:
    """A call's part in it, on a rank that has not left."""

    def __init__(self, model: Any, work: Any) -> None:
        self._model, self._work = model, work
        self._config = model._join_config
        self._told: Any = None
        self._telling: Any = None
        broadcasts = model._check_sync_bufs_pre_fwd()
        self._before = [(b, b.clone()) for b in model.module.buffers()] if broadcasts else []

    def is_full(self) -> bool:
        """Are all ranks there?"""
        return _is_full(self._work)

    def has_buffers(self) -> bool:
        """Are there any that forwards broadcast?"""
        return bool(self._model.broadcast_buffers and self._model.modules_buffers)

    def enter(self) -> None:
        """After all else that a forward begins with."""
        model = self._model
        model.reducer._set_forward_pass_work_handle(self._work, model._divide_by_initial_world_size)
        self._told = torch.full((1,), _AGREED, device=model.device)
        group = model.process_group
        self._telling = dist.all_reduce(self._told, group=group, async_op=True)
        model._join_config = _JoinConfig(False, False, False)

    def votes_again(self) -> bool:
        """Do those who have left come to a vote after the update?"""
        self._telling.wait()
        return float(self._told.item()) % _AGREED < _BUSY

    def leave(self, forwards: bool) -> None:
        """After a call without `forwards` buffers are this rank's own."""
        self._model._join_config = self._config
        if not forwards:
            with torch.no_grad():
                for buffer, before in self._before:
                    buffer.copy_(before)


def _is_full(work: Any) -> bool:
    work.wait()
    return int(work.get_future().value()[0].item()) == dist.get_world_size()


def is_joined(model: Any) -> bool:
    """Is it DistributedDataParallel, inside join()?"""
    config = getattr(model, "_join_config", None)
    return config is not None and bool(config.enable)


def refusal(model: Any) -> str | None:
    """Why no call over this model is agreed on inside this join(), or None."""
    if model.static_graph:
        return "inside join() the model's graph is static: leave static_graph=True out"
    if (why := private.refusal("join()", *_USED.items())) is not None:
        return why
    if not model._join_config.is_first_joinable:
        return "inside Join() something else stands before the model: name the model first"
    return None


def begin(model: Any) -> tuple[str, None] | tuple[None, Joined]:
    """A call begins on a rank that has not left: why it is not agreed on, or its part."""
    if _has_met(model) is None:
        if _alone.get(model) is model._join_config:
            return _LEFT, None
        work = Join.notify_join_context(model)
        if not _is_full(work):
            _alone[model] = model._join_config
            _shadow_nothing(model)
            return _LEFT, None
        _met[model] = weakref.ref(meet())
        _watch()
    else:
        work = Join.notify_join_context(model)
    return None, Joined(model, work)


def _shadow_nothing(model: Any) -> None:
    """What a forward that reduces nothing would go on with: the call may have none, and others
    that have left would wait for it."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()
    dist.all_reduce(torch.zeros(1, device=model.device), group=model.process_group)
    model.require_forward_param_sync = False


class Left(Call):
    """One call of the others, on a rank that has left."""

    def __init__(self, world: World, model: Any) -> None:
        super().__init__(world, None)
        self._reducer = Reducer(self, model)  # type: ignore[arg-type]
        self.reduced = False
        """It has taken part in a reduction of their last attempt."""

    def cast(self, word: int, matter: int) -> int:
        return self.world.vote(word, ANY, self._take_part)

    def _take_part(self, step: int) -> None:
        self.world.tell(step, NEVER)
        self._reduce()

    def _reduce(self) -> None:
        with self.owing():
            self._reducer.drain(begun=True)
        self.reduced = True

    def serve(self) -> int:
        """Until their last vote: the matter of that before the update, or at the end."""
        last = 0
        while True:
            largest = self.vote(FINE, ANY)
            matter = self.world.voted_on() & 255
            if largest >= AGAIN:
                self._reducer.reset()
                self.reduced = False
                continue
            if matter == matters.REDUCTION and not self.world.shared:
                self._reduce()
            if matter & ~BROADCASTS in LAST:
                last = matter
                if largest % TIGHT == TROUBLE:
                    self.world.at_ease.clear()
                if largest < TIGHT:
                    return last
            elif matter == matters.UPDATED:
                return last


def _take_part(world: World, model: Any, busy: bool) -> None:
    """A rank that has left, in a forward of the others: as torch's own hook, and `Left`."""
    model.reducer._rebuild_buckets()
    model._check_and_sync_module_buffers()
    told = torch.full((1,), _BUSY if busy else 0.0, device=model.device)
    dist.all_reduce(told, group=model.process_group)
    reduces = broadcasts = bool(told.item() % _BUSY > 0.0)
    reduced = False
    if told.item() >= _AGREED:
        left = Left(world, model)
        matter = left.serve()
        reduced, broadcasts = left.reduced, bool(matter & BROADCASTS)
        reduces = matter & ~BROADCASTS == matters.START
    model.require_forward_param_sync = broadcasts
    if reduces:
        model._match_all_reduce_for_bwd_pass()
        if model.find_unused_parameters:
            model._match_unused_params_allreduce()
    if reduces or reduced:
        model.reducer._push_all_rebuilt_params()


@contextlib.contextmanager
def _noted(world: World | None) -> Iterator[None]:
    """A collective of torch's: who is missing is added to its error."""
    try:
        yield
    except RuntimeError as failed:
        if world is not None and not isinstance(failed, _C.RankError):
            world.note(failed)
        raise


def _watch() -> None:
    """Have ranks that have left take part. Torch keeps its hooks to itself, and makes them before a
    model's first call: so there is one for all models, which asks whose it is."""
    hook: Any = ddp._DDPJoinHook
    join: Any = Join
    plain, count = hook.main_hook, join._get_num_nonjoined_procs
    if hasattr(plain, "_oomkit_plain"):
        return

    def main_hook(self: Any) -> None:
        world = _has_met(self.ddp)
        if world is None:
            plain(self)
            return
        with _noted(world):
            _take_part(world, self.ddp, getattr(self, "_oomkit_busy", True))

    def get_num_nonjoined_procs(self: Any) -> Any:
        for one in self._join_hooks:
            one._oomkit_busy = len(self._join_hooks) > 1
        with _noted(present()):
            return count(self)

    main_hook._oomkit_plain = plain  # type: ignore[attr-defined]
    hook.main_hook = main_hook
    join._get_num_nonjoined_procs = get_num_nonjoined_procs
