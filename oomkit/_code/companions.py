"""What a step reads beside its arguments that is as long as the batch.

A default, an argument that a partial holds, a tensor of the closure or of the module: every
micro-batch would get all of its rows. Looked at once, before the first split call of a step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

_SHOWN = 4  # named in the message


def _has_rows(value: object, rows: int) -> bool:
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_nested:
            return False
    elif type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
        return False
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] == rows


def _held(function: types.FunctionType, given: set[str]) -> Iterator[tuple[str, Any]]:
    """Defaults that no argument replaces, and what the names of the code lead to."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        if name not in given:
            yield name, value
    for name, value in (function.__kwdefaults__ or {}).items():
        if name not in given:
            yield name, value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # empty
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def companions(
    plain: types.FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: set[int],
    rows: int,
) -> str | None:
    """Names and shapes of what has as many rows as the batch and is not split with it.

    Args:
        plain: the function behind the decorated callable.
        args: its arguments with those of partials, ``kwargs`` likewise.
        own: the identities of the call's own arguments, which the engine knows.
        rows: of the batch.
    """
    names = plain.__code__.co_varnames[: plain.__code__.co_argcount]
    bound = [*zip(names, args, strict=False), *kwargs.items()]
    found = [(name, value) for name, value in bound if id(value) not in own]
    found += _held(plain, {name for name, _ in bound})
    lines = dict.fromkeys(
        f"{name} {list(value.shape)}" for name, value in found if _has_rows(value, rows)
    )
    return ", ".join(list(lines)[:_SHOWN]) or None if rows > 1 else None
