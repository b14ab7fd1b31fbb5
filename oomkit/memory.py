"""Memory limits and memory figures, one set of calls for the CPU and for accelerators.

On the CPU the figures are those of oomkit's own allocator: tensor bytes that PyTorch asked
for since it was installed (by the first `limit_memory`, `inject_oom` or decorated call).
Arrays of numpy, memory shared between processes and the scratch space of kernels are not
in them.
"""

from __future__ import annotations

import functools
import gc
import logging
import operator
import os
import re
import warnings
from dataclasses import dataclass, fields
from fractions import Fraction
from types import TracebackType

import torch

from . import _C
from ._engine import sessions as _notebook
from ._limits import layers as _layers
from .report import format_bytes

__all__ = [
    "Freed",
    "MemoryInfo",
    "MemoryLimit",
    "cleanup",
    "limit_memory",
    "max_memory_allocated",
    "memory",
]

DeviceLike = str | int | torch.device | None

_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 2**63 - 1

# c10::DeviceType, by number.
_DEVICE_NUMBERS = {
    name: number
    for number, name in enumerate(
        (
            *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia"),
            *("xla", "vulkan", "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia"),
        )
    )
}
_PRIVATE_USE = 20


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of one device, in bytes; None where a figure is not known.

    `allocated` and `reserved` mean what they mean in PyTorch; the peaks count from the last
    reset. On the CPU oomkit counts, from the first limit or the first decorated call on:
    tensors that were made before are not in the figures. `free` and `total` are the device's; on
    the CPU `free` is what the limit leaves.
    `budget` is the limit set by `limit_memory`, on an accelerator also one that the program
    has set by `set_per_process_memory_fraction`. `oomkit.budget` says who has the rest.
    """

    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    free: int | None
    total: int | None
    budget: int | None

    def __str__(self) -> str:
        """For people: the figures that are known. `repr` has the bytes."""
        known = (
            f"{field.name.replace('_', ' ')} {format_bytes(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        )
        return ", ".join(known) or "memory unknown"


def _device_of(caller: str, device: DeviceLike) -> torch.device:
    """The device meant by an argument, with its number filled in."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        found = torch.device("cpu") if found is None else found
    else:
        if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
            raise TypeError(
                f"{caller}() expected device to be a str, an int or a torch.device, "
                f"got {type(device).__name__!r}"
                f"{_C.see('options')}"
            )
        try:
            found = torch.device(device)
        except RuntimeError:
            raise ValueError(
                f"{caller}() does not know the device {device!r}{_C.see('options')}"
            ) from None
    if found.type != "cpu" and found.index is None:
        try:
            module = torch.get_device_module(found)
        except RuntimeError:  # "meta": a type that torch knows and that has no memory here
            raise ValueError(
                f"{caller}() has no device {str(found)!r} here{_C.see('options')}"
            ) from None
        # Asking for the current device would initialise one that is not in use yet.
        ready = getattr(module, "is_initialized", lambda: False)()
        found = torch.device(found.type, module.current_device() if ready else 0)
    return found


def _key(device: torch.device) -> tuple[int, int]:
    number = _DEVICE_NUMBERS.get(device.type, _PRIVATE_USE)
    return number, -1 if number == 0 else device.index


def _parse_budget(
    budget: int | str, caller: str = "limit_memory", name: str = "budget", what: str = "a budget"
) -> int:
    """Bytes of a budget: exact, a fraction of a byte rounded down."""
    expected = f"{caller}() expected {name} to be an int (bytes) or a str such as '2GiB'"
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        unit = None if match is None else _UNITS.get(match[3].lower())
        if match is None or unit is None:
            raise ValueError(f"{expected}, got {budget!r}{_C.see('options')}")
        size = int(Fraction(match[2]) * unit)
        size = -size if match[1] == "-" else size
    elif isinstance(budget, bool):
        raise TypeError(f"{expected}, got 'bool'{_C.see('options')}")
    else:
        try:
            size = operator.index(budget)
        except TypeError:
            raise TypeError(
                f"{expected}, got {type(budget).__name__!r}{_C.see('options')}"
            ) from None
    if size <= 0:
        raise ValueError(
            f"{caller}() expected {what} of at least 1 byte, got {budget!r}{_C.see('options')}"
        )
    if size > _LARGEST:
        raise ValueError(
            f"{caller}() expected {what} below 8 EiB, got {budget!r}{_C.see('options')}"
        )
    return size


