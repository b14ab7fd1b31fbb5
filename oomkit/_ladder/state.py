"""Which optimizer state is in host memory, and what a ``step()`` elsewhere does about it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C


class _Hosted:
    """State of one optimizer that is on the host: address of a tensor -> the tensor."""

    def __init__(self, device: str) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.device = device
        self.in_parts = 0
        self.handles: list[Any] = []

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Bring everything back: this ``step()`` is torch's own, of all parameters."""
        if not self.in_parts:
            self.bring_back()

    def bring_back(self) -> None:
        for address, tensor in list(self.tensors.items()):
            tensor.data = tensor.data.to(self.device, copy=True)
            del self.tensors[address]

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what is no longer its state."""
        state = (values for values in optimizer.state.values() if isinstance(values, dict))
        there = {id(value) for values in state for value in values.values()}
        for address in [a for a in self.tensors if a not in there]:
            del self.tensors[address]

    def watch(self, optimizer: Any) -> None:
        for kind, hook in (
            ("register_step_pre_hook", self.before_step),
            ("register_load_state_dict_post_hook", self.after_load),
        ):
            register = getattr(optimizer, kind, None)
            if register is not None:
                self.handles.append(register(hook))
                _C.own_hooks(1)


_all: weakref.WeakKeyDictionary[Any, _Hosted] = weakref.WeakKeyDictionary()


@functools.cache
def _watch_copies() -> None:
    """Have copies and pickles of optimizers show state where torch looks for it.

    Nobody would bring the state of a copy back, which is none of ours. The host of the CPU
    is the CPU.
    """
    plain = torch.optim.Optimizer.__getstate__

    @functools.wraps(plain)
    def getstate(self: torch.optim.Optimizer) -> dict[str, Any]:
        known = _all.get(self)
        if known is not None and known.device != "cpu":
            known.bring_back()
        return plain(self)

    torch.optim.Optimizer.__getstate__ = getstate  # type: ignore[method-assign]


@contextmanager
def in_parts(optimizer: Any) -> Iterator[None]:
    """While an update runs in parts each brings its own state: nothing is brought back."""
    known = _all.get(optimizer)
    if known is None:
        yield
        return
    known.in_parts += 1
    try:
        yield
    finally:
        known.in_parts -= 1


def hosted_state(optimizer: Any, device: str | None) -> dict[int, torch.Tensor] | bool:
    """Return the tensors of an optimizer that are on the host.

    Args:
        optimizer: whose state it is.
        device: begin with none where there is no such optimizer yet, whose state is on
            this device. With ``None`` nothing is begun.

    Returns:
        Where there is no such optimizer, whether there is another one.
    """
    known = _all.get(optimizer)
    if known is None:
        if device is None:
            return bool(_all)
        _watch_copies()
        known = _Hosted(device)
        known.watch(optimizer)
        _all[optimizer] = known
    return known.tensors


def hosted_tidy(optimizer: Any) -> None:
    """Forget an optimizer that has nothing there."""
    known = _all.get(optimizer)
    if known is not None and not known.tensors:
        for handle in known.handles:
            handle.remove()
        del _all[optimizer]


def owns_memory(tensor: torch.Tensor) -> bool:
    """Say whether nothing else uses a tensor's memory, which can be exchanged then."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()  # itself counts as one
    users = torch._C._storage_Use_Count(storage._cdata)
    return bool(storage.nbytes() == tensor.nbytes and users <= 2)
