"""In place of gradients of an earlier call that are gone: their values are an error to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _C

_aten = torch.ops.aten
_PASSES_ON = {_aten.detach.default, _aten.alias.default, _aten.clone.default}

READ = (
    "the step read a gradient of an earlier call before its own backward(), and that gradient is "
    "gone: the call ran out of memory after its zero_grad(), or it is split. Store what the next "
    "call needs of a gradient in a tensor or a number before the step returns"
    f"{_C.see('earlier-gradient')}"
)


class EarlierGradient(torch.Tensor):
    """Has the shape of a parameter and no memory. It can be cleared, or replaced."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    behind: torch.Tensor | None  # the gradient itself, zeros since it was cleared or not
    origin: EarlierGradient | None  # whose copy it is
    was_read: bool  # it or a copy raised: the step may have caught that

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> EarlierGradient:
        made: EarlierGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.behind, made.origin, made.was_read = None, None, False
        return made

    def clear(self) -> EarlierGradient:
        """Set what it stands in front of to zero."""
        if self.behind is not None:
            self.behind.zero_()
        return self

    def leave(self) -> bool:
        """Let go of the gradient behind it. Whether a value has been asked for."""
        self.behind = None
        return self.was_read

    def _refuse(self, *_: Any, **__: Any) -> Any:
        (self if self.origin is None else self.origin).was_read = True
        raise _C.SplitError(READ)

    numpy = tolist = __array__ = _refuse  # torch would say that a subclass has none

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<gradient of an earlier call, which is gone>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.zero_.default:
            return args[0].clear()
        if func is _aten._foreach_zero_.default:
            return [one.clear() for one in args[0]]
        if func is _aten.detach_.default:
            return args[0]
        if func in _PASSES_ON:  # of a copy of the whole model, or `.grad.data`
            passed = cls(args[0])
            passed.behind = None if func is _aten.clone.default else args[0].behind
            passed.origin = args[0].origin if args[0].origin is not None else args[0]
            return passed
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        next(one for one in leaves if isinstance(one, EarlierGradient))._refuse()


def stand_in(
    parameter: torch.Tensor, gradient: torch.Tensor | None, made: EarlierGradient | None
) -> EarlierGradient | None:
    """Return what stands in front of a gradient; None where it would need a class of its own.

    Args:
        parameter: that has the gradient.
        gradient: what is in its `.grad`.
        made: what this has returned for the parameter before, to be used again.
    """
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if parameter.layout is not torch.strided:
        return None
    made = EarlierGradient(parameter) if made is None else made
    made.behind, made.was_read = gradient, False
    return made
