"""What is private in torch, and used here: calls over a model whose torch lacks any of it are
refused with its name."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

REDUCER: Any = vars(dist)["Reducer"]
"""Torch's, in C++."""


def _attributes(kind: Any) -> set[str]:
    """Names of a class, and of what its methods assign to."""
    found = set(dir(kind))
    for base in kind.__mro__:
        found |= set(getattr(base, "__annotations__", ()))
        for method in vars(base).values():
            code = getattr(method, "__code__", None) or getattr(
                getattr(method, "__wrapped__", None), "__code__", None
            )
            found |= set(code.co_names) if code is not None else set()
    return found


@functools.cache
def lacks(*uses: tuple[Any, str]) -> str | None:
    """Of classes and names that are used of each: the first that there is not, or None."""
    for kind, names in uses:
        known = _attributes(kind)
        for wanted in names.split():
            if wanted not in known:
                return f"{kind.__name__}.{wanted}"
    return None
