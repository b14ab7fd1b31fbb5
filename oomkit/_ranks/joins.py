"""Inside ``join()`` of DistributedDataParallel: ranks that have no more batches take part in what
the others agree on.

A forward begins with collectives that those who have left shadow, in a loop of torch's. A call
that is agreed on makes them once, before its first attempt, and says in one of them that it is
one. Who has left then goes where the others go: he votes that all is well, whatever on, takes part
with zeros in their reductions, and is back in torch's loop when all have come to the update or to
the end. Others have to share memory with him, in which they tell of what they do.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, _JoinConfig
from torch.nn.parallel import distributed as ddp

from .call import COMMIT, PROOF, START, Call
from .reducer import Reducer
from .ways import AGAIN, ANY, FINE, NEVER, TIGHT, TROUBLE
from .world import World

_AGREED, _UNSYNCED = 4096.0, -1.0
"""In place of torch's 1 and 0: a call that is agreed on, which reduces gradients or does not."""
_begun: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Models whose next forward has been told of."""


def _count(work: Any) -> int:
    """Ranks that have not left."""
    work.wait()
    return int(work.get_future().value()[0].item())


class Joined:
    """A call's part in it, on a rank that has not left."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._config = model._join_config
        self.work = _begun.pop(model, None) or Join.notify_join_context(model)
        self._told: Any = None

    def is_full(self) -> bool:
        """Are all ranks there?"""
        return _count(self.work) == dist.get_world_size()

    def goes_on_alone(self) -> None:
        """The call is not agreed on: its forward goes on where this has begun."""
        _begun[self.model] = self.work

    def enter(self) -> None:
        """After all else that a forward begins with."""
        model = self.model
        model.reducer._set_forward_pass_work_handle(self.work, model._divide_by_initial_world_size)
        word = _AGREED if model.require_backward_grad_sync else _UNSYNCED
        self._told = torch.full((1,), word, device=model.device)
        dist.all_reduce(self._told, group=model.process_group, async_op=True)
        model._join_config = _JoinConfig(False, False, False)

    def leave(self) -> None:
        self.model._join_config = self._config


class Left(Call):
    """One call of the others, on a rank that has left."""

    def __init__(self, world: World, model: Any) -> None:
        super().__init__(world, None)
        self._reducer = Reducer(self, model)  # type: ignore[arg-type]

    def cast(self, word: int, matter: int) -> int:
        return self.world.vote(word, ANY, self._take_part)

    def _take_part(self, step: int) -> None:
        self.world.tell(step, NEVER)
        self._reducer.drain(begun=True)

    def serve(self) -> bool:
        """Until they have come to the update or to the end: do they reduce gradients after it?"""
        while True:
            largest = self.vote(FINE, ANY)
            matter = self.world.voted_on() & 255
            if largest >= AGAIN:
                self._reducer.reset()
            elif matter in (COMMIT, START, PROOF):
                if largest % TIGHT == TROUBLE:
                    self.world.at_ease.clear()
                return matter == START


def _shadow(model: Any) -> None:
    """Torch's, of a backward that is not agreed on."""
    model._match_all_reduce_for_bwd_pass()
    if model.find_unused_parameters:
        model._match_unused_params_allreduce()


def _main_hook(world: World, model: Any) -> None:
    """Of a rank that has left, in each forward of the others: torch's own, and `Left`."""
    model.reducer._rebuild_buckets()
    model._check_and_sync_module_buffers()
    told = torch.zeros(1, device=model.device)
    dist.all_reduce(told, group=model.process_group)
    word = float(told.item())
    reduces = word > 0.0
    if word < 0.0:
        world.begin(False)
    elif word >= _AGREED:
        reduces = Left(world, model).serve()
    model.require_forward_param_sync = word > 0.0
    if reduces:
        _shadow(model)
    if word > 0.0:
        model.reducer._push_all_rebuilt_params()


def watch(present: Any) -> None:
    """Have ranks that have left take part."""
    hook: Any = ddp._DDPJoinHook
    plain, notify = hook.main_hook, Join.notify_join_context
    if hasattr(plain, "_oomkit_plain"):
        return

    def main_hook(self: Any) -> None:
        world = present()
        if world is None or not world.shared or self.ddp.static_graph:
            plain(self)
        else:
            _main_hook(world, self.ddp)

    def notify_join_context(joinable: Any) -> Any:
        work = _begun.pop(joinable, None)
        return notify(joinable) if work is None else work

    main_hook._oomkit_plain = plain  # type: ignore[attr-defined]
    hook.main_hook = main_hook
    join: Any = Join
    join.notify_join_context = staticmethod(notify_join_context)
