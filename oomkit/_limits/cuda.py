"""Limits of CUDA devices: a share of the device that torch's allocator may have.

A limit initialises no device: before the program does, it is only noted, and put on by what
torch runs while it initialises CUDA. What fails there is a warning, for an error would be one of
initialising CUDA, and the program's.
"""

from __future__ import annotations

import logging
import math
import warnings

import torch

from .. import _C
from ..report import format_bytes

_log = logging.getLogger("oomkit")

CUDA = 1  # c10::DeviceType

_before: dict[int, float] = {}
"""By device: the share that the program had asked for itself, put back when our limit goes."""
_ours: dict[int, float] = {}
"""By device: the share with our limit, as torch reads it (which rounds). Another one there is the
program's own, newer than what was there before."""
_noted: list[object] = []
"""Not empty while torch is to call us when it initialises CUDA."""


def share_of(limit: int, total: int) -> float:
    """The smallest share with which torch, which rounds down, allows `limit` of `total` bytes."""
    share = min(1.0, limit / total)
    return share if int(share * total) >= min(limit, total) else math.nextafter(share, 1.0)


def _put_on(index: int, limit: int | None) -> None:
    """Where torch refuses a share, what is noted here stays true of the one that it has."""
    cuda = torch.cuda
    if limit is None:
        if index not in _before:
            return  # there is no limit of ours
        share = cuda.get_per_process_memory_fraction(index)
        if _ours.get(index, share) == share:
            cuda.set_per_process_memory_fraction(_before[index], index)
        _ours.pop(index, None)
        del _before[index]
        return
    before = cuda.get_per_process_memory_fraction(index)
    share = share_of(limit, cuda.get_device_properties(index).total_memory)
    cuda.set_per_process_memory_fraction(share, index)
    if index not in _before or _ours.get(index, before) != before:
        # Above 1 is no limit: cudaMallocAsync says it in bytes, as 2**64 of them.
        _before[index] = min(1.0, before)
    _ours[index] = cuda.get_per_process_memory_fraction(index)


def _warn(message: str) -> None:
    """A warning, also where warnings are errors: there it is logged and raises nothing."""
    try:
        warnings.warn(message, _C.OomkitWarning, stacklevel=3)
    except _C.OomkitWarning:
        _log.warning("%s", message)


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
            _warn(
                f"oomkit: limit_memory() of {format_bytes(limit)} on 'cuda:{index}' has no "
                f"effect, because its allocator refuses a limit ({type(error).__name__}: {first})"
                f"{_C.see('limit-memory')}"
            )


def set_limit(index: int, limit: int | None) -> None:
    """Let torch have `limit` bytes of a CUDA device; None takes the limit away."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _put_on(index, limit)
    elif not _noted:
        torch.cuda._lazy_call(_put_all_on)  # type: ignore[no-untyped-call]
        _noted.append(True)
    _C.device_budget_set(CUDA, index, limit)
