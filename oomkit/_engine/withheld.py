"""What torch's own helpers make of gradients that are withheld while a step is split.

Between a backward and the end of a micro-batch that is not the last no parameter has a
gradient. clip_grad_norm_ takes that for a norm of 0; clip_grad_value_ raises, because its
grouping of tensors does not accept an empty list. That norm is a plain tensor, where the one of
gradients that fully_shard() spreads over ranks is a DTensor, whose full_tensor() a step may call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.clip_grad as _clip


def accept_no_gradients() -> None:
    """Let the grouping in ``torch.nn.utils.clip_grad`` answer for no tensors at all, and the norm
    of none be as whole as that of tensors on several ranks.

    Done once, before the first split of the process; grouping nothing into nothing changes no
    call that worked before. Nothing is done where torch has no such function.
    """
    _replace("_group_tensors_by_device_and_dtype", _grouping)
    _replace("_get_total_norm", _whole_norm)


Function = Callable[..., Any]


def _replace(name: str, by: Callable[[Function], Function]) -> None:
    plain = getattr(_clip, name, None)
    if plain is None or getattr(plain, "_oomkit", False):
        return
    made: Any = functools.wraps(plain)(by(plain))
    made._oomkit = True
    setattr(_clip, name, made)


def _grouping(plain: Function) -> Function:
    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(tensors, *args, **kwargs) if tensors and tensors[0] else {}

    return group


def _whole_norm(plain: Function) -> Function:
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensors, *args, **kwargs)
        if isinstance(tensors, list) and not tensors:
            found.full_tensor = functools.partial(torch.zeros_like, found.detach())
        return found

    return norm
