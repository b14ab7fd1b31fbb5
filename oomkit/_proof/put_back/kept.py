"""Tensors that a run of a proof writes to after an update: kept before their first write, and put
back after the run.

What the code shows has been marked (plain_state.py); this sees every write by torch, however its
tensor was come by: from a property, an entry of `optimizer.state`, the code of another library.
Not before the update: while any dispatch mode is active, autograd adds gradients up out of place,
and the run would need more memory than the micro-batches that it stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ... import _C
from ..values import own

__all__ = ["Kept"]


@functools.cache
def _writes(func: torch._ops.OpOverload) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Which arguments an operator writes to (place and name), and whether it makes its results."""
    schema = func._schema
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return written, all(made.alias_info is None for made in schema.returns)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            mine = own(value)
            if mine.layout == torch.strided and mine.device.type != "meta":
                yield mine
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered at the first update of a run. Not kept: parameters and their gradients, which have
    rules of their own, and what the run has made itself.

    Args:
        params: the parameters.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would give up what runs below, for good."""
        return True

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = params
        self._entered = False
        self._below = 0  # modes that are active when a run begins
        self._left_out: set[int] = set()  # storages, by their address
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def begin(self) -> None:
        """A run begins."""
        self._below = _len_torch_dispatch_stack()

    def updated(self) -> None:
        """An update has been held back: what follows may be what the step does once."""
        if self._entered or _len_torch_dispatch_stack() != self._below:
            return  # a mode of the step's own, which ends by taking out the uppermost one
        gradients = [p.grad for p in self._params if p.grad is not None]
        self._left_out = {t.untyped_storage()._cdata for t in _tensors([*self._params, *gradients])}
        self.__enter__()  # type: ignore[no-untyped-call]
        self._entered = True

    def end(self) -> None:
        """The run ends: what was written to stays until `put_back`."""
        entered, self._entered = self._entered, False
        if entered and _len_torch_dispatch_stack() > self._below:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """What was written to is what it was. May be called again where it has failed."""
        while self._kept:
            place = next(reversed(self._kept))
            storage, was = self._kept[place]
            if storage.nbytes() != was.nbytes():
                storage.resize_(was.nbytes())
            storage.copy_(was)
            del self._kept[place]
        self._left_out.clear()

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._left_out and place not in self._kept:
            on_cpu = storage.device.type == "cpu"
            copy = _C.exempt(storage.clone if on_cpu else storage.cpu)
            self._kept[place] = storage, copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # an operator of higher order, whose parts come here
        written, makes = _writes(func)
        for i, name in written:
            for tensor in _tensors([args[i] if i < len(args) else kwargs.get(name)]):
                self._keep(tensor)
        result = func(*args, **kwargs)
        if makes:
            made = {t.untyped_storage()._cdata for t in _tensors([result])}
            given = (t.untyped_storage()._cdata for t in _tensors([*args, *kwargs.values()]))
            self._left_out |= made.difference(given)
        return result
