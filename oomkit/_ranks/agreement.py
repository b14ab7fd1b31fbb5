"""What a call of a decorated step agrees on with the other ranks, over DistributedDataParallel.

Forward and backward of a rank are its own affair, and so are its retries, as long as no other
rank has seen anything of them: it may need more micro-batches than others, or begin again. What
ranks do together, in this order, is the same whatever each needs for it:

1. at entry what a forward would begin with: buckets that are to be rebuilt, buffers of rank 0;
2. for each backward after a forward that synchronises, one reduction of each model, by its own
   reducer. It overlaps with the backward as torch has it where the batch is whole, nothing is
   known to lack, and it is the first one of the call; else it follows the last micro-batch's
   backward, which then has the gradients of the whole batch;
3. a vote before each reduction that does not overlap, but for the first one in a call when all
   went well in the last;
4. a vote before the first update, or at the end: from there on nothing is begun again;
5. but where memory for an update of some rank was tight, which is told in that vote, all keep
   copies of what theirs changes, and there is one more vote after it. If one has failed all take
   theirs back, and begin again or end with an error. An update that makes collectives itself is
   voted on before its first one, too: from there on it is neither repeated nor taken back.

A rank that fails when others may have seen something of its attempt makes up for the reductions
that it has begun, with zeros, and votes that all begin again, which they learn at their next
vote. Over gloo all then wait for what they have sent, by a barrier: its threads end collectives in
any order. The first reduction of such another attempt is voted on, and nothing overlaps.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from . import buffers, matters
from .call import PATIENCE, Call, refuse_in_parts
from .joins import BROADCASTS, LAST, Joined, is_joined
from .joins import begin as begin_joined
from .joins import refusal as join_refusal
from .reducer import UNTOUCHED, Reducer, reducer_of
from .reducer import refusal as reducer_refusal
from .refused import UPDATES, has_updates, refusal_of_norms
from .ways import AGAIN, FATAL, FINE, NEVER, STOP
from .world import World, meet, present

_PLAIN_HOOKS = frozenset({"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"})
"""One collective for each bucket, and no state: of torch's own."""
_WRAPPERS = frozenset(
    {
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
        "MegatronModule",
    }
)
_TENSOR_PARALLEL = (
    "its parameters are spread over ranks without fully_shard(), as in tensor parallelism"
)
_PIPELINES = frozenset({"_PipelineSchedule", "_PipelineStageBase"})
_said: set[tuple[str, str]] = set()
_looked_at: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


