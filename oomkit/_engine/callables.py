"""What callables that are given as options must take: said where they are given."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

__all__ = ["names_sum", "weight_problem"]


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


def names_sum(function: Any) -> bool:
    """Does the code of a function, or of one defined in it, name a sum over something?

    `reduction="sum"`, `loss.sum()`, `torch.sum`: where nothing else tells what a loss is.
    """
    found = [getattr(function, "__code__", None)]
    while found:
        code = found.pop()
        if not isinstance(code, CodeType):
            continue
        if {"sum", "nansum"} & {*code.co_names, *map(str, code.co_consts)}:
            return True
        if any(isinstance(c, tuple) and "sum" in c for c in code.co_consts):
            return True
        found += [c for c in code.co_consts if isinstance(c, CodeType)]
    return False
