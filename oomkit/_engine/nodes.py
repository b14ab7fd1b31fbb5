"""Results of a split call that required grad: their graphs are gone, so a gradient is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _C


class _Refused(torch.autograd.Function):
    # The value comes in a list: an output that is also an input would be a view of it.
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: list[torch.Tensor], why: str
    ) -> torch.Tensor:
        ctx.why = why
        # A detached view would join the graph together with its base; `.data` is no view.
        return value[0].data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _C.SplitError(ctx.why)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)  # without elements it allocates nothing: there may be no memory

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _C.SplitError(  # _Refused comes first
            f"a gradient passed a result of a split step{_C.see('returned-loss')}"
        )


class Refusal:
    """Makes tensors that require grad and raise SplitError when a gradient reaches them.

    The undecorated step would have returned tensors with a graph. Those of the micro-batches
    are freed, and a detached tensor in their place would train something else without a word.

    The nodes lead to `leaves`: an engine that is asked for the gradients of some of them
    (`autograd.grad`, `backward(inputs=...)`) passes over paths that lead elsewhere, and then
    would not raise.

    Args:
        label: the step's name.
        count: of micro-batches.
        leaves: parameters and tensors of the batch that require grad.
    """

    def __init__(self, label: str | None, count: int, leaves: Sequence[torch.Tensor]) -> None:
        self._label = label or "the step"
        self._count = count
        self._leaves = leaves
        self._anchor: torch.Tensor | None = None

    def __call__(self, value: torch.Tensor, place: str, is_loss: bool) -> torch.Tensor:
        """Return the value, which was joined at `place`, as such a tensor."""
        what = (
            "has been through its backward() inside the step"
            if is_loss
            else "is not part of the returned loss"
        )
        why = (
            f"a gradient reached {place} of {self._label}, which {what}: the step ran in "
            f"{self._count} micro-batches and their graphs are gone. Compute inside the step "
            "what needs a gradient, and make it part of the loss (the first of a tuple, or "
            f"'loss' of a mapping); where none is needed, use {place}.detach()"
            f"{_C.see('returned-loss')}"
        )
        # Whatever holds where the step is called: its own code recorded a graph.
        with torch.inference_mode(False), torch.enable_grad():
            if self._anchor is None:
                leaf = torch.empty(0, requires_grad=True)
                self._anchor = _Anchor.apply(leaf, *self._leaves)  # type: ignore[no-untyped-call]
            refused: torch.Tensor = _Refused.apply(  # type: ignore[no-untyped-call]
                self._anchor, [value], why
            )
        return refused


def lost_graph(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of a tensor that had a graph, for a gradient to raise SplitError there.

    Args:
        value: of any shape, without a graph.
        leaves: see Refusal.
    """
    why = (
        "a gradient reached a tensor that the step had kept from an earlier call with its graph, "
        "and replaced before it ran out of memory: its values are back, its graph is gone. Run "
        "backward() in the call that makes the graph, or keep the tensor with detach(). It stays "
        "so until the step, or you, store something else in its place"
        f"{_C.see('lost-graph')}"
    )
    with torch.inference_mode(False), torch.enable_grad():
        # No leaf of its own beside them: it would be one that the step is not known to have.
        known = [leaf for leaf in leaves if leaf.requires_grad]
        known = known or [torch.empty(0, requires_grad=True)]
        anchor = _Anchor.apply(*known)  # type: ignore[no-untyped-call]
        lost: torch.Tensor = _Refused.apply(anchor, [value], why)  # type: ignore[no-untyped-call]
    return lost