class Agreement(Call):
    """One call of a step over DistributedDataParallel."""

    def __init__(
        self, world: World, step: object, models: list[Any], joined: Joined | None = None
    ) -> None:
        super().__init__(world, step)
        self._joined = joined
        self._reducers = [reducer_of(self, model) for model in models]
        self._whole = True
        self._done = 0  # reductions of this attempt
        self._before: dict[Reducer, int] = {}
        self._models_own = False
        hooked = any([model._comm_hooks for model in models])
        self._may_overlap = len(models) == 1 and (not hooked or _are_plain(models[0]._comm_hooks))
        self._once = hooked and not self._may_overlap
        # Torch's first reduction of a static graph is another one, and all begin it or none. Ranks
        # that do not share memory cannot be told of an error in a reduction that they have begun;
        # where that overlaps a rank with an error takes part in it (_post()). Nor do those who have
        # left join() learn of one otherwise than by a vote. With collectives of the step's own in
        # its backward others would wait for those as for its buckets.
        self._cautious = (
            not self.eased
            or step in world.apart
            or any([r.first for r in self._reducers])
            or not (world.shared or (self._may_overlap and joined is None))
        )
        self._waits = joined is not None or all([m.require_backward_grad_sync for m in models])
        self._over = False
        """Inside join(): all have come to the end, without a reduction."""
        try:
            self._enter()
            if joined is not None:
                joined.enter()
        except BaseException as failed:
            for reducer in self._reducers:
                reducer.gives_back()
            if isinstance(failed, torch.OutOfMemoryError | MemoryError):
                raise self.cannot_reduce(f"{type(failed).__name__}: {failed}") from failed
            raise
        world.present = self
        for reducer in self._reducers:
            reducer.attempt_begins()
            reducer.of["reducer"] = reducer
            reducer.of["_sync_buffers"] = functools.partial(self._second_broadcast, reducer)

    def _enter(self) -> None:
        """Others wait in these collectives, so that memory for them is tried for again, whatever
        the budget says, unless one was made: then it is not known which of them are left."""
        before = [reducer.count() for reducer in self._reducers]
        try:
            return self._entry()
        except torch.OutOfMemoryError:
            if before != [reducer.count() for reducer in self._reducers]:
                raise
        for reducer in self._reducers:
            reducer.gives_back()
        self._reducers[0].empty_caches()
        return _C.exempt(self._entry)

    def cannot_reduce(self, why: str) -> _C.RankError:
        """The error of a rank that cannot go on to its first reduction; it takes part in that, with
        zeros, where it overlaps, for then the others look at nothing else."""
        if not self.is_waited_for():
            failure = self.cannot(why)
            if not self.world.shared and self._synchronises() and self._may_overlap:
                with contextlib.suppress(RuntimeError):  # the others are gone
                    self._post()
            return failure
        self.world.say(why)
        with contextlib.suppress(RuntimeError):
            self.fails_with(self._take_part)
        return self.failure(why)

    def _entry(self) -> None:
        """What the first forward would begin with, which a forward that is repeated must not."""
        for reducer in self._reducers:
            model = reducer.model
            if reducer.real._rebuild_buckets():  # under no_sync(), too
                model._has_rebuilt_buckets = True
            if model._check_sync_bufs_pre_fwd():
                model._sync_buffers()
                buffers.were_sent(model)
                reducer.sent_buffers = True
            elif model.broadcast_buffers and model.modules_buffers:
                reducer.sent_buffers = buffers.are_as_sent(model)
            reducer.broadcasts = reducer.of["require_forward_param_sync"]
            reducer.of["require_forward_param_sync"] = UNTOUCHED

    @property
    def is_whole(self) -> bool:
        """Does this attempt run the batch as it is?"""
        return self._whole

    def overlaps(self) -> bool:
        return self._whole and self._may_overlap and not self._cautious and self._done == 0

    def _second_broadcast(self, reducer: Reducer) -> None:
        """Of buffers, before a forward that is not the first one."""
        model = reducer.model
        if buffers.are_known(model) and not buffers.move(model):
            if buffers.are_as_sent(model):
                return
        elif self._whole and self._joined is None:
            self.own_collective("broadcast")
            with self._by_models():
                type(model)._sync_buffers(model)
            self.own_collective_made()
            buffers.were_sent(model)
            return
        raise _C.SplitError(
            "auto_batch cannot take part in a second forward of a DistributedDataParallel model "
            "that broadcasts its buffers, some of which have changed: pass "
            f"broadcast_buffers=False to it{_C.see('distributed')}"
        )

    # ---- told by the engine, in C

    def attempt_begins(self) -> int:
        """Micro-batches, from the first one on, for real or for a proof."""
        self._whole = False
        for reducer in self._reducers:
            reducer.attempt_begins()
            if reducer.sent_buffers:
                buffers.are_back(reducer.model)
        return 0

    def micro_begins(self) -> int:
        """One of them, for real or for a proof: its forward broadcasts nothing."""
        for reducer in self._reducers:
            reducer.of["require_forward_param_sync"] = UNTOUCHED
            reducer.micro_begins()
        return 0

    def backward_begins(self) -> int:
        for reducer in self._reducers:
            if not reducer.flying:
                reducer.backward_begins()
            elif not reducer.begun:
                self.reduces(reducer)
        return 0

    def backward_ends(self) -> int:
        if self.settled:
            self.opens_again()
        flying = [reducer for reducer in self._reducers if reducer.flying]
        if flying:
            for reducer in flying:
                if reducer.has_finished():
                    reducer.due = reducer.flying = reducer.begun = False
                    self._done += 1
            return 0
        moved = [reducer for reducer in self._reducers if reducer.backward_moved()]
        if self._done > 0 and not all(reducer.due for reducer in moved):
            raise _C.SplitError(
                "auto_batch cannot take part in several backward() calls over one forward of a "
                "DistributedDataParallel model: add the losses, and run one backward()"
                f"{_C.see('distributed')}"
            )
        due = [reducer for reducer in moved if reducer.due]
        if not due:
            return 0
        if self._done > 0 and self._joined is not None:
            raise self.cannot(
                "its step reduces gradients more than once inside join(), where ranks that have "
                "left take part once in each call"
            )
        for reducer in due:
            reducer.ready()
        if (self._done > 0 or self._cautious) and self.asks(FINE, matters.REDUCTION):
            return 1
        for reducer in due:
            with self._by_models(reducer):
                reducer.reduce()
        self._done += 1
        return 0

    def commit(self, tight: int) -> int:
        """Before an update; 2: others have no part in it; more: how tight one of theirs is."""
        if self._done == 0:
            return 2
        if tight > 0 and self._joined is not None and not self._joined.votes_again():
            tight = 0
        if not self.agreed_commit(tight):
            return 1
        if self._joined is not None and not self._joined.is_full():
            self._ease_without_all()
        for reducer in self._reducers:
            reducer.ends()
        return 2 + self.tight if self.tight else 0

    def _ease_without_all(self) -> None:
        """Those who have left know of no step that it went well, but that one had trouble."""
        if self.step not in self.world.at_ease:
            self.world.at_ease.clear()
        elif not self.eased:
            self.world.at_ease.discard(self.step)

    def returned(self) -> int:
        """The function has returned, without an update."""
        if self._joined is not None and self._done == 0:
            if not self._over and self.asks(FINE, self._end()):
                return 1
            self._over = True
        elif self.commit(0) == 1 or self.settle():
            return 1
        for reducer in self._reducers:
            reducer.hand_over()
        return 0

    def rebuilds(self) -> bool:
        """A forward begins. May it rebuild buckets, together with all ranks?"""
        if self._joined is not None and self.committed and self._joined.has_buffers():
            raise _C.SplitError(
                "auto_batch cannot run a forward after the update inside join(), over a model "
                "that broadcasts its buffers: call the model before optimizer.step(), or pass "
                f"broadcast_buffers=False to it{_C.see('distributed')}"
            )
        return self._joined is None

    def opens_again(self) -> None:
        """Those who have left come to one vote after an update, and to no other one."""
        if self._joined is None or self._joined.is_full():
            super().opens_again()

    def _end(self) -> int:
        """Inside join(): do those who have left wait for a backward of the caller's?"""
        return matters.START if any(reducer.due for reducer in self._reducers) else matters.PROOF

    def matter(self, matter: int) -> int:
        if self._joined is not None and matter in LAST and self._reducers[0].will_broadcast():
            matter += BROADCASTS
        return super().matter(matter)

    def failed(self) -> int:
        """This rank's attempt has failed, and everything is back but what others have seen."""
        self._whole, self.trouble = False, True
        if self.own:
            for reducer in self._reducers:
                self._drain(reducer)
            why = f"it has to begin again after {self.own}() of the step's own"
            raise self.cannot(why) if self._done > 0 else self.cannot_reduce(why)
        if self._done > 0 or self._is_flying():
            if self._once:
                raise self.cannot(
                    "it has to begin again after a communication hook had run, whose state cannot "
                    "be taken back: restore a checkpoint on all ranks"
                )
            for reducer in self._reducers:
                self._drain(reducer)
            self.vote(AGAIN, matters.UPDATED if self.committed else matters.REDUCTION)
            self.again()
        for reducer in self._reducers:
            reducer.due = False
        return 0

    def again(self) -> int:
        """Another attempt of all ranks; everything is back."""
        if self.own:
            raise self.cannot(f"it has made {self.own}() of the step's own")
        cut_off = not self.committed  # else all that was sent has come
        for reducer in self._reducers:
            if cut_off and (self._joined is None or self._joined.is_full()):
                with self._by_models(reducer), self.owing():
                    reducer.rest()
            reducer.reset()
        self._whole, self._cautious, self.trouble, self._done = False, True, True, 0
        self.stopped = False
        self.not_come()
        return 0

    def reduces(self, reducer: Reducer) -> None:
        """This rank begins a reduction: one that has an error then takes part in it."""
        if self.world.tell(self._reducers.index(reducer), FATAL) == STOP:
            self.vote(FINE, matters.REDUCTION)  # which says why
        reducer.begun = True

    def cast(self, word: int, matter: int) -> int:
        return self.world.vote(word, matter, self._take_part)

    @contextlib.contextmanager
    def _by_models(self, reducer: Reducer | None = None) -> Iterator[None]:
        """Collectives in it are those of the models, or of their hooks."""
        self._models_own = True
        self.world.hooked = reducer if self._once else None
        try:
            yield
        finally:
            self._models_own, self.world.hooked = False, None

    def _take_part(self, step: int) -> None:
        self.world.tell(step, NEVER)
        self._drain(self._reducers[step], begun=True)

    def is_models(self) -> bool:
        return self._models_own or (_in_backward() and self._is_flying())

    def _is_flying(self) -> bool:
        return any(reducer.flying for reducer in self._reducers)

    def own_collective(self, name: str) -> bool:
        if not self._models_own and _in_backward():
            hooked = any(reducer.model._comm_hooks for reducer in self._reducers)
            if not (self._is_flying() and hooked):  # hooks run where the reduction overlaps
                self.world.apart.add(self.step)
        if self.is_models():
            return False
        self.settle_first()
        if self.committed:
            return False  # nothing begins again
        if not self._whole:
            raise refuse_in_parts(self.cannot if self._done > 0 else self.cannot_reduce, name)
        if self._joined is not None and not self._joined.is_full():
            raise self.cannot(f"it has come to {name}() of the step's own, and ranks have left it")
        self.own = name
        if self.asks(FINE, matters.OWN):
            raise self.cannot(f"it has come to {name}() of the step's own")
        self._before = {reducer: reducer.count() for reducer in self._reducers if reducer.flying}
        return False

    def own_collective_made(self) -> None:
        for reducer in self._reducers:
            reducer.leave_out(self._before.pop(reducer, 0))

    def leave(self, exception: BaseException | None) -> None:
        """The call is over."""
        self.world.present = None
        if self._joined is not None:
            self._joined.leave(forwards=self._reducers[0].has_run())
        for reducer in self._reducers:
            reducer.of["reducer"] = reducer.real
            reducer.of.pop("_sync_buffers", None)
            reducer.leave()
            reducer.gives_back()
        try:
            if exception is not None:
                self._excuse(exception)
        finally:
            self._reducers = []

    def _post(self) -> None:
        """The others cannot tell whether they are in the reduction, and do not vote before it.
        This rank's word is in that vote, so that what they reduce is used by nobody."""
        (reducer,) = self._reducers
        self.world.kept = kept = reducer.post()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if all(_is_done(work) for work in kept[0]):
                break
            time.sleep(0.001)

    def _drain(self, reducer: Reducer, begun: bool = False) -> None:
        with self._by_models(reducer), self.owing():
            reducer.drain(begun)

    def _synchronises(self) -> bool:
        """Does the step reduce gradients, as far as is known?"""
        return self._waits or all(r.model.require_backward_grad_sync for r in self._reducers)

    def is_waited_for(self) -> bool:
        return self.world.shared and (self.weighs or self._synchronises())

    def misses(self) -> None:
        if self.world.shared:
            super().misses()
        elif not self.committed and (self.weighs or self._done > 0 or self._synchronises()):
            self.vote(FINE, matters.COMMIT)  # one that has failed has given up

    def _excuse(self, exception: BaseException) -> None:
        """An error leaves the call: who waits for this rank is told."""
        text = self.note(exception)
        if self.is_over(exception):  # as if the function had returned
            for reducer in self._reducers:
                reducer.hand_over()
            return
        waits = self._synchronises()
        awaited = self._is_flying() or self._done > 0 or self.weighs or (self._cautious and waits)
        tells = not (self.told or self._over)
        gives_up = tells and (self.committed or (awaited and not self.world.shared))
        # Before this rank waits: others may wait in a collective of the step's own.
        if gives_up:
            self.world.give_up(text, self.matter(matters.COMMIT))
        elif tells:
            self.world.say(text)
        with contextlib.suppress(RuntimeError):  # the others are gone, or the group is
            for reducer in self._reducers:
                self._drain(reducer)
        with contextlib.suppress(RuntimeError):
            for reducer in self._reducers:
                reducer.abandon()
        if gives_up or not tells:
            return
        if not self.world.shared:
            if waits and self._may_overlap:  # the others' first step is a reduction
                self.world.give_up(text, self.matter(matters.COMMIT))
                self._post()
            return
        if self.is_waited_for():  # the others may begin a reduction at any time
            with contextlib.suppress(RuntimeError):
                self.fails_with(self._take_part)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _are_plain(hooks: list[Any]) -> bool:
    """Are they torch's own, of one collective for each bucket, and no state?"""
    return all(
        getattr(hook, "__name__", "") in _PLAIN_HOOKS
        and getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.")
        for hook, _ in hooks
    )


