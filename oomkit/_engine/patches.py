"""What oomkit changes in torch beside the two functions of ``torch.autograd``.

Each is put in place once per process, by the engine (C): nothing is changed at import. And
what must not have been changed by somebody else.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from .. import _C
from .._code.objects import FOREIGN, LIBRARIES, unwrap, wrapped

_CALLERS = 64  # between the step and where a hook is registered
# Modules of torch whose functions register and remove hooks for their caller.
_HOOKS = frozenset(
    {
        __name__,
        "torch._tensor",
        "torch.autograd.function",
        "torch.autograd.graph",
        "torch.nn.modules.module",
        "torch.optim.optimizer",
        "torch.utils.hooks",
    }
)


def watch_train() -> None:
    """Tell the engine of every ``train()`` and ``eval()`` before it sets the flag.

    A step that fails between ``model.eval()`` and ``model.train()`` must begin again as it
    began. Both end in ``Module.train``, of every child.
    """
    plain = torch.nn.Module.train

    @functools.wraps(plain)
    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        if not is_compiling():  # no call of ours fits into a graph of torch.compile
            _C._mode_changes(self)
        return plain(self, mode)

    torch.nn.Module.train = train  # type: ignore[method-assign, assignment]


def watch_hooks() -> None:
    """Tell the engine of every hook that the user's own code registers or removes.

    A step that fails between ``h = layer.register_forward_hook(f)`` and ``h.remove()`` must begin
    again without the hook. All of torch's functions that register one end in a
    ``RemovableHandle`` of the table that it is in. What a library registers stays: it may do so
    once, and note elsewhere that it has.
    """
    begin, remove = RemovableHandle.__init__, RemovableHandle.remove

    @functools.wraps(begin)
    def __init__(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if not is_compiling() and (step := _C._hooks_count()) is not None:
            line = _line_of_user(sys._getframe(1), step)
            if line is not None:
                _C._hooks_change(_tables(self), self.id, (weakref.ref(self), line))

    @functools.wraps(remove)
    def remove_hook(self: RemovableHandle) -> None:
        if not is_compiling() and (step := _C._hooks_count()) is not None:
            frame = sys._getframe(1)
            if _line_of_user(frame, step) is not None and not _is_done(self, frame):
                _C._hooks_change(_tables(self), self.id, None)
        remove(self)

    RemovableHandle.__init__ = __init__  # type: ignore[method-assign]
    RemovableHandle.remove = remove_hook  # type: ignore[method-assign]


def _tables(handle: RemovableHandle) -> tuple[Any, ...]:
    refs = (handle.hooks_dict_ref, *handle.extra_dict_ref)
    return tuple(table for ref in refs if (table := ref()) is not None)


def _is_done(handle: RemovableHandle, frame: types.FrameType | None) -> bool:
    """Whether a hook takes itself out, having made what it was there to make: buffers of a first
    batch, say, which stay where only the whole batch has them."""
    hook = next((table.get(handle.id) for table in _tables(handle)), None)
    function, _, _ = unwrap(hook, (), {})
    while function is not None and frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def _line_of_user(frame: types.FrameType | None, step: object) -> str | None:
    """Where a hook is registered or removed, if by code that is read for plain state, too: the
    line, and those that have called it, up to the step's own. Two hooks that one helper registers
    are two."""
    while frame is not None and frame.f_globals.get("__name__") in _HOOKS:
        frame = frame.f_back
    if frame is None:
        return None
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    if top in FOREIGN or top in LIBRARIES or top in sys.stdlib_module_names:
        return None
    lines = [f"{frame.f_code.co_filename}:{frame.f_lineno}"]
    codes = {function.__code__ for function in wrapped(unwrap(step, (), {})[0])}
    for _ in range(_CALLERS):
        if frame.f_code in codes:
            return ", called at ".join(lines)
        if frame.f_back is None:
            break
        frame = frame.f_back
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return lines[0]


def watch_schedulers() -> None:
    """Tell the engine of every scheduler and averaged model that comes to be.

    One that no name of a step leads to is known by this alone, and may be stepped before the
    loss. ``__new__``, because copies and what was pickled have no ``__init__`` run, and schedulers
    need not call that of their base.
    """
    for kind in (torch.optim.lr_scheduler.LRScheduler, torch.optim.swa_utils.AveragedModel):
        if "__new__" not in vars(kind):
            made = _telling(kind.__new__)
            # What tools that read a signature find first.
            made.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined]
            kind.__new__ = staticmethod(made)  # type: ignore[method-assign]


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: type, *_: Any, **__: Any) -> Any:
        made = plain(cls)
        _C._scheduler_made(made)
        return made

    return __new__


def watch_zero_grad() -> Callable[..., None]:
    """Tell the engine of every ``zero_grad()`` of a module, before it clears anything.

    Put in place before the first split of a process. One function in the class does for all
    modules, of which there may be thousands; those that have a method of their own are seen
    to one by one.

    Returns:
        What stands in the class now.
    """
    plain = torch.nn.Module.zero_grad

    @functools.wraps(plain)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        if not is_compiling():
            _C._zero_grad_begins(self)
        plain(self, set_to_none)

    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
    return zero_grad


def find_zero_grad() -> Callable[..., None] | None:
    """``torch.optim.Optimizer.zero_grad`` where it is torch's own, and nobody's patch of it.

    A call of it that has nothing to clear is left out, which would also leave out what
    somebody's patch does. The function and those that it wraps must live in torch's modules.
    """
    found = vars(torch.optim.Optimizer).get("zero_grad")
    inner = found
    for _ in range(4):
        if not _is_of_torch(inner):
            return None
        inner = vars(inner).get("__wrapped__")
        if inner is None:
            return found
    return None


def _is_of_torch(function: object) -> bool:
    """Whether the code of a function is torch's: ``functools.wraps`` copies only the name."""
    if type(function) is not types.FunctionType:  # any other object may forward its attributes
        return False
    return function.__globals__.get("__name__") in ("torch._compile", "torch.optim.optimizer")
