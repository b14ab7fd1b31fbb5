"""The Python half of losses that are returned to a caller who runs backward.

The engine (C) calls these; nothing here is public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from .. import _C

_anchor: torch.Tensor | None = None


class _SplitLoss(torch.autograd.Function):
    """The node of a loss whose graphs are gone: hands the gradient to the engine."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        pending: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.mark_dirty(loss)
        ctx.pending = pending
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.pending(gradient)
        return None, None, None


def split_loss(loss: torch.Tensor, pending: Callable[[torch.Tensor], None]) -> None:
    """Give ``loss`` (without a graph; changed in place) a node that calls ``pending``.

    The leaf that makes it require grad is of ours and never gets a gradient. Its node can
    be found by ``grad_fn.metadata["oomkit"]``.
    """
    global _anchor
    if _anchor is None:
        _anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        _SplitLoss.apply(_anchor, loss, pending)  # type: ignore[no-untyped-call]
    assert loss.grad_fn is not None
    metadata: Any = loss.grad_fn.metadata  # a dict, whatever torch's stubs say
    metadata["oomkit"] = pending


def modes_then(autocast: Sequence[tuple[str, torch.dtype]]) -> ExitStack:
    """Autocast as it was: on for these (device type, dtype), else off."""
    stack = ExitStack()
    wanted = dict(autocast)
    for device in {"cpu", "cuda", *wanted}:
        if device in wanted:
            stack.enter_context(torch.autocast(device, dtype=wanted[device]))
        elif torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def saved_pack(tensor: torch.Tensor) -> None:
    """Keeps nothing of a saved tensor: the graph of a failed attempt is given back."""


def saved_unpack(packed: None) -> NoReturn:
    raise RuntimeError(
        "oomkit: trying to backward through this graph a second time: it was freed when "
        "backward() ran out of memory and was replayed in micro-batches. Call backward() "
        "once, on the whole loss."
        f"{_C.see('returned-loss')}"
    )
