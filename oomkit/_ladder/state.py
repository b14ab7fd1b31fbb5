"""Which optimizer state is in host memory, and what a ``step()`` elsewhere does about it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Hosted:
    """State of one optimizer that is on the host: address of a tensor -> the tensor."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.in_parts = False
        self.handle: Any = None

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Bring everything back: this ``step()`` is torch's own, of all parameters."""
        if self.in_parts:
            return
        where = {
            id(value): param.device
            for param, values in optimizer.state.items()
            for value in values.values()
        }
        for address, tensor in list(self.tensors.items()):
            tensor.data = tensor.data.to(where.get(address, tensor.device))
            del self.tensors[address]


_all: weakref.WeakKeyDictionary[Any, _Hosted] = weakref.WeakKeyDictionary()


@contextmanager
def in_parts(optimizer: Any) -> Iterator[None]:
    """While an update runs in parts each brings its own state: nothing is brought back."""
    known = _all.get(optimizer)
    if known is None:
        yield
        return
    known.in_parts = True
    try:
        yield
    finally:
        known.in_parts = False


def hosted_state(optimizer: Any, make: bool | None) -> dict[int, torch.Tensor] | None:
    """Return the tensors of an optimizer that are on the host.

    Args:
        optimizer: whose state it is.
        make: begin with none where there is no such optimizer yet; with ``None`` forget one
            that has none. Else return ``None`` where there is none.
    """
    known = _all.get(optimizer)
    if known is None and make:
        known = _Hosted()
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is not None:
            known.handle = register(known.before_step)
        _all[optimizer] = known
    elif known is not None and make is None and not known.tensors:
        if known.handle is not None:
            known.handle.remove()
        del _all[optimizer]
    return None if known is None else known.tensors
