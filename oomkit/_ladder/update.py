"""One ``step()`` around the parts of an update: hooks, marks and counts are those of one."""

from __future__ import annotations

from typing import Any

import torch

from . import state as _state


def _below(step: Any) -> Any:
    """The ``step`` of a class below torch's profile wrapper, which runs the hooks."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def around_parts(optimizer: torch.optim.Optimizer, original: Any, parts: Any) -> Any:
    """What to call in place of ``step()`` so that hooks and marks are those of one step.

    Args:
        optimizer: whose update goes in parts.
        original: what stands as ``step`` in its instance dictionary, or ``None``.
        parts: called with the optimizer, the function of one part, and ``step()``'s
            arguments.

    Returns:
        A callable of ``step()``'s arguments, or ``None`` where something of the user's
        stands around the class's own method: what it does cannot be known.
    """
    step = type(optimizer).step
    below = _below(step)

    def in_parts(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return parts(self, below, args, kwargs)

    whole = in_parts
    if below is not step:
        whole = torch.optim.Optimizer.profile_hook_step(in_parts)
    scheduled = getattr(original, "_wrapped_by_lr_sched", False)
    if original is not None and (
        not scheduled or getattr(original, "__wrapped__", None) is not step
    ):
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        if scheduled:  # what a scheduler's own wrapper notes
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with _state.in_parts(optimizer):
            return whole(optimizer, *args, **kwargs)

    return run
