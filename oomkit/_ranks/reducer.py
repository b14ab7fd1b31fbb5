"""In place of a model's reducer while a call runs: which gradients are there, and their reduction.

With ``static_graph=True`` torch's reducer counts how often a backward comes to each parameter,
from the first one that there is until its first reduction, and expects these numbers from then
on. It cannot be told to forget attempts that have failed, micro-batches and proofs. So we count
in those, and the first reduction is made by a new reducer, which meets nothing but backwards that
add nothing, as many as the whole batch would have been.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from . import private
from .hooks import Made, State
from .private import REDUCER

if TYPE_CHECKING:
    from .agreement import Agreement


UNTOUCHED = 0
"""In place of whether a forward begins with a broadcast: what torch takes for False, and never
writes."""


_USED = {
    DistributedDataParallel: "_assign_modules_buffers _check_sync_bufs_pre_fwd _comm_hooks "
    "_has_rebuilt_buckets _join_config _sync_buffers _use_python_reducer modules_buffers "
    "reducer require_backward_grad_sync require_forward_param_sync",
    REDUCER: "_check_reducer_finalized _get_local_used_map "
    "_get_zeros_like_grad_buckets _rebuild_buckets _reset_state _run_comm_hook "
    "prepare_for_backward",
    dist.ProcessGroup: "_get_backend _get_sequence_number_for_group",
}
"""What is private in torch, and used here."""
_USED_BY_STATIC = {
    DistributedDataParallel: "_build_debug_param_to_name_mapping _build_params_for_reducer "
    "_ddp_init_helper _get_ddp_logging_data _static_graph_delay_allreduce_enqueued logger",
    REDUCER: "_delay_all_reduce _set_static_graph",
}


class _Touch(torch.autograd.Function):
    """Adds nothing to the gradients of some parameters, so that their reducer sees each."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.count = len(params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        return (None,) * ctx.count


