"""What is private in torch, and used here: calls over a model whose torch lacks any of it are
refused with its name. A torch that has all of it, but was not tried, is told of."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist

from .. import _C

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


TRIED = {
    "DistributedDataParallel": ("2.11", "2.13"),
    "join()": ("2.13",),
    "fully_shard()": ("2.13",),
}
"""Minor versions of torch with which what is used of it has run."""


def refusal(of: str, *uses: tuple[Any, str], missing: str | None = None) -> str | None:
    """Why no call over `of` is agreed on, or None.

    A version that was not tried is none: who installs a newer torch has steps that run, which
    would die of what oomkit is there for. What such a version may have changed without another
    name is looked at in each run: ranks vote on where they are, and a split is proven before it
    is used. So it works, and a line of the log says on what terms.
    """
    tried = ", ".join(TRIED[of])
    missing = missing or lacks(*uses)
    if missing is not None:
        return f"{of} of torch {torch.__version__} has no {missing} (tried: torch {tried})"
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in TRIED[of]:
        _tell(of, minor, tried)
    return None


@functools.cache
def _tell(of: str, minor: str, tried: str) -> None:
    """Once, on one rank."""
    if dist.get_rank() == 0:
        logging.getLogger("oomkit").warning(
            "%s of torch %s was not tried with several ranks (tried: %s); all private names that "
            "oomkit uses are there, so that steps are agreed on%s",
            *(of, minor, tried, _C.see("distributed")),
        )
