"""What a call of a decorated step agrees on with the other ranks, over fully_shard().

Each forward and backward of such a model is made together: parameters are gathered from all
ranks, gradients are added up over all. Ranks need not have the same number of micro-batches,
though: who waits for the others in a vote takes part in what they still do, with his part of the
parameters and with gradients of zero (`Sharded.follow`). For that each rank tells the others of
each of its collectives, before it makes it.

There is a vote after each last backward of a call, and one before the first update. When a rank
fails all begin again: it votes so, and takes part in what the others have begun; they learn of it
at their next collective, which they do not make. Gradients that came in meanwhile are dropped.

A proof runs the step of one rank alone, while the others wait and take part: ranks that have
something to prove vote on who is next before an attempt. An attempt that none of them knew of
begins again for that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .. import _C
from . import matters, private
from .call import Call, refuse_in_parts
from .others import error
from .refused import UPDATES, has_updates, refusal_of_norms
from .ways import AGAIN, FINE, NEVER, OTHERS, STOP
from .world import World

_FORWARD, _BACKWARD, _PART, _SCATTER, _REPLICAS = range(5)  # kinds of a step
_EARLIER = 2  # what _C._where() says in a micro-batch that others follow
_ALL = -1
"""The mask of a group whose trained parameters all have gradients, however many there are."""
_BITS = 37
"""Of a mask, that a step tells itself: see `Sharded._told()`."""
_ALL_TOLD, _KEPT = 2 << _BITS, 1 << _BITS
_MODULES = ("state", "param_group", "param")
_NAMES = {
    "FSDPState": "_fsdp_param_groups _is_root _lazy_init _state_ctx",
    "FSDPParamGroup": "_all_gather_comm _all_reduce_hook _reduce_scatter_comm _sharded_state "
    "_to_sharded _to_sharded_post_forward _training_state device "
    "fsdp_params is_sharded_post_forward mesh_info post_backward reduce_grads all_reduce_grads "
    "reshard reshard_after_backward unshard wait_for_unshard is_sharded _all_gather_result",
    "FSDPParam": "sharded_param unsharded_accumulated_grad is_dtensor all_gather_outputs "
    "alloc_all_gather_outputs sharded_state param_dtype orig_dtype _orig_size",
}
"""What is private in torch, and used here."""


@functools.cache
def _kinds() -> tuple[Any, ...] | str:
    """The classes, or which one this torch does not have."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        return "FSDPModule.reset_iter_state"
    package = "torch.distributed.fsdp._fully_shard._fsdp_"
    try:
        modules = [importlib.import_module(f"{package}{m}") for m in _MODULES]
        return tuple(getattr(m, kind) for m, kind in zip(modules, _NAMES, strict=True))
    except (ImportError, AttributeError) as failed:
        return str(failed)


def _torchs_refusal() -> str | None:
    kinds = _kinds()
    if isinstance(kinds, str):
        return private.refusal("fully_shard()", missing=kinds)
    return private.refusal("fully_shard()", *zip(kinds, _NAMES.values(), strict=True))


class _Gather:
    """In place of how a group gathers its parameters, while a call runs."""

    def __init__(self, group: Group, real: Any) -> None:
        self.group, self.real = group, real
        self.allocate = real.allocate

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: Any) -> Any:
        of = self.group.of
        backward = of._training_state.name == "PRE_BACKWARD"
        kind = _FORWARD if not backward else _PART if of.is_sharded_post_forward else _BACKWARD
        self.group.call.makes(kind, self.group.index, 0)

        def gather() -> Any:
            work = self.real(output_tensor, input_tensor, group, async_op)
            if work is not None and output_tensor.device.type == "cpu":
                work.wait()  # gloo has allocations of its own, which may fail, too
            return work

        return self.group.call.quietly(gather)


class _Scatter:
    """In place of how it adds up its gradients."""

    def __init__(self, group: Group, real: Any) -> None:
        self.group, self.real = group, real
        self.allocate = real.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: Any = False
    ) -> Any:
        self.group.call.makes(_SCATTER, self.group.index, self.group.mask)
        return self.group.call.quietly(
            lambda: self.real(output_tensor, input_tensor, group, op, async_op)
        )


