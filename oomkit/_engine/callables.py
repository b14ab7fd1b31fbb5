"""What callables that are given as options must take: said where they are given."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["weight_problem"]


def weight_problem(weight: Any) -> str:
    """Why `weight` cannot be called with a micro-batch; "" where it can, or nobody knows."""
    try:
        signature = inspect.signature(weight)
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    try:
        signature.bind(None)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = signature.replace(parameters=bare, return_annotation=signature.empty)
        name = getattr(weight, "__name__", type(weight).__name__)
        return (
            "auto_batch(weight=...) expected a callable that takes one argument, the micro-batch "
            f"(a tuple where several arguments are split), got {name}{shown}: {error}; take "
            "one and unpack it, as in `lambda batch: (batch[1] != -100).sum()`"
        )
    return ""
