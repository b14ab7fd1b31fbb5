"""Sizes that outlive a run: what decorated steps with `remember=True` have found.

With them goes what was proven of the splits, which the next run believes once losses agree.
They are kept in one JSON file of the user's, `sizes.json` in the folder OOMKIT_CACHE_DIR, else
XDG_CACHE_HOME/oomkit, else ~/.cache/oomkit. An entry holds for one function (module, name and
code), shape of batch, device, release of torch, set of parameters and budget; of other budgets
only the measured peaks are used. Entries that no run has used for 90 days go, and the oldest
beyond 1000.

`list` and `clear` look after it; `state_dict` and `load_state_dict` are those of a step, for
steps over objects that have methods of these names themselves (modules).
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from . import _C
from ._engine import store as _store
from .memory import _DEVICE_NUMBERS
from .report import format_bytes

__all__ = ["Size", "Sizes", "clear", "list", "load_state_dict", "path", "state_dict"]

_UNWRAP_DEPTH = 16


# --- what the engine calls ------------------------------------------------------------


@functools.cache
def _device_name(kind: str, index: int) -> str:
    """The same for devices on which the same sizes fit."""
    if kind == "cpu":
        return kind
    try:
        found = torch.get_device_module(kind).get_device_properties(index)
        return f"{found.name}, {format_bytes(found.total_memory)}"
    except Exception:  # a backend without such a call, or with fields of its own
        return kind


def _place(number: int, index: int, parameters: int, size: int) -> tuple[str, str, int, int]:
    """(torch, device, parameters, their bytes): where, and of which model, sizes hold."""
    kind = next((name for name, n in _DEVICE_NUMBERS.items() if n == number), "privateuse")
    return str(torch.__version__), _device_name(kind, index), parameters, size


def _code_of(found: Any) -> types.CodeType | None:
    """The code behind a callable, through methods, partials, modules and decorators."""
    for _ in range(_UNWRAP_DEPTH):
        if isinstance(found, types.FunctionType):
            inner = getattr(found, "__wrapped__", None)
            if inner is None:
                return found.__code__
            found = inner
        elif isinstance(found, types.MethodType):
            found = found.__func__
        elif isinstance(found, functools.partial):
            found = found.func
        elif isinstance(found, torch.nn.Module):
            found = type(found).forward
        elif isinstance(found, (staticmethod, classmethod)) or hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            found = vars(type(found)).get("__call__")
    return None


def _digest(code: types.CodeType) -> str:
    """Of what a function does; where it stands in its file does not matter."""

    def plain(constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return _digest(constant)
        if isinstance(constant, frozenset):  # in no order of its own
            return repr(sorted(map(repr, constant)))
        return repr(constant)

    parts = [code.co_code.hex(), *map(plain, code.co_consts), *code.co_names]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    kind = type(function)
    module = getattr(function, "__module__", None) or kind.__module__
    return f"{module}.{getattr(function, '__qualname__', None) or kind.__qualname__}"


def _recall(
    function: Any, place: tuple[str, str, int, int], budget: int | None
) -> tuple[_store.Key | None, builtins.list[dict[str, Any]]]:
    """The key of a step's notes (None: none are taken), and what earlier runs have noted."""
    code = _code_of(function)
    version, device, parameters, size = place
    key = _store.Key(
        function=_name_of(function),
        code="" if code is None else _digest(code),
        device=device,
        torch=version,
        parameters=(parameters, size),
    )
    return _store.recall(key, budget)


# --- for people -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes found for one shape of batch, under one budget.

    `batch` and `accumulation_steps` are those of the last call that worked (None: none did);
    `budget` is the limit in bytes, None where the device itself was the limit.
    """

    function: str
    device: str
    torch: str
    budget: int | None
    batch: int | None
    accumulation_steps: int | None
    used: datetime

    @property
    def micro_batch(self) -> int | None:
        """Rows of the largest of equal micro-batches."""
        if self.batch is None or self.accumulation_steps is None:
            return None
        return -(-self.batch // self.accumulation_steps)


class Sizes(tuple[Size, ...]):
    """A tuple of Size, shown as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return f"no sizes in {path()}"
        head = ("function", "device", "torch", "budget", "batch", "micro-batch", "used")
        rows = [
            (
                size.function,
                size.device,
                size.torch,
                format_bytes(size.budget),
                "-" if size.batch is None else str(size.batch),
                "-" if size.micro_batch is None else str(size.micro_batch),
                size.used.astimezone().strftime("%Y-%m-%d %H:%M"),
            )
            for size in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        )


def _size_of(entry: dict[str, Any]) -> Size:
    return Size(
        function=entry["function"],
        device=entry["device"],
        torch=entry["torch"],
        budget=entry["budget"],
        batch=entry["sizes"].get("batch"),
        accumulation_steps=entry["sizes"].get("accumulation_steps"),
        used=datetime.fromtimestamp(entry["used"], UTC),
    )


def _matches(function: str | Callable[..., Any] | None) -> Callable[[dict[str, Any]], bool]:
    if function is None:
        return lambda entry: True
    if isinstance(function, str):
        wanted = function
        return lambda entry: entry["function"] == wanted or entry["function"].endswith("." + wanted)
    if not callable(function):
        raise TypeError(
            f"oomkit.sizes expected a function or its name, got {type(function).__name__!r}"
            f"{_C.see('options')}"
        )
    name = _name_of(function)
    return lambda entry: bool(entry["function"] == name)


def path() -> Path:
    """path() -> Path

    The file, whether it is there or not.
    """
    return _store.path()


def list(function: str | Callable[..., Any] | None = None) -> Sizes:
    """list(function=None) -> Sizes

    The sizes in the file, those used last first.

    Parameters
    ----------
    function : str or callable, optional
        Only those of this function: itself, or the end of its dotted name.
    """
    wanted = _matches(function)
    entries: Iterable[dict[str, Any]] = sorted(
        _store.entries(), key=lambda entry: int(entry["used"]), reverse=True
    )
    return Sizes(_size_of(entry) for entry in entries if wanted(entry))


def clear(
    function: str | Callable[..., Any] | None = None, *, older_than: timedelta | None = None
) -> int:
    """clear(function=None, *, older_than=None) -> int

    Remove sizes from the file, all of them by default; their number.

    Parameters
    ----------
    function : str or callable, optional
        Only those of this function: itself, or the end of its dotted name.
    older_than : datetime.timedelta, optional
        Only those that no run has used for so long.

    Raises
    ------
    OSError
        The file cannot be written, or is no file of this version of oomkit.
    """
    wanted = _matches(function)
    if older_than is not None and not isinstance(older_than, timedelta):
        raise TypeError(
            "clear(older_than=...) expected a datetime.timedelta, "
            f"got {type(older_than).__name__!r}"
            f"{_C.see('options')}"
        )
    age = None if older_than is None else older_than.total_seconds()
    return _store.clear(wanted, age)


def state_dict(step: Any) -> dict[str, Any]:
    """state_dict(step) -> dict

    What `step.state_dict()` is: the sizes found so far, for a checkpoint. For steps over
    modules and other objects, whose own `state_dict` that name leads to.
    """
    return _C._step_state(step)


def load_state_dict(step: Any, state: dict[str, Any]) -> None:
    """load_state_dict(step, state)

    What `step.load_state_dict(state)` is: begin with the sizes of a `state_dict`.

    Raises
    ------
    TypeError, ValueError
        It is no such dict. Nothing was changed.
    """
    _C._step_load(step, state)
