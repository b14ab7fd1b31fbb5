"""What is wrong with options that name or are something to call: said where they are given."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

from .. import _C

__all__ = ["argument_problem", "close_match", "names_sum", "weight_problem"]


def close_match(name: str, names: Sequence[str]) -> str:
    """ "; did you mean 'batch'?", or "" where none of the names is like it."""
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _names(given: Any) -> Iterable[str]:
    """Those in a tuple, list, set or dict; none in a number or a function."""
    return given if isinstance(given, tuple | list | set | frozenset | dict) else ()


def argument_problem(names: tuple[str, ...], options: dict[str, Any]) -> str:
    """Which name that batch=, static= or dim= has is that of no parameter; "" for none.

    `names` are those of the parameters, with "*args" and "**kwargs": then any name may be meant.
    """
    if any(name.startswith("*") for name in names):
        return ""
    for option in ("batch", "static", "dim"):
        given = options.get(option)
        for name in [given] if isinstance(given, str) else _names(given):
            argument = re.split(r"[.\[]", name, maxsplit=1)[0]
            if argument not in names and (option, name) != ("dim", "return"):
                return (
                    f"auto_batch got {option}={name!r}, expected a parameter of the function: "
                    f"{', '.join(names)}{close_match(argument, names)}"
                    f"{_C.see('options')}"
                )
    return ""


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
            f"{_C.see('options')}"
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