def _is_done(work: Any) -> bool:
    """Of a collective, or of the future of one."""
    return bool(work.is_completed() if hasattr(work, "is_completed") else work.done())


def _modules_refusal(model: Any) -> str | None:
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        return _TENSOR_PARALLEL
    if (why := refusal_of_norms(model)) is not None:
        return why
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            return f"{type(module).__name__}(sparse=True) has sparse gradients"
    return None


def _unknown(model: Any) -> str:
    """Why a model that is spread over ranks otherwise is not agreed on."""
    for kind in type(model).__mro__:
        if kind.__name__ in _PIPELINES:
            return (
                "the stages of a pipeline (torch.distributed.pipelining) send each other the "
                "micro-batches of one step, which no rank can repeat alone; pass more of them to "
                "its schedule"
            )
        if kind.__name__ in _WRAPPERS:
            package = kind.__module__.partition(".")[0]
            return (
                f"{package}'s {kind.__name__} is not supported; torch's DistributedDataParallel "
                "and fully_shard() are"
            )
    return _TENSOR_PARALLEL


def _refusal(model: Any) -> str | None:
    """Why calls over this model are not agreed on, or None."""
    if not isinstance(model, DistributedDataParallel):
        return _unknown(model)
    if (why := reducer_refusal(model)) is not None:
        return why
    if is_joined(model) and (why := join_refusal(model)) is not None:
        return why
    if model.mixed_precision is not None:
        return "mixed_precision= of DistributedDataParallel keeps copies of parameters"
    if getattr(model, "_delay_all_reduce_params", None) or model._use_python_reducer:
        return "its reduction is delayed, or torch.compile's"
    if model.process_group.size() != dist.get_world_size():
        return "its process group is not that of all ranks"
    if hasattr(model, "buffer_hook"):
        return "it has a hook for its buffers"
    if any(has_updates(p) for p in model.module.parameters()):
        return UPDATES
    if model not in _looked_at:
        _looked_at[model] = _modules_refusal(model)
    return _looked_at[model]


