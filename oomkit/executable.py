"""find_executable_batch_size: accelerate's decorator, with nothing of a failed try alive."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar, overload

from . import _C

__all__ = ["BatchSizeSearch", "find_executable_batch_size"]

_R = TypeVar("_R")
_log = logging.getLogger("oomkit")

_FACTOR = 0.9  # accelerate's
_CLOSE = 10  # growing back ends when the bounds are within a tenth of the lower one


class BatchSizeSearch:
    """What a function decorated by `find_executable_batch_size` has found out.

    Attributes
    ----------
    batch_size : int
        The size that the next call begins with.
    largest_that_worked : int or None
    smallest_that_failed : int or None
        The bounds. What fails after it has worked is no longer the lower bound.
    """

    __slots__ = ("batch_size", "largest_that_worked", "smallest_that_failed")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.largest_that_worked: int | None = None
        self.smallest_that_failed: int | None = None

    def __repr__(self) -> str:
        return (
            f"<oomkit.BatchSizeSearch batch_size={self.batch_size} "
            f"largest_that_worked={self.largest_that_worked} "
            f"smallest_that_failed={self.smallest_that_failed}>"
        )

    def _worked(self, size: int) -> None:
        self.batch_size = size
        self.largest_that_worked = max(size, self.largest_that_worked or size)
        if self.smallest_that_failed is not None and self.smallest_that_failed <= size:
            self.smallest_that_failed = None  # there was less memory then

    def _failed(self, size: int) -> None:
        self.smallest_that_failed = min(size, self.smallest_that_failed or size)
        if self.largest_that_worked is not None and self.largest_that_worked >= size:
            self.largest_that_worked = None

    def _between(self) -> int:
        """The size to begin with when growing back: half-way, or what worked."""
        low, high = self.largest_that_worked, self.smallest_that_failed
        if low is None or high is None or high - low <= max(1, low // _CLOSE):
            return self.batch_size
        return (low + high) // 2


# Functions that return before they run; partials of them, too.
_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """accelerate's guard against a batch size that is passed as well; its text."""
    params = list(inspect.signature(function).parameters)
    if len(params) < len(args) + 1:
        name = _name(function)
        shown = ", ".join(
            f"{arg}={value}" for arg, value in zip(params[1:], args[1:], strict=False)
        )
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called."
            f"Remove this as the decorator already does so: `{name}({shown})`"
        )


def _give_up(name: str, tried: list[int], last: str | None) -> RuntimeError:
    error = RuntimeError("No executable batch size found, reached zero.")
    if tried:
        sizes = ", ".join(str(size) for size in tried)
        error.add_note(
            f"oomkit: {name} ran out of memory with batch_size {sizes}; the last time: {last}. "
            "Everything that does not depend on the batch size (parameters, optimizer) has to "
            f"fit first.{_C.see('oomkit-out-of-memory')}"
        )
    return error


def _next(search: BatchSizeSearch, reduce: Callable[[], int] | None, size: int, grew: bool) -> int:
    """The size to try after `size` failed."""
    if grew and search.largest_that_worked is not None:
        return search.largest_that_worked
    if reduce is None:
        return int(size * _FACTOR)
    smaller = reduce()
    if smaller >= size:
        raise ValueError(
            "find_executable_batch_size() expected reduce_batch_size_fn to return less than "
            f"{size}, which ran out of memory, got {smaller}"
            f"{_C.see('options')}"
        )
    return smaller


def _check_function(
    function: Any, grow_back: bool, reduce_batch_size_fn: Callable[[], int] | None
) -> None:
    if not callable(function):
        raise TypeError(
            "find_executable_batch_size() expected a function to decorate, got "
            f"{type(function).__name__!r}; pass starting_batch_size= by name"
            f"{_C.see('options')}"
        )
    if any(is_one(function) for is_one in _LATER):
        raise TypeError(
            "find_executable_batch_size() cannot decorate an async or a generator function, which "
            f"would run out of memory behind it: decorate what it calls{_C.see('decoration')}"
        )
    if grow_back and reduce_batch_size_fn is not None:
        raise TypeError(
            "find_executable_batch_size() cannot grow back by sizes that reduce_batch_size_fn "
            "chooses: leave one of the two out"
            f"{_C.see('options')}"
        )


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    grow_back: bool = False,
) -> Callable[[Callable[..., _R]], Callable[..., _R]]: ...
@overload
def find_executable_batch_size(
    function: Callable[..., _R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    grow_back: bool = False,
) -> Callable[..., _R]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    grow_back: bool = False,
) -> Any:
    """find_executable_batch_size(function=None, starting_batch_size=128, \
reduce_batch_size_fn=None, *, grow_back=False)

    Run a function with the largest batch size that fits, starting it again after running
    out of memory.

    A replacement for the decorator of this name in accelerate: the same forms, texts and
    sizes (each the one before times 0.9). `function` takes `batch_size` as its first
    argument, which callers leave out. The failed attempt is gone before the next begins,
    every error that `oomkit.is_oom_error` knows counts as well as those accelerate looks
    for, and garbage is collected only where memory is still held after a failure.

    The whole function starts again, so it has to make everything that depends on the batch
    size, and the effective batch size changes. `oomkit.auto_batch` keeps it.

    Parameters
    ----------
    function : callable, optional
        Without it a decorator is returned.
    starting_batch_size : int
        What the first call begins with. Later calls begin with the size that was found.
    reduce_batch_size_fn : callable, optional
        Called without arguments after a failure; returns the next size, which must be
        smaller than the one that failed.
    grow_back : bool
        Begin later calls half-way between the largest size that worked and the smallest
        that failed, until they are within a tenth of each other; when that fails, continue
        with the one that worked. Off by default, as in accelerate: sizes only fall.

    Returns
    -------
    callable
        With an attribute `search`, a `BatchSizeSearch`: the next size and the bounds.

    Raises
    ------
    RuntimeError
        No size was found; a note tells which were tried. The next call tries the smallest
        of them once more.
    TypeError
        The batch size was passed by the caller too; or `function` is a generator or a coroutine.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            grow_back=grow_back,
        )
    _check_function(function, grow_back, reduce_batch_size_fn)
    search = BatchSizeSearch(starting_batch_size)

    def decorated(*args: Any, **kwargs: Any) -> Any:
        _check_call(function, args)
        size = search._between() if grow_back else search.batch_size
        grew = size > search.batch_size
        tried: list[int] = []
        text: str | None = None
        while size > 0:
            done, result = _C._attempt(function, (size, *args), kwargs)
            if done:
                search._worked(size)
                return result
            text = result
            tried.append(size)
            search._failed(size)
            smaller = _next(search, reduce_batch_size_fn, size, grew)
            grew = False
            if smaller > 0:
                search.batch_size = smaller
                _log.warning(
                    "function=%s batch_size=%d->%d reason=oom",
                    _name(function),
                    size,
                    smaller,
                )
            size = smaller
        raise _give_up(_name(function), tried, text)

    functools.update_wrapper(decorated, function)
    with contextlib.suppress(TypeError, ValueError):  # builtins may have no signature
        signature = inspect.signature(function)
        callers = list(signature.parameters.values())[1:]
        decorated.__signature__ = signature.replace(parameters=callers)  # type: ignore[attr-defined]
    decorated.search = search  # type: ignore[attr-defined]
    return decorated
