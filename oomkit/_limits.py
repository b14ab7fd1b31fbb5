"""Limits of CUDA devices: a share of the device that torch's allocator may have.

A limit initialises no device: before the program does, it is only noted, and put on by what
torch runs while it initialises CUDA.
"""

from __future__ import annotations

import math

import torch

from . import _C

CUDA = 1  # c10::DeviceType

_before: dict[int, float] = {}
"""By device: the share that the program had asked for itself, put back when our limit goes."""
_noted: list[object] = []
"""Not empty while torch is to call us when it initialises CUDA."""


def share_of(limit: int, total: int) -> float:
    """The smallest share with which torch, which rounds down, allows `limit` of `total` bytes."""
    share = min(1.0, limit / total)
    return share if int(share * total) >= min(limit, total) else math.nextafter(share, 1.0)


def _put_on(index: int, limit: int | None) -> None:
    if limit is None:
        share = _before.pop(index, None)
        if share is None:
            return  # there was no limit of ours
    else:
        _before.setdefault(index, torch.cuda.get_per_process_memory_fraction(index))
        share = share_of(limit, torch.cuda.get_device_properties(index).total_memory)
    torch.cuda.set_per_process_memory_fraction(share, index)


def _put_all_on() -> None:
    """While torch initialises CUDA: the limits that were set before."""
    _noted.clear()
    for index in range(torch.cuda.device_count()):
        limit = _C.device_budget(CUDA, index)
        if limit is not None:
            _put_on(index, limit)


def set_limit(index: int, limit: int | None) -> None:
    """Let torch have `limit` bytes of a CUDA device; None takes the limit away."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _put_on(index, limit)
    elif not _noted:
        torch.cuda._lazy_call(_put_all_on)  # type: ignore[no-untyped-call]
        _noted.append(True)
    _C.device_budget_set(CUDA, index, limit)