def _is_known(world: World, model: Any) -> bool:
    """Is it one of those that calls were agreed on over, and has nothing come to it since?"""
    of = model.__dict__
    return model in world.known and not (
        of["static_graph"] or of["_join_config"].enable or "buffer_hook" in of
    )


@functools.cache
def _is_sharded_kind(kind: Any) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _is_sharded(model: Any) -> bool:
    kind: type = type(model)
    return _is_sharded_kind(kind)


def _way(models: list[Any]) -> tuple[Any, list[Any], str | None]:
    """How a call over these models is agreed on, over which of them, and why it is not."""
    refusal: Any = _refusal
    kind: Any = Agreement
    if any(map(_is_sharded, models)):
        from . import sharded

        if not all(map(_is_sharded, models)):
            return None, [], "fully_shard() and another wrapper in one step"
        models = sharded.outermost(models)
        refusal, kind = sharded.refusal, sharded.Sharded
    elif len(models) > 1 and any(map(is_joined, models)):
        return None, [], "inside join() its step uses more than one model: make a step of each"
    return kind, models, next((found for found in map(refusal, models) if found is not None), None)


def _begin(
    world: World, step: object, models: list[Any], kind: Any = Agreement, *also: Joined | None
) -> Call:
    try:
        call: Call = kind(world, step, models, *also)
    except RuntimeError as failed:  # of a collective that it begins with
        world.note(failed)
        raise
    return call


