"""What a process can have of a device, and who has the rest."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch

from .. import _C
from ..memory import DeviceLike, _device_of, _key
from ..report import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Budget:
    """What this process can have of one device, in bytes; None where a figure is not known.

    Attributes
    ----------
    total, free : int or None
        The whole device, and what its driver says nobody has. On the CPU None.
    limit : int or None
        The limit in force: that of `limit_memory`, on an accelerator also one that the program
        has set by `set_per_process_memory_fraction`. None without one.
    allocated, reserved : int or None
        Of PyTorch in this process: in tensors, and held by its caching allocator.
    beside : int or None
        In use on the device and not PyTorch's of this process: contexts, libraries (cuBLAS,
        cuDNN, NCCL), other processes. `total - free - reserved`.
    own_beside, others : int or None
        The same by owner, where NVML tells: this process without PyTorch, other processes.
    usable : int or None
        What PyTorch's allocator can hold in this process at present: `free + reserved`, or the
        limit where that is less.
    """

    total: int | None
    free: int | None
    limit: int | None
    allocated: int | None
    reserved: int | None
    beside: int | None
    own_beside: int | None
    others: int | None
    usable: int | None

    def __repr__(self) -> str:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        figures = [f"{k} {format_bytes(v)}" for k, v in known.items() if v is not None]
        return f"<oomkit.Budget {', '.join(figures) or 'unknown'}>"


def _processes(index: int) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of a CUDA device by its UUID: CUDA_VISIBLE_DEVICES and MIG number anew."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    for name in () if uuid is None else (f"GPU-{uuid}", f"MIG-{uuid}", str(uuid)):
        found = _C.nvml_processes(name)
        if found is not None:
            return found
    return None


def _owners(device: torch.device, reserved: int | None) -> tuple[int | None, int | None]:
    """Bytes of this process beside PyTorch, and of other processes."""
    if device.type != "cuda" or reserved is None:
        return None, None
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None, None
    processes = _processes(device.index)
    # Without our own among them the pids are of another namespace, as in a container.
    own = None if processes is None else dict(processes).get(os.getpid())
    if processes is None or own is None:
        return None, None
    others = [used for pid, used in processes if pid != os.getpid()]
    known = [used for used in others if used is not None]
    return max(0, own - reserved), sum(known) if len(known) == len(others) else None


def budget(device: DeviceLike = None) -> Budget:
    """budget(device=None) -> Budget

    What this process can have of a device, by default of the accelerator in use, else of the CPU.

    It makes no context, and asks the driver of a device that is in use, which takes long: for
    reports, not for steps. Without `device` PyTorch is asked for its accelerator, which may start
    the driver (see `memory`). Bytes by owner need NVML (part of NVIDIA's driver); without it they
    are None.

    Parameters
    ----------
    device : torch.device, str or int, optional

    Returns
    -------
    Budget

    Raises
    ------
    TypeError, ValueError
        `device` is none.
    """
    target = _device_of("budget", device)
    allocated, reserved, _, _, free, total, limit = _C.memory_figures(*_key(target))
    if target.type == "cpu":
        return Budget(None, None, limit, allocated, reserved, None, None, None, limit)
    beside = usable = None
    if free is not None and reserved is not None:
        usable = free + reserved if limit is None else min(limit, free + reserved)
        beside = None if total is None else max(0, total - free - reserved)
    return Budget(
        total, free, limit, allocated, reserved, beside, *_owners(target, reserved), usable
    )
