"""Collectives in a part of a loop over `chunks()`, or of `map()`: ranks do not agree on parts, so
that one that makes such a collective once more than another is out of step with it."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from .. import _C

IN_PART = 1  # what _C._where() says there
_PLAIN = "call model.module, which makes no collectives, inside chunks() or map()"
_STEP = "for training decorate the step with @oomkit.auto_batch, without chunks()"
_SHARDED = "a fully_shard() model gathers or reduces"
_OUTSIDE = "call it outside of chunks() and map(), or inside them a model that is not sharded"
_warned: set[str] = set()


def made(what: str, instead: str) -> None:
    """One comes now: said once. The part is not repeated then, and a batch that this rank alone
    has split makes none."""
    if dist.get_world_size() > 1 and _C._part_shares(
        f"{what} inside this part, and other ranks do not repeat it; {instead}"
    ):
        raise _C.SplitError(
            f"{what} inside a part of chunks() or map(), in a batch that is split for want of "
            f"memory on this rank: other ranks have another number of parts; {instead}"
            f"{_C.see('distributed')}"
        )
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"oomkit: {what} inside a part of chunks() or map(): ranks may have different "
            f"numbers of parts, and one would wait for another; {instead}{_C.see('distributed')}",
            _C.OomkitWarning,
            stacklevel=4,
        )


def function(name: str) -> None:
    """Of torch.distributed is called, by the body or by its model."""
    caller = sys._getframe(3).f_globals.get("__name__", "")
    if caller.startswith("torch.distributed.fsdp."):
        made(_SHARDED, _OUTSIDE)
    else:
        made(f"torch.distributed.{name}() is called", "call it after the loop")


def reduce(model: str) -> None:
    """A backward begins in a part in which this one had a forward with gradients."""
    made(f"{model} reduces gradients", _STEP)


def _name(model: Any) -> str:
    return f"{type(model).__name__} of {type(model.module).__name__}"


def _reduces(model: Any) -> bool:
    """Will a backward over the present forward?"""
    return torch.is_grad_enabled() and bool(model.require_backward_grad_sync)


def _broadcast(model: Any, plain: Any) -> None:
    """Its buffers, in a forward inside a part. Without gradients torch does so in the first
    forward alone, whatever becomes of its rows, and so do all ranks."""
    what = f"{_name(model)} broadcasts its buffers"
    if _reduces(model) or hasattr(model, "buffer_hook"):
        made(what, _PLAIN)
        plain(model)
        return
    try:
        _C.exempt(lambda: plain(model))
    except BaseException:  # some of them may be on their way
        _C._part_shares(f"{what} inside this part, which has failed; {_PLAIN}")
        raise
    model.require_forward_param_sync = False  # as at the end of this forward, if it comes to it
    _C._part_keeps(model.modules_buffers)


@_disable_dynamo  # which warns of functions that it cannot trace
def _in_part(model: Any) -> bool:
    return _C._where() == IN_PART and bool(model.process_group.size() > 1)


def watch() -> None:
    """Have DistributedDataParallel, whose collectives are in C++, tell of those in parts."""
    kind: Any = DistributedDataParallel
    sync, ended = (getattr(kind, name, None) for name in ("_sync_buffers", "_post_forward"))
    if sync is None or ended is None or hasattr(sync, "_oomkit_plain"):
        return  # another torch, or done

    @functools.wraps(sync)
    def _sync_buffers(self: Any) -> None:
        if _in_part(self):
            _broadcast(self, sync)
        else:
            sync(self)

    @functools.wraps(ended)
    def _post_forward(self: Any, output: Any) -> Any:
        if _in_part(self) and _reduces(self):
            _C._part_reduces(_name(self))
        return ended(self, output)

    _sync_buffers._oomkit_plain = sync  # type: ignore[attr-defined]
    kind._sync_buffers, kind._post_forward = _sync_buffers, _post_forward