def enter(step: object, label: str, models: list[Any], weighs: bool = False) -> Call | None:
    """A call begins over models that are spread over ranks; None: it is not agreed on.

    Args:
        step: the decorated one.
        label: its name.
        models: DistributedDataParallel, or what fully_shard() has made, or stages of pipelines.
        weighs: it has ``global_weight=True``.
    """
    if not torch.is_grad_enabled():
        return None
    world = present()
    if world is None and not (dist.is_available() and dist.is_initialized()):
        return None
    if world is not None and len(models) == 1 and not weighs and _is_known(world, models[0]):
        world.enters()
        return _begin(world, step, models)
    kind: Any = None
    why: str | None = "no model of its is in DistributedDataParallel or fully_shard()"
    if models:
        kind, models, why = _way(models)
    joined: Joined | None = None
    if why is None and kind is Agreement and is_joined(models[0]):
        if weighs:
            why = "ranks that have left join() have no batch: leave global_weight=True out there"
        else:
            why, joined = begin_joined(models[0])
    if why is None:
        world = meet()
        if kind is Agreement:
            world.known.update(models)
            return _begin(world, step, models, kind, joined)
        return _begin(world, step, models, kind)
    if weighs and dist.get_world_size() > 1:
        raise _C.SplitError(
            f"auto_batch(global_weight=True) cannot weigh {label} over all ranks: {why}"
            f"{_C.see('distributed')}"
        )
    if (label, why) not in _said:
        _said.add((label, why))
        warnings.warn(
            f"oomkit: {label} is not retried after an out-of-memory error: {why}"
            f"{_C.see('distributed')}",
            _C.OomkitWarning,
            stacklevel=2,
        )
    return None