Held = tuple[Any, Any, Any]
"""A parameter, and the two places for its gradient where that is not reduced."""


def _give(held: list[Held]) -> list[Held]:
    for p, accumulated, gradient in held:
        p.unsharded_accumulated_grad = accumulated
        p._unsharded_param.grad = gradient
    return held


class Group:
    """Parameters that are gathered together, while a call runs."""

    def __init__(self, call: Sharded, index: int, of: Any) -> None:
        self.call, self.index, self.of = call, index, of
        self.mask = 0
        self.reduces = of.reduce_grads, of.all_reduce_grads
        self.before = of._all_gather_comm, of._reduce_scatter_comm
        of._all_gather_comm = _Gather(self, of._all_gather_comm)
        of._reduce_scatter_comm = _Scatter(self, of._reduce_scatter_comm)
        of.post_backward = self.post_backward

    def leave(self) -> None:
        self.of._all_gather_comm, self.of._reduce_scatter_comm = self.before
        del self.of.post_backward

    def unsharded(self) -> list[tuple[int, Any]]:
        """Bits, and parameters that have been gathered once."""
        params = enumerate(self.of.fsdp_params)
        return [(1 << i, p) for i, p in params if hasattr(p, "_unsharded_param")]

    def post_backward(self, *unused: Any) -> Any:
        """Gradients of this group are there: which?"""
        trained = self.mask = 0
        for bit, p in self.unsharded():
            if p.sharded_param.requires_grad:
                trained |= bit
            if p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None:
                self.mask |= bit
        # With set_reduce_scatter_unused_params(True) (torch 2.13) zeros are added for the rest.
        if self.mask == trained or getattr(self.of, "reduce_scatter_unused_params", False):
            self.mask = _ALL
        self.call.reducing, self.call.reduced = True, self.index
        try:
            # What is compared in a proof is what is reduced.
            with self.reducing() if self.call.proving else contextlib.nullcontext():
                return type(self.of).post_backward(self.of, *unused)
        finally:
            self.call.reducing = False

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Whatever set_requires_gradient_sync() says."""
        of = self.of
        before = of.reduce_grads, of.all_reduce_grads
        of.reduce_grads = of.all_reduce_grads = True
        try:
            yield
        finally:
            of.reduce_grads, of.all_reduce_grads = before

    def back(self) -> None:
        """Gradients that were not added up are gone, and the step's flags are as at entry."""
        self.take()
        self.of.reduce_grads, self.of.all_reduce_grads = self.reduces

    # ---- gradients that set_requires_gradient_sync(False) leaves on each rank

    def take(self) -> list[Held]:
        """All of them, and there is none any more."""
        found = []
        for _, p in self.unsharded():
            own = p._unsharded_param
            if p.unsharded_accumulated_grad is not None or own.grad is not None:
                found.append((p, p.unsharded_accumulated_grad, own.grad))
                p.unsharded_accumulated_grad = own.grad = None
        return found

    def copies(self) -> list[Held]:
        """Of all of them, in host memory."""
        found = []
        for p, *both in _give(self.take()):
            found.append(
                (p, *(None if g is None else g.detach().to("cpu", copy=True) for g in both))
            )
        return found

    # ---- taking part in what others do

    def gather(self, kind: int) -> None:
        of = self.of
        if kind != _PART:
            of._to_sharded()
        elif not of.is_sharded_post_forward:
            self._make_part()
        of._all_gather_result = None
        states = type(of._training_state)
        of._training_state = states.FORWARD if kind == _FORWARD else states.PRE_BACKWARD
        of.unshard()
        of.wait_for_unshard()
        of.reshard()  # but for what a later step needs of it
        of._training_state = states.IDLE

    def _make_part(self) -> None:
        """Zeros, where this rank's attempt has failed, and so has that of all."""
        of = self.of
        with torch.no_grad():
            for p in of.fsdp_params:
                p.alloc_all_gather_outputs()
                for output in p.all_gather_outputs:
                    output.zero_()
                p.sharded_state = type(p.sharded_state).UNSHARDED
        of._sharded_state = type(of._sharded_state).UNSHARDED
        of._to_sharded_post_forward()

    def scatter(self, mask: int) -> None:
        held = self.take()  # goes with a reduction of this rank's own
        with self.reducing():
            self._scatter_nothing(mask)
        _give(held)

    def _scatter_nothing(self, mask: int) -> None:
        fresh = [p for p in self.of.fsdp_params if not hasattr(p, "_unsharded_param")]
        for p in fresh:  # this rank failed in its first gather
            nothing = torch.zeros((), dtype=p.param_dtype or p.orig_dtype, device=self.of.device)
            p._unsharded_param = torch.nn.Parameter(nothing.expand(p._orig_size))
        for bit, p in self.unsharded():
            if mask & bit and p.sharded_param.requires_grad:
                p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
        self.of.post_backward()
        self.of._training_state = type(self.of._training_state).IDLE
        for p in fresh:
            del p._unsharded_param


