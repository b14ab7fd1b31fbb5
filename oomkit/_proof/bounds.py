"""Bounds on a number of the whole batch, which no gradient of a proof shows while they are not met.

``loss.clamp(max=c)``, ``(loss - b).abs() + b``: while all parts are on one side of the bound, they
make the whole; in a later call one part may be on the other side.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["bounds"]

# Nodes of functions that are linear on each side of a bound. A curve shows in a gradient.
_BENT = {
    "Abs": "abs",
    "Clamp": "clamp",
    "ClampMax": "clamp",
    "ClampMin": "clamp",
    "Hardtanh": "hardtanh",
    "HuberLoss": "huber_loss",
    "LeakyRelu": "leaky_relu",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Relu": "relu",
    "SmoothL1Loss": "smooth_l1_loss",
    "Threshold": "threshold",
}
_SAVED = ("_saved_self", "_saved_other", "_saved_result")
_MOST = 1000  # nodes that are looked at


def bounds(root: torch.Tensor) -> list[tuple[str, tuple[float, ...]]]:
    """Functions with a bound between a loss and what reduces the batch to a number.

    Args:
        root: a loss; one that is no scalar has none.

    Returns:
        Of each, in the order of the graph, its name and the scalars that it was given.
    """
    if root.ndim or root.grad_fn is None:
        return []
    found = []
    seen = {root.grad_fn}
    work: list[Any] = [root.grad_fn]
    while work and len(seen) < _MOST:
        node = work.pop()
        name = _BENT.get(node.name().partition("Backward")[0])
        given = _given(node) if name else ()
        if name and given:
            found.append((name, given))
        for following, at in node.next_functions:
            if following is not None and following not in seen and _is_scalar(following, at):
                seen.add(following)
                work.append(following)
    return found


def _is_scalar(node: Any, at: int) -> bool:
    known = getattr(node, "_input_metadata", ())  # of gradients: shapes of the forward's results
    return at < len(known) and len(known[at].shape) == 0


def _given(node: Any) -> tuple[float, ...]:
    values = []
    for name in _SAVED:
        try:
            value = getattr(node, name, None)
        except RuntimeError:  # the graph has been freed
            continue
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            values.append(float(value.detach()))
    return tuple(values)
