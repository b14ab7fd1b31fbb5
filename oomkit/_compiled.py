"""Keeping torch.compile() away from oomkit's own Python code.

While a compiled function runs, torch compiles every Python frame below it, also those that
the engine calls between a failure and a replay: that takes seconds and warns of graph breaks
in code that is not the user's.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch


def _functions(namespace: dict[str, Any], module: str) -> Iterator[types.FunctionType]:
    """The functions that a module defines, methods included."""
    for value in list(namespace.values()):
        inner = getattr(value, "__func__", value)  # static and class methods
        if isinstance(inner, types.FunctionType):
            if inner.__module__ == module:
                yield inner
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(dict(vars(value)), module)


def leave_out(module: types.ModuleType) -> None:
    """Mark the code of a module as not to be compiled; nothing where torch has no such mark."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        action = frames._FrameAction  # type: ignore[union-attr]
        skip = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)  # type: ignore[union-attr]
        mark = frames.set_code_exec_strategy  # type: ignore[union-attr]
    except AttributeError:
        return
    for function in _functions(vars(module), module.__name__):
        mark(function.__code__, skip)