class Sharded(Call):
    """One call of a step over models that are sharded."""

    sharded = True

    def __init__(self, world: World, step: object, models: list[Any]) -> None:
        super().__init__(world, step)
        self._models = models
        for model in models:
            model._get_fsdp_state()._lazy_init()
        self.resharded = any([_reshards(model) for model in models])
        """Parameters were gathered when it began, as after an evaluation."""
        groups = [of for model in models for of in _groups(model)]
        self._groups = [Group(self, index, of) for index, of in enumerate(groups)]
        self.reduced = -1
        self._made = 0  # collectives
        self._backwards = 0  # last ones of this attempt
        self._together = False  # all ranks know that this attempt begins
        self._gathered: set[int] | None = None
        self.proving = False
        self._knows = False  # from a vote, why it was stopped
        self._making = False
        self._follows = False
        self._failure: _C.RankError | None = None
        self._why = ""
        self._aside: list[tuple[Any, Any]] | None = None
        """Gradients, while what others add up is none of them."""
        self._held: list[Held] = []
        """Copies of what earlier calls have left on this rank."""
        for group in self._groups:
            self._held += _C.exempt(group.copies)
        world.present = self

    # ---- told by the engine, in C

    def attempt_begins(self) -> int:
        if self.proving:
            return 0
        if self._together and self._start(FINE):
            return 1
        return 0

    def proof_begins(self) -> int:
        if not self._together:  # the others would take its gradients for theirs
            self.vote(AGAIN, matters.START)
            return 1
        if self._start(self.world.size - self.world.rank):
            return 1
        self.proving = True
        for group in self._groups:
            group.take()
        return 0

    def proof_ends(self) -> int:
        self.proving = False
        _C.exempt(self._give_held)
        return 1 if self.asks(FINE, matters.PROOF) else 0

    def _start(self, word: int) -> bool:
        """Wait for the proofs of other ranks, until it is this one's turn, or nobody has any.
        Must this attempt begin again?"""
        while True:
            with _Aside(self):
                largest = self.vote(word, matters.START)
            if largest >= AGAIN:
                return True
            if largest == word:
                return False
            with _Aside(self):
                if self.vote(FINE, matters.PROOF) >= AGAIN:
                    return True

    def backward_begins(self) -> int:
        return 0

    def backward_ends(self) -> int:
        self.opens_again()
        self._backwards += 1
        return 1 if self.asks(FINE, matters.REDUCTION | (self._backwards & 15) << 4) else 0

    def commit(self, tight: int) -> int:
        if self._backwards == 0:
            return 2
        return 1 if not self.agreed_commit(tight) else 2 + self.tight if self.tight else 0

    def returned(self) -> int:
        return 1 if not self.agreed_commit() or self.settle() else 0

    def made(self, leaf: torch.Tensor) -> bool:
        """Is this a parameter that was gathered?"""
        if self._gathered is None or id(leaf) not in self._gathered:
            found = (p for group in self._groups for _, p in group.unsharded())
            self._gathered = {id(p._unsharded_param) for p in found}
        return id(leaf) in self._gathered

    def back(self) -> int:
        """Nothing of an attempt is in the models any more, but gradients."""
        self._gathered = None
        for model in self._models:
            model.reset_iter_state()
        for group in self._groups:
            group.back()
        return 0

    def _give_held(self) -> None:
        """What earlier calls have left is there again."""
        for p, *copies in self._held:
            device = p._unsharded_param.device
            both = [None if g is None else g.to(device, copy=True) for g in copies]
            _give([(p, *both)])

    def failed(self) -> int:
        """This rank's attempt has failed, and everything is back."""
        self.trouble = True
        with _Aside(self):
            self.vote(AGAIN, matters.UPDATED if self.committed else matters.REDUCTION)
        return self._anew()

    def again(self) -> int:
        """Another attempt of all ranks; everything is back."""
        if self.stopped and not self._knows and not self.committed:
            with _Aside(self):
                self.vote(FINE, matters.REDUCTION)
        return self._anew()

    def _anew(self) -> int:
        self.stopped = self.proving = self._knows = False
        self.trouble = self._together = True
        self._backwards = 0
        self.not_come()
        _C.exempt(self._give_held)
        return 0

    def is_models(self) -> bool:
        return self._making or self.reducing

    def own_collective(self, name: str) -> bool:
        if self._making:
            return False
        self.settle_first()
        if self.committed:
            return False
        if self.reducing:
            if name == "all_reduce":  # of replicas
                group = self._groups[self.reduced]
                if group.of.mesh_info.shard_mesh_size == 1:  # there is no reduce-scatter before it
                    self.makes(_SCATTER, self.reduced, group.mask)
                else:
                    self.makes(_REPLICAS, self.reduced, 0)
            return False
        if self.proving and name == "all_reduce":
            return True  # what is compared is this rank's
        if self.proving or _C._where() == _EARLIER:
            raise refuse_in_parts(self.cannot, name)
        if self.asks(FINE, matters.OWN):
            self._knows = True
            self.stop()
        return False

    def cannot(self, why: str) -> _C.RankError:
        self._why = why
        self._failure = error(
            f"rank {self.world.rank} cannot continue: {why}{_C.see('rank-failed')}", self.world.rank
        )
        return self._failure

    def leave(self, exception: BaseException | None) -> None:
        self.world.present = None
        try:
            if exception is not None:
                self._excuse(exception)
                if not self.committed:
                    _C.exempt(self._give_held)
        finally:
            for group in self._groups:
                group.leave()
            self._groups = []
        if self._backwards > 0 or self.trouble:  # ranks that took part in others' have not
            for model in self._models:  # gathered the same
                _reshards(model)

    # ---- collectives

    def quietly(self, make: Any) -> Any:
        """Outside the budget: the others are in it."""
        self._making = True
        try:
            return _C.exempt(make)
        finally:
            self._making = False

    def makes(self, kind: int, index: int, mask: int) -> None:
        """This rank is about to make a collective of its models."""
        self.settle_first()
        if self.committed:
            return
        step = self._told(mask) << 24 | index << 3 | kind
        # Replicas follow what was added up: nobody stops between the two.
        follows = self._follows or kind == _REPLICAS
        told = self.world.tell(step, NEVER if follows else AGAIN)
        self._made += 1
        if told == STOP:
            self.stop()
        if told:
            raise self.cannot(
                "it makes another collective than another rank, at the same place of the step "
                "(parameters that are used on some ranks alone, experts without rows in a "
                "micro-batch: call them with no rows, too)"
                if told == OTHERS
                else "it is too many collectives ahead of another rank"
            )

    def _told(self, mask: int) -> int:
        """What a step tells of a mask. One of too many bits is kept where all ranks find it, so
        that a collective is told of in one step, and nobody stops within it."""
        if mask == _ALL:
            return _ALL_TOLD
        if mask < _KEPT:
            return mask
        return _KEPT | self.world.others.keep(mask, _BITS)

    def _mask_of(self, told: int) -> int:
        if told == _ALL_TOLD:
            return _ALL
        return told if told < _KEPT else self.world.others.kept(told - _KEPT)

    def cast(self, word: int, matter: int) -> int:
        followed: list[int] = []
        try:
            return self.world.vote(word, matter, lambda step: self._follow(step, followed))
        finally:
            if followed:
                for model in self._models:
                    model.reset_iter_state()

    def _follow(self, step: int, followed: list[int]) -> None:
        kind, index = step & 7, step >> 3 & 0x1FFFFF
        followed.append(step)
        made = self._made
        self._follows = True
        try:
            if kind == _SCATTER:
                if isinstance(self._aside, list) and not self._aside:
                    self._put_aside()
                self._groups[index].scatter(self._mask_of(step >> 24))
            elif kind == _REPLICAS:
                # Not for want of memory: torch has all of it before the reduce-scatter, and both
                # collectives are made outside the budget. An error of another kind there ends all.
                raise self.cannot("it failed between two parts of a reduction of gradients")
            else:
                self._groups[index].gather(kind)
        finally:
            self._follows = False
        if self._made == made:  # the others wait, and this rank would come back here for ever
            raise self.cannot("it cannot take part in a collective of the others")

    def _put_aside(self) -> None:
        assert self._aside is not None
        for group in self._groups:
            for p in group.of.fsdp_params:
                self._aside.append((p.sharded_param, p.sharded_param.grad))
                p.sharded_param.grad = None

    def _excuse(self, exception: BaseException) -> None:
        """An error leaves the call: the others are told, and taken out of their collectives."""
        text = self.note(exception)
        if exception is self._failure:
            self.told, text = False, self._why
        self.back()
        if self.told or self.is_over(exception):
            return
        self.told = True
        if self.committed:
            self.world.give_up(text, self.matter(matters.COMMIT))
            return
        self.world.say(text)
        with _Aside(self), contextlib.suppress(_C.RankError):
            self.fails_with(lambda step: self._follow(step, []))
        self.back()


