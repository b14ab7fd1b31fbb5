"""Buffers that a DistributedDataParallel model broadcasts before its forwards.

A call makes the broadcast of its first forward at its entry, once. One before a later forward is
left out where no buffer has changed since the last one: it would change nothing. Each rank decides
that by itself, and where one finds that a buffer has changed it has an error, which the others are
told of, so that none waits in a broadcast that another leaves out. Buffers of a normalisation in
training do change, on all ranks alike: there all agree to make the broadcast.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

_State = list[tuple[weakref.ref[torch.Tensor], int]]
_sent: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()
"""Buffers and their versions after the last broadcast that decorated calls have seen."""


def were_sent(model: Any) -> None:
    """They are those of rank 0 on all ranks."""
    _sent[model] = [(weakref.ref(b), _version(b)) for b in model.modules_buffers]


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def are_known(model: Any) -> bool:
    """Was there such a broadcast? On all ranks alike."""
    return model in _sent


def are_as_sent(model: Any) -> bool:
    """Has no buffer of this rank changed since?"""
    sent = _sent.get(model)
    model._assign_modules_buffers()  # torch does so in each broadcast: they may be other ones
    now: list[torch.Tensor] = model.modules_buffers
    if sent is None or len(sent) != len(now):
        return False
    return all(
        ref() is b and version == _version(b) for b, (ref, version) in zip(now, sent, strict=True)
    )


def are_back(model: Any) -> None:
    """They have changed since, and are again what was sent."""
    model._assign_modules_buffers()
    were_sent(model)


def move(model: Any) -> bool:
    """Does each forward change some of them? On all ranks alike."""
    return any(
        isinstance(module, _NormBase) and module.training and module.track_running_stats
        for module in model.modules()
    )