class Reducer:
    """In place of a model's reducer while a call runs: what its forwards tell it goes by us."""

    first = False
    """Its next reduction is torch's first one of a static graph."""

    def __init__(self, agreement: Agreement, model: Any) -> None:
        self.of = vars(model)
        """Its attributes, which a module sets by a call of its own."""
        self.real = self.of["reducer"]
        self.model = model
        self.due = False
        """A forward has synchronised, and its gradients were not reduced."""
        self.flying = False
        """Its reduction overlaps with the backward."""
        self.begun = False
        """The others know that this rank takes part in it."""
        self.sent = 0
        self._hooked = 0  # collectives that a hook has made in its reduction
        self._again = 0  # and those of them that it has yet to leave out
        self._states: list[State] = []  # what it goes on with, before them
        self.broadcasts: Any = True
        """The next forward begins with a broadcast of buffers."""
        self.sent_buffers = False
        """When the call begins they are as they were sent."""
        self._before: list[tuple[weakref.ref[torch.Tensor] | None, int]] = []
        self._entry = self._before
        self._outputs: list[torch.Tensor] = []
        self._agreement = agreement

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """The end of a forward that synchronises."""
        self.due, self._outputs = True, outputs
        if self._agreement.overlaps():
            if not self.flying:
                self.sent, self.flying = self.count(), True
            self.real.prepare_for_backward(outputs)

    def hand_over(self) -> None:
        """A backward after the call is the model's own affair."""
        if self.due and not self.flying:
            self.real.prepare_for_backward(self._outputs)
        self._outputs = []

    # ---- what a forward begins with, which the call has made

    def _rebuild_buckets(self) -> bool:
        return self._agreement.rebuilds() and bool(self.real._rebuild_buckets())

    def has_run(self) -> bool:
        """Has there been a forward?"""
        return self.of["require_forward_param_sync"] is not UNTOUCHED

    def will_broadcast(self) -> bool:
        """Does the first forward of the next call begin with a broadcast of buffers?"""
        return bool(self.of["require_forward_param_sync"] if self.has_run() else self.broadcasts)

    def gives_back(self) -> None:
        """The model's, where there was no forward."""
        if not self.has_run():
            self.of["require_forward_param_sync"] = self.broadcasts

    @functools.cached_property
    def params(self) -> list[torch.Tensor]:
        return [p for p in self.model.module.parameters() if p.requires_grad]

    def count(self) -> int:
        """Collectives of the model's group so far."""
        return int(self.model.process_group._get_sequence_number_for_group())

    def leave_out(self, before: int) -> None:
        """Collectives since then are none of the reduction's."""
        if before > 0:
            self.sent += self.count() - before

    # ---- which gradients a backward has moved

    def _gradients(self) -> list[tuple[weakref.ref[torch.Tensor] | None, int]]:
        gradients = [p.grad for p in self.params]
        return [(None, 0) if g is None else (weakref.ref(g), g._version) for g in gradients]

    def _moved(
        self, since: list[tuple[weakref.ref[torch.Tensor] | None, int]]
    ) -> list[torch.Tensor]:
        moved = []
        for p, (ref, version) in zip(self.params, since, strict=True):
            gradient = p.grad
            same = ref is not None and ref() is gradient
            if gradient is not None and not (same and gradient._version == version):
                moved.append(p)
        return moved

    def attempt_begins(self) -> None:
        self._entry = self._gradients() if self.finds else []

    def micro_begins(self) -> None:
        """A micro-batch, for real or for a proof: the last one's forward and backward reduce."""
        self.due = False

    def backward_begins(self) -> None:
        self._before = self._gradients()

    def backward_moved(self) -> bool:
        return bool(self._moved(self._before))

    # ---- reducing

    def ready(self) -> None:
        """It is about to make a reduction that does not overlap."""

    def has_finished(self) -> bool:
        """Has the reduction that overlaps come to its end?"""
        if self.count() == self.sent:
            return False
        try:
            self.real._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    @property
    def finds(self) -> bool:
        """Ranks tell each other which parameters they have used, after their gradients."""
        return bool(self.model.find_unused_parameters)

    def _used(self) -> list[torch.Tensor]:
        """Those whose gradients are to be reduced."""
        if self.finds:
            return self._moved(self._entry)
        return [p for p in self.params if p.grad is not None]

    def _check(self, used: list[torch.Tensor]) -> None:
        if not used:
            raise _C.SplitError(
                "auto_batch cannot reduce the gradients of a DistributedDataParallel model "
                "none of whose parameters was used on this rank"
                f"{_C.see('distributed')}"
            )

    def reduce(self) -> None:
        """The gradients that are in ``.grad``, by the model's own means."""
        self.due, self.flying, self.sent = False, True, self.count()
        self._hooked, self._states = 0, [State(state) for _, state in self.model._comm_hooks]
        used = self._used()
        self._check(used)
        self._agreement.reduces(self)
        self._reduce(used)
        self.flying = self.begun = False

    def _reduce(self, used: list[torch.Tensor]) -> None:
        root = self._touching(used)
        self.real.prepare_for_backward([root] if self.finds else [])
        with _without_hooks(used):
            _run(root)

    def _touching(self, used: list[torch.Tensor]) -> torch.Tensor:
        """What a backward touches these by. By the order of the first one torch makes buckets anew,
        for good: then it is that of the layers from the last to the first, one after the other."""
        with torch.enable_grad():
            if self.finds or self.model._has_rebuilt_buckets:
                return _Touch.apply(*reversed(used))  # type: ignore[no-untyped-call, no-any-return]
            root: list[torch.Tensor] = []
            for param in used:
                root = [_Touch.apply(param, *root)]  # type: ignore[no-untyped-call]
            return root[0]

    def hook_makes(self, tensor: Any, make: Callable[[], Any], leaves_out: bool) -> Any:
        """A collective of its hook, unless that runs again with zeros, and has made it."""
        if leaves_out and self._again > 0:
            self._again -= 1
            return Made(tensor)
        made = make()
        self._hooked += 1
        return made

    def parts(self) -> list[Callable[[], Any]]:
        """This rank's part, with zeros, in each bucket of a reduction, and in what goes with it."""
        found = self._buckets()
        return [*found, self.nothing_used()] if self.finds else found

    def _buckets(self) -> list[Callable[[], Any]]:
        buckets = self.real._get_zeros_like_grad_buckets()
        return [functools.partial(self.real._run_comm_hook, bucket) for bucket in buckets]

    def nothing_used(self) -> Callable[[], Any]:
        used = torch.zeros_like(self.real._get_local_used_map())
        return functools.partial(self.model.process_group.allreduce, [used])

    def _owed(self, parts: Callable[[], Any]) -> list[Callable[[], Any]]:
        """Such parts, with what memory there is: others wait for it, whatever the budget says. All
        of it is allocated before the first collective, so that this can be tried again."""
        try:
            return list(parts())
        except torch.OutOfMemoryError:
            pass  # its traceback keeps tensors
        self.empty_caches()
        return list(_C.exempt(parts))

    def _left(self) -> list[Callable[[], Any]]:
        """What this rank has not made. A hook may make several collectives for a bucket, one when
        another has ended: it runs again, and leaves out those that it has made."""
        made = max(0, self.count() - self.sent)
        for state in self._states:
            state.restore()
        if self._hooked == 0:
            return self._owed(self.parts)[made:]
        self._again = self._hooked
        return self._owed(self.parts if made <= self._hooked else self._buckets)

    def empty_caches(self) -> None:
        gc.collect()
        device = self.params[0].device.type
        if device != "cpu":
            torch.get_device_module(device).empty_cache()

    def drain(self, begun: bool = False) -> None:
        """Take part with zeros in what is left of a reduction that others wait for, or in one
        that they have begun alone."""
        awaited = begun or self.begun or (self.flying and not self._agreement.world.shared)
        self.flying = self.begun = False
        if not awaited:
            return
        if begun:
            self.sent, self._hooked, self._states = self.count(), 0, []
        for work in [part() for part in self._left()]:
            work.wait()
        self._again = 0
        with contextlib.suppress(RuntimeError):  # gloo has none: the others' parts are done
            self.model.process_group._wait_for_pending_works()  # when they vote

    def rest(self) -> None:
        """All ranks begin again. What this one has sent of a reduction that was cut off may still
        be under way: gloo has several threads, and ends collectives in any order. The next
        reduction would write where that reads. Its barrier waits for all that was sent before."""
        backend = self.model.process_group._get_backend(self.params[0].device)
        if backend.name() == "gloo":
            backend.barrier().wait()

    def post(self) -> list[Any]:
        """Its part, with zeros, of the reduction that others are in or come to: what is to be
        kept while that runs."""
        parts = self._owed(self.parts)
        return [[part() for part in parts], parts]

    def reset(self) -> None:
        self.real._reset_state()
        self.due = self.flying = self.begun = False

    def abandon(self) -> None:
        """The call ends with an error."""
        self.real._reset_state()

    def ends(self) -> None:
        """All ranks have come to the update, or to the end."""

    def leave(self) -> None:
        """The call is over."""


