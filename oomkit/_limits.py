"""Limits of CUDA devices: a share of the device that torch's allocator may have.

A limit initialises no device: before the program does, it is only noted, and put on by what
torch runs while it initialises CUDA. What fails there is a warning, for an error would be one of
initialising CUDA, and the program's.
"""

from __future__ import annotations

import math
import warnings

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
        before = torch.cuda.get_per_process_memory_fraction(index)
        share = share_of(limit, torch.cuda.get_device_properties(index).total_memory)
        torch.cuda.set_per_process_memory_fraction(share, index)
        _before.setdefault(index, before)  # refused, there is nothing to put back
        return
    torch.cuda.set_per_process_memory_fraction(share, index)


def _put_all_on() -> None:
    """While torch initialises CUDA: the limits that were set before."""
    _noted.clear()
    for index in range(torch.cuda.device_count()):
        limit = _C.device_budget(CUDA, index)
        if limit is None:
            continue
        try:
            _put_on(index, limit)
        except (RuntimeError, AttributeError) as error:  # an allocator without shares
            _C.device_budget_set(CUDA, index, None)
            first = str(error).partition("\n")[0]
            warnings.warn(
                f"oomkit: limit_memory() of {limit} bytes on 'cuda:{index}' is not in force, "
                f"its allocator refuses a share ({type(error).__name__}: {first})",
                _C.OomkitWarning,
                stacklevel=2,
            )


def set_limit(index: int, limit: int | None) -> None:
    """Let torch have `limit` bytes of a CUDA device; None takes the limit away."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _put_on(index, limit)
    elif not _noted:
        torch.cuda._lazy_call(_put_all_on)  # type: ignore[no-untyped-call]
        _noted.append(True)
    _C.device_budget_set(CUDA, index, limit)