class _Aside:
    """While it runs, what others add up is dropped."""

    def __init__(self, call: Sharded) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call._aside = []

    def __exit__(self, *_: object) -> None:
        aside, self._call._aside = self._call._aside, None
        for param, gradient in aside or ():
            param.grad = gradient


def _groups(model: Any) -> list[Any]:
    """What is gathered together, in all ranks' order."""
    states = model._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in state._fsdp_param_groups]


def _reshards(model: Any) -> bool:
    """As torch leaves it after a backward. Was anything gathered?"""
    groups = _groups(model)
    if all([of.is_sharded and of._all_gather_result is None for of in groups]):
        return False
    model.reset_iter_state()
    return True


def outermost(models: list[Any]) -> list[Any]:
    """Those that are in no other one."""
    inner = {id(m) for model in models for m in model.modules() if m is not model}
    return [model for model in models if id(model) not in inner]


def refusal(model: Any) -> str | None:
    """Why calls over this model are not agreed on, or None."""
    if (why := _torchs_refusal()) is not None:
        return why
    state = model._get_fsdp_state()
    if state._is_root is False:
        return f"{type(model).__name__} is a part of a model that the step does not name"
    state._lazy_init()
    for found in state._state_ctx.all_states:
        if len(found._fsdp_param_groups) > 1:
            return "its parameters are sharded over several meshes"
    if not state._state_ctx.is_last_backward:
        return "set_is_last_backward(False) leaves a reduction open"
    for group in _groups(model):
        why = _group_refusal(group)
        if why is not None:
            return why
    return refusal_of_norms(model)


def _group_refusal(group: Any) -> str | None:
    if group.reduce_grads and not group.all_reduce_grads:
        return "set_requires_all_reduce(False) leaves gradients of parts on each replica"
    if not group.reshard_after_backward:
        return "set_reshard_after_backward(False) keeps parameters together"
    if group._all_reduce_hook is not None:
        return "it has a hook for its reduction"
    if group.mesh_info.mesh.size() != dist.get_world_size():
        return "its mesh is not that of all ranks"
    if any(p.is_dtensor for p in group.fsdp_params):
        return "its parameters are split over ranks otherwise, too"
    if any(has_updates(p.sharded_param) for p in group.fsdp_params):
        return UPDATES
    return None