@contextlib.contextmanager
def _without_hooks(params: list[torch.Tensor]) -> Iterator[None]:
    """Hooks on parameters have seen the step's own backward, and see no second one. Those on the
    node that adds to a gradient cannot be told from the reducer's own: they get None."""
    every = [t for p in params for t in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    found: list[Any] = [hooks for hooks in every if hooks]
    held = [list(hooks.items()) for hooks in found]
    try:
        for hooks in found:
            hooks.clear()
        yield
    finally:
        for hooks, those in zip(found, held, strict=True):
            hooks.update(those)


def _run(root: torch.Tensor) -> None:
    """Backward, outside of what watches those of the step."""
    torch.autograd.Variable._execution_engine.run_backward(
        (root,), (torch.ones_like(root),), False, False, (), True, True
    )


_counts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""How often a backward comes to each parameter, of models with static_graph=True."""


class StaticReducer(Reducer):
    """That of a model with static_graph=True."""

    def __init__(self, agreement: Agreement, model: Any) -> None:
        super().__init__(agreement, model)
        # No call over this model has come to its update or end: on all ranks alike.
        self.first = not model._static_graph_delay_allreduce_enqueued
        self._reductions = 0  # of this attempt
        self._counts = False  # a forward has synchronised
        self._hooks: list[Any] = []
        self._clear()

    # ---- counting

    def _clear(self) -> None:
        self._now = [0] * len(self.params)  # of this backward, or micro-batch
        self._most = list(self._now)  # of earlier ones

    def _watch(self) -> None:
        if self._hooks:
            return
        for index, p in enumerate(self.params):
            node: Any = torch.autograd.graph.get_gradient_edge(p).node
            self._hooks.append(node.register_hook(functools.partial(self._came, index)))

    def _came(self, index: int, *_: Any) -> None:
        if self._counts:
            self._now[index] += 1

    def attempt_begins(self) -> None:
        self._reductions, self._counts = 0, False
        self._clear()
        if self.first:  # which torch looks at in the forward, and at the end of the backward
            self.model._static_graph_delay_allreduce_enqueued = False
        if self.model not in _counts or not self._agreement.overlaps():
            self._watch()

    def micro_begins(self) -> None:
        super().micro_begins()
        self._most = [max(both) for both in zip(self._most, self._now, strict=True)]
        self._now, self._counts = [0] * len(self.params), False

    def backward_begins(self) -> None:
        super().backward_begins()
        self._now = [0] * len(self.params)

    # ---- what a forward and its backward tell

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        self._counts = True
        super().prepare_for_backward(outputs)

    def _delay_all_reduce(self) -> None:
        """The end of a first backward: what follows it is the call's affair."""

    def hand_over(self) -> None:
        if self.due:
            self.ready()
        super().hand_over()

    # ---- reducing

    def ready(self) -> None:
        """For the first reduction, while nobody waits for it yet."""
        if self.first:
            self.real = self._fresh()
            self.model.__dict__["reducer"] = self

    def _fresh(self) -> Any:
        """A reducer that has counted nothing, in the model."""
        model = self.model
        before = model.reducer, model.logger
        params, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(params)
        register: Any = vars(dist)["_register_comm_hook"]
        try:
            model._ddp_init_helper(params, sparse, names, True)
            model.reducer._set_static_graph()
            model.logger._set_static_graph()
            for hook, state in model._comm_hooks:
                register(model.reducer, state, hook)
                model.logger._set_comm_hook_name(hook.__qualname__)
        except BaseException:
            model.reducer, model.logger = before
            raise
        return model.reducer

    def abandon(self) -> None:
        super().abandon()
        if self.first:  # steps that are not decorated may come now
            self.real = self._fresh()

    @property
    def finds(self) -> bool:
        return False

    def has_finished(self) -> bool:
        finished = super().has_finished()
        if finished:
            _counts.setdefault(self.model, list(self._now))
        return finished

    def _used(self) -> list[torch.Tensor]:
        counts, known = self._now, None if self.first else _counts.get(self.model)
        if not self._agreement.is_whole:  # what only earlier micro-batches have used
            counts = [now or most for now, most in zip(counts, self._most, strict=True)]
            if self._reductions > 0 and known is None:
                raise self._agreement.cannot(
                    "its step has several backwards over a model with static_graph=True, and has "
                    "to be split before it has run whole once"
                )
        if known is None:
            known = _counts[self.model] = list(counts)
        else:
            self._compare(counts, known)
        return [p for p, count in zip(self.params, known, strict=True) if count > 0]

    def _compare(self, counts: list[int], known: list[int]) -> None:
        """Micro-batches may each use a parameter less often than the whole batch does."""
        both = list(zip(counts, known, strict=True))
        more = any(ours > theirs for ours, theirs in both)
        if more or (self._hooks and any(ours == 0 < theirs for ours, theirs in both)):
            how = "more often than" if more else "not at all, unlike"
            raise _C.SplitError(
                f"auto_batch found that a backward comes to a parameter {how} in the "
                "first step of this DistributedDataParallel model, which has static_graph=True: "
                f"leave it out, or use the same parameters in each step{_C.see('distributed')}"
            )

    def _reduce(self, used: list[torch.Tensor]) -> None:
        counts = dict(zip(map(id, self.params), _counts[self.model], strict=True))
        roots = []
        for turn in range(max(counts.values())):
            with torch.enable_grad():
                again = [p for p in reversed(used) if counts[id(p)] > turn]
                roots.append(_Touch.apply(*again))  # type: ignore[no-untyped-call]
        self._reductions += 1
        self._counts = False
        self.real.prepare_for_backward([])
        with _without_hooks(used):
            for root in roots:
                _run(root)
        if self.first:
            self.real._delay_all_reduce()
        self.real._check_reducer_finalized()

    def parts(self) -> list[Callable[[], Any]]:
        found = super().parts()
        return [self.nothing_used(), *found] if self.first else found

    def ends(self) -> None:
        if self._reductions > 0:
            self.first = False

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model._static_graph_delay_allreduce_enqueued = not self.first


def refusal(model: Any) -> str | None:
    """Why calls over this model are not agreed on, or None."""
    uses = [*_USED.items(), *(_USED_BY_STATIC.items() if model.static_graph else ())]
    if (why := private.refusal("DistributedDataParallel", *uses)) is not None:
        return why
    return _static_refusal(model) if model.static_graph else None


def _static_refusal(model: Any) -> str | None:
    """Why calls over this model with static_graph=True are not agreed on, or None: its hook is lost
    with its reducer."""
    if model._static_graph_delay_allreduce_enqueued or model._comm_hooks:
        return None
    if model._get_ddp_logging_data().get("comm_hook", "").startswith("BuiltinCommHookType"):
        return "static_graph=True, with a communication hook that is not a function"
    return None


def reducer_of(agreement: Agreement, model: Any) -> Reducer:
    """In place of the one that the model has."""
    return (StaticReducer if model.static_graph else Reducer)(agreement, model)