def _host_bytes() -> int | None:
    """Physical memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


class MemoryLimit:
    """A limit in force, as returned by `limit_memory`.

    As a context manager it puts the limit that was there before back at the end of the
    block. Reservations have a limit of their own, which it leaves.
    """

    __slots__ = ("_key", "_previous", "budget", "device")

    def __init__(self, device: torch.device, budget: int | None, previous: int | None) -> None:
        self.device = device
        self.budget = budget
        self._previous = previous
        self._key = _key(device)

    def __repr__(self) -> str:
        budget = "none" if self.budget is None else format_bytes(self.budget)
        return f"<oomkit.MemoryLimit {budget} on {str(self.device)!r}>"

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _layers.set_user(self._key, self._previous)  # needs no memory, which `device.type` does


def _warn_outside() -> None:
    """Parameters of decorated steps that no limit of the CPU counts."""
    for label, outside in _C.outside_limit():
        if outside not in _said_outside.get(label, ()):
            _said_outside.setdefault(label, set()).add(outside)
            warnings.warn(
                f"limit_memory(): {format_bytes(outside)} of parameters of {label} were made "
                "before oomkit counted the CPU's tensors and are outside the limit: set a "
                "limit before the model is made"
                f"{_C.see('limit-memory')}",
                _C.OomkitWarning,
                stacklevel=3,
            )


_said_outside: dict[str, set[int]] = {}


def limit_memory(budget: int | str | None, *, device: DeviceLike = None) -> MemoryLimit:
    """limit_memory(budget, *, device=None) -> MemoryLimit

    Let tensors of this process use at most `budget` bytes of a device.

    Beyond it an allocation raises `torch.OutOfMemoryError`, on the CPU too. A limit below
    what is in use is allowed: nothing can be allocated until enough is freed.

    On the CPU oomkit counts tensors from the first limit (or decorated call, `inject_oom`) on:
    what was made before is not counted, then or later. So set a limit before the model is made;
    a warning says where parameters of a decorated step are outside it.

    On CUDA it is a share of the device for PyTorch's allocator, cached memory included and what
    is outside it (contexts, libraries, see `oomkit.budget`) not. It makes no context: before the
    program uses the device, the limit is noted, and put on when it does (with a warning where
    the allocator then knows no shares). PyTorch is asked how many devices there are, and
    without `device` for its accelerator: either may start the driver, after which a forked
    child cannot use CUDA any more.

    Parameters
    ----------
    budget : int, str or None
        Bytes, or a size such as "2GiB", "512 MiB" or "1.5GB"; None removes the limit.
    device : torch.device, str or int, optional
        The CPU or a CUDA device. By default the accelerator in use, else the CPU, which a
        line of the log then says.

    Returns
    -------
    MemoryLimit
        The limit is in force already; `with limit_memory(...)` also puts the previous one
        back at the end of the block.
    """
    size = None if budget is None else _parse_budget(budget)
    target = _device_of("limit_memory", device)
    if target.type not in ("cpu", "cuda"):
        raise ValueError(
            f"limit_memory() can limit 'cpu' and 'cuda' devices, got {str(target)!r}"
            f"{_C.see('limit-memory')}"
        )
    if target.type == "cuda" and target.index >= torch.cuda.device_count():
        raise ValueError(
            f"limit_memory(): there is no device {str(target)!r} here{_C.see('limit-memory')}"
        )
    # Made first: where there is no memory for it nothing has changed yet.
    limit = MemoryLimit(target, size, _layers.get_user(_key(target)))
    _layers.set_user(_key(target), size)
    if device is None and target.type == "cpu" and size is not None:
        _say_cpu()
    if target.type == "cpu" and size is not None:
        _warn_or_undo(limit)
    return limit


# A function of its own: a handler far behind the beginning of one makes CPython hang where not
# even a number can be made (tests/nomemory).
def _warn_or_undo(limit: MemoryLimit) -> None:
    try:
        _warn_outside()
    except BaseException:  # warnings are errors here: no limit without an answer
        limit.__exit__(None, None, None)
        raise


@functools.cache
def _say_cpu() -> None:
    """Once: whoever thinks of a GPU has none here."""
    logging.getLogger("oomkit").warning(
        "limit_memory() limits the CPU, because there is no accelerator here; pass "
        "device='cpu' to silence this"
        f"{_C.see('limit-memory')}"
    )


def memory(device: DeviceLike = None) -> MemoryInfo:
    """memory(device=None) -> MemoryInfo

    Memory figures of a device, by default of the accelerator in use, else of the CPU, where
    only tensors made since oomkit counts are in them (see `limit_memory`).

    It makes no context: figures of a device that is not in use yet are None. Without `device`
    PyTorch is asked for its accelerator, which may start the driver, after which a forked child
    cannot use CUDA any more.
    """
    return MemoryInfo(*_C.memory_figures(*_key(_device_of("memory", device))))


def max_memory_allocated(device: DeviceLike = None) -> int | None:
    """max_memory_allocated(device=None) -> int | None

    The highest number of allocated bytes of the whole run, or None where it is not known.

    oomkit resets PyTorch's peak counters at every step, which makes
    `torch.cuda.max_memory_allocated()` the peak of the last step; this one survives.
    """
    return _C.run_peak(*_key(_device_of("max_memory_allocated", device)))


def _held() -> int:
    """Bytes of tensors on the CPU, and what the accelerator's caches have reserved. To ask the
    driver would make a context on each device."""
    held = memory("cpu").allocated or 0
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        for index in range(torch.accelerator.device_count()):
            held += _C.device_held(*_key(torch.device(accelerator.type, index)))[1] or 0
    return held


class Freed(int):
    """Bytes that were freed: an int that shows itself for people."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{format_bytes(int(self))} freed>"


def cleanup() -> Freed:
    """cleanup() -> Freed

    Let go of what a handled error keeps alive, then return cached memory to the driver.

    For notebooks and the interactive interpreter, after a cell has run out of memory: its
    error is kept for a debugger, the error holds the frames and the frames the tensors.
    Takes out what is kept (`sys.last_exc` and so on; in IPython also the last traceback,
    the error of the last cell and errors among the outputs), clears the frames, frees what
    a failed backward left behind, collects garbage and empties the accelerator's cache.
    Inside an `except` block the error that is being handled stays as it is, with all
    that it holds: call it after the block. What variables hold is not touched.

    Returns
    -------
    Freed
        An int, the bytes freed: of tensors on the CPU (where oomkit counts them, see `memory`), and
        of the accelerator's reserved memory.
    """
    before = _held()
    _notebook.let_go()
    gc.collect()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()
    return Freed(max(0, before - _held()))
