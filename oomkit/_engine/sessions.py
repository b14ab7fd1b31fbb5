"""Where interactive sessions keep the last error, whose frames hold what a cell made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .. import _C

_LAST = ("last_exc", "last_value", "last_traceback", "last_type")

# Attributes of IPython's shell and of what it prints tracebacks with.
_PRINTERS = ("InteractiveTB", "SyntaxTB")
_RESULT_ERRORS = ("error_in_exec", "error_before_exec")


def _shell() -> Any:
    """IPython's shell, or None. It is asked for only where it has been imported."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


def _take(holder: Any, name: str) -> Any:
    """What an attribute holds; None from now on."""
    value = getattr(holder, name, None)
    if value is not None:
        setattr(holder, name, None)
    return value


def _shell_errors(shell: Any) -> Iterator[Any]:
    """Exceptions and tracebacks that a shell keeps, taken out of it."""
    result = getattr(shell, "last_execution_result", None)
    for name in _RESULT_ERRORS:
        yield _take(result, name)
    for name in _PRINTERS:
        printer = getattr(shell, name, None)
        yield _take(printer, "tb")
        yield _take(printer, "last_syntax_error")
        debugger = getattr(printer, "pdb", None)
        if debugger is not None:  # of %debug
            debugger.reset()  # forgets its frames
    # A cell whose value is an exception: `error` on its last line.
    names = getattr(shell, "user_ns", {})
    for history in (names, names.get("Out", {}), names.get("_oh", {})):
        for key in [
            key
            for key, value in history.items()
            if isinstance(value, BaseException) and _is_history(key)
        ]:
            yield history.pop(key)
            if key in ("_", "__", "___"):
                history[key] = ""  # as before the first output


def _is_history(key: Any) -> bool:
    """Is it a number of Out, or `_`, `__`, `___` or `_12`?"""
    if isinstance(key, int):
        return True
    return isinstance(key, str) and (key.strip("_") == "" or key[:1] == "_" and key[1:].isdigit())


def let_go() -> None:
    """Take out what is kept of the last error and clear the frames that it holds.

    The error that a caller is handling just now stays as it is.
    """
    kept = [vars(sys).pop(name, None) for name in _LAST]
    shell = None
    with contextlib.suppress(Exception):  # other people's code, and only tidying up
        shell = _shell()
    if shell is not None:
        errors = _shell_errors(shell)
        with contextlib.suppress(Exception):
            for error in errors:
                kept.append(error)
    while kept:
        item = kept.pop()
        if isinstance(item, TracebackType):
            item = RuntimeError().with_traceback(item)
        if isinstance(item, BaseException):
            _C._let_go(item)
    _C._drain()
