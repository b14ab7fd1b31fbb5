"""Why calls over a model are not agreed on, over DistributedDataParallel and fully_shard alike."""

from __future__ import annotations

import weakref
from typing import Any

import torch

UPDATES = (
    "a parameter has a post-accumulate-grad hook, as with an optimizer in the backward: move what "
    "it does into the step, after its backward"
)
_norms: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def has_updates(p: torch.Tensor) -> bool:
    """Does a backward run hooks that may update this parameter?"""
    return p.requires_grad and bool(p._post_accumulate_grad_hooks)


def refusal_of_norms(model: Any) -> str | None:
    """Why not, for what its layers make together with those of other ranks, or None."""
    if model not in _norms:
        synchronised = any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
        _norms[model] = "SyncBatchNorm communicates inside the forward" if synchronised else None
    return _norms[model]
