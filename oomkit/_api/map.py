"""`oomkit.map`: a function over a batch in parts that fit, its results joined in order."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from .. import _C
from .map_outputs import Outputs, tensors
from .map_probe import probe

__all__ = ["map"]

_CHUNKS = frozenset(
    {"batch", "bucket", "dim", "join", "label", "micro_batch", "min_micro_batch"}
    | {"multiple_of", "on_retry", "participants", "restore_batch", "rng", "split", "static"}
)
# What the memory of a row of generate() depends on besides the length of its input.
_LENGTHS = ("max_new_tokens", "max_length", "num_beams", "num_return_sequences")

_tokens = count(1)
_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


# --- who is called ---


def _function(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _bound(fn: Any) -> dict[str, Any]:
    """The keyword arguments of a `functools.partial`."""
    return dict(fn.keywords) if isinstance(fn, functools.partial) else {}


def _key(fn: Any) -> tuple[Any, ...]:
    """What tells one callable from another for what is remembered, and holds none of them."""
    fn = _function(fn)
    if isinstance(fn, types.FunctionType):
        return fn.__code__.co_filename, fn.__qualname__, fn.__code__.co_firstlineno
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    owner = getattr(fn, "__self__", fn)
    try:
        token = _known.setdefault(owner, next(_tokens))
    except TypeError:  # takes no weak references, or is not hashable
        token = 0
    return name, token


def _here(depth: int) -> tuple[str, int]:
    frame = sys._getframe(depth)
    return frame.f_code.co_filename, frame.f_lasti


def _names(fn: Any, given: int) -> tuple[str, ...]:
    """The parameters that the positional arguments are for."""
    found: list[str] = []
    try:
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                found.append(parameter.name)
    except (TypeError, ValueError):  # a builtin without a signature
        pass
    return tuple((found + [f"argument {i}" for i in range(len(found), given)])[:given])


def _lengths(fn: Any, kwargs: dict[str, Any]) -> dict[str, int]:
    """How long the outputs of generate() may get, as far as the call says it."""
    fn, kwargs = _function(fn), {**_bound(fn), **kwargs}
    places: list[Any] = [kwargs.get("generation_config")]
    if getattr(fn, "__name__", "") == "generate":
        places.append(getattr(getattr(fn, "__self__", None), "generation_config", None))
    found = {}
    for name in _LENGTHS:
        for value in (kwargs.get(name), *(getattr(place, name, None) for place in places)):
            if isinstance(value, int):
                found[name] = value
                break
    return found


def _several(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _generators(values: list[Any]) -> list[torch.Generator]:
    """Random streams among the arguments: they go back with a part that fails."""
    found: list[torch.Generator] = []
    for value in values:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Generator):
            found += value  # one for each row
        elif isinstance(value, torch.Generator):
            found.append(value)
    return found


# --- running ---


class _Run:
    """One call of map: what is the same for all items of a stream."""

    def __init__(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.fn, self.rest, self.kwargs = fn, args, kwargs
        self.unpack: bool = options.pop("unpack")
        self.mode: str = options.pop("mode")
        self.key: Any = options.pop("key")
        to, pad = options.pop("to"), options.pop("pad")
        self.progress: bool = options.pop("progress")
        self.verify: bool = options.pop("verify")
        self.options = options
        self.where = str(options["label"])
        lengths = _lengths(fn, kwargs)
        self.lengths = tuple(sorted(lengths.items()))
        copies = lengths.get("num_return_sequences", 1)
        self.outputs = Outputs(None if to is None else torch.device(to), copies, pad)
        if self.lengths:
            options["bucket"] = (options.get("bucket"), self.lengths)
        dim = options.get("dim", 0)
        self.dim = dim if isinstance(dim, int) else 0
        given = _generators([*args, *kwargs.values(), *_bound(fn).values()])
        if given:
            options["participants"] = [*_several(options.get("participants")), *given]
        self.guard = _C.guard(label=self.where)
        self.last: Any = None

    def enter(self) -> AbstractContextManager[Any]:
        if self.mode == "inference":
            return torch.inference_mode()
        return torch.no_grad() if self.mode == "no_grad" else nullcontext()

    def bar(self, total: int | None) -> Any:
        if not self.progress:
            return None
        try:
            tqdm = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            raise ImportError(
                f"oomkit.map(progress=True) needs tqdm: pip install tqdm{_C.see('missing-package')}"
            ) from None
        return tqdm(total=total, desc=self.where, unit="row")

    def arguments(self, item: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = (*item, *self.rest), self.kwargs
        if self.unpack and item:
            batch = item[0]
            if isinstance(batch, Mapping):
                args, kwargs = self.rest, {**batch, **kwargs}
            elif isinstance(batch, (tuple, list)):
                args = (*batch, *self.rest)
        return args, kwargs

    def parts(self, item: tuple[Any, ...]) -> Any:
        args, kwargs = self.arguments(item)
        names = _names(self.fn, len(args))
        self.last = _C._chunks_of(args, kwargs, names, self.options, self.fn, self.key, self.last)
        return self.last

    def one(self, item: tuple[Any, ...], bar: Any, runs_empty: bool = True) -> tuple[Any, int]:
        """The joined result of one batch, and its rows. Short: see `_values` in _buffers.py."""
        if self.verify:
            self.check(item)
        parts = self.parts(item)
        with self.enter():
            return self.ended(item, parts, bar, runs_empty)

    def check(self, item: tuple[Any, ...]) -> None:
        """Once: are a few rows alone what they are among others?"""
        self.verify = False
        args, kwargs = self.arguments(item)
        probe(self, args, kwargs, _names(self.fn, len(args)))

    def ended(
        self, item: tuple[Any, ...], parts: Any, bar: Any, runs_empty: bool
    ) -> tuple[Any, int]:
        """The parts one after the other, and what they make together."""
        self.each(parts, bar)
        rows = parts.rows or 0
        if rows == 0:
            return (self.nothing(item) if runs_empty else None), 0
        self.outputs.wait()
        return self.together(parts._results(), parts._join, rows), rows

    def nothing(self, item: tuple[Any, ...]) -> Any:
        """What the function makes of a batch without rows."""
        args, kwargs = self.arguments(item)
        result = self.fn(*args, **kwargs)
        to = self.outputs.to
        return result if to is None else _C._map_tensors(result, lambda tensor: tensor.to(to))

    def each(self, parts: Any, bar: Any) -> None:
        """A function of its own: see `_values` in _buffers.py for why it has to be short."""
        for args, kwargs in parts:
            with self.guard:
                rows = parts.stop - parts.start
                result = self.fn(*args, **kwargs)
                if parts.start > 0:
                    result = self.beams_counted_on(result, parts.start)
                parts._keep(result, self.outputs.converter(rows))
                del result
                if bar is not None:
                    bar.update(rows)

    def beams_counted_on(self, result: Any, start: int) -> Any:
        """Beams in the output of generate() are counted from the first row of the batch."""
        beams = dict(self.lengths).get("num_beams", 1)
        indices = result.get("beam_indices") if isinstance(result, Mapping) else None
        if beams > 1 and isinstance(indices, torch.Tensor):
            result["beam_indices"] = torch.where(indices < 0, indices, indices + start * beams)
        return result

    def together(
        self, results: list[Any], join: Callable[[], Any], rows: int, is_even: bool = False
    ) -> Any:
        """The results as one. What has been computed is not lost for want of memory here."""

        def finish() -> Any:
            nonlocal is_even
            if not is_even:  # lists of rows would become lists of lists
                self.outputs.even(results, self.dim, self.where)
                is_even = True
            return self.outputs.flat(join(), rows)

        try:
            return finish()
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
        try:
            return finish()
        except torch.OutOfMemoryError as error:
            failed = str(error)
        devices = {t.device for result in results for t in tensors(result)}
        try:  # by way of the host: there are no parts on the device while it is all put together
            for number, result in enumerate(results):
                results[number] = _C._map_tensors(result, torch.Tensor.cpu)
            joined = finish()
            if len(devices) == 1:
                device = devices.pop()
                joined = _C._map_tensors(joined, lambda tensor: tensor.to(device))
            return joined
        except torch.OutOfMemoryError:
            pass
        raise _C.OutOfMemory(
            f"{self.where} has run over all {rows} rows, but memory ran out while the results "
            f'were put together ({failed}): pass to="cpu" to keep them off the device, or a '
            "generator of smaller batches with lazy=True"
            f"{_C.see('results-too-large')}"
        )

    def whole(self, item: tuple[Any, ...]) -> Any:
        bar = self.bar(None)
        try:
            return self.one(item, bar)[0]
        finally:
            if bar is not None:
                bar.close()

    def stream(
        self, items: Any, bar: Any, empty: list[Any] | None = None
    ) -> Iterator[tuple[Any, int]]:
        """Results and rows of each item. Those without rows go into `empty`, if it is given."""
        try:
            for item in items:
                result, rows = self.one((item,), bar, empty is None)
                if empty is None or rows:
                    yield result, rows
                elif not empty:
                    empty.append(item)
        finally:
            if bar is not None:
                bar.close()

    def lazy(self, items: Any) -> Iterator[Any]:
        for result, _ in self.stream(items, self.bar(None)):
            yield result

    def joined(self, items: Any) -> Any:
        results: list[Any] = []
        rows: list[int] = []
        listed: list[set[int]] = []
        versions: list[tuple[torch.Tensor, int]] = []
        empty: list[Any] = []
        for result, count_ in self.stream(items, self.bar(None), empty):
            results.append(result)
            rows.append(count_)
            listed.append(self.outputs.listed)
            self.outputs.listed = set()
            for tensor in tensors(result):
                if not tensor.is_inference() and tensor.dim() and tensor.shape[0] == count_:
                    versions.append((tensor, tensor._version))
        if not results and empty:
            with self.enter():
                return self.nothing((empty[0],))
        if not results:
            return None
        if any(tensor._version != version for tensor, version in versions):
            raise _C.SplitError(
                f"{self.where}: rows that an earlier item of the stream returned have changed "
                "since, as those of a tensor that is used again do: return a new tensor, or "
                "iterate with lazy=True"
                f"{_C.see('map-results')}"
            )
        copies, last = self.outputs.copies, self.last
        rows = [n * copies for n in rows]
        self.outputs.copies = 1  # the items' results have their rows one after the other
        with self.enter():
            even = self.outputs.even_items(results, listed, self.dim)
            return self.together(results, lambda: last._join_items(results, rows), sum(rows), even)


def _is_stream(batch: Any) -> bool:
    return isinstance(batch, (Iterator, DataLoader, IterableDataset))


def map(
    fn: Callable[..., Any],
    /,
    *args: Any,
    to: torch.device | str | None = None,
    pad: float | Literal["list"] | None = None,
    mode: Literal["no_grad", "inference", "as_is"] = "no_grad",
    unpack: bool = False,
    lazy: bool = False,
    progress: bool = False,
    verify: bool = False,
    **kwargs: Any,
) -> Any:
    """map(fn, batch, /, *args, to=None, pad=None, mode='no_grad', unpack=False, lazy=False,
    progress=False, verify=False, **kwargs)

    ``fn(batch, *args, **kwargs)`` in parts that fit into memory, joined in order.

    >>> tokens = oomkit.map(model.generate, input_ids, max_new_tokens=64, to="cpu")

    Parameters
    ----------
    fn : callable
        Called once for each part.
    *args, **kwargs
        Its arguments. Those that hold the rows of the batch are split as `auto_batch` does
        it (also several: ``input_ids=..., attention_mask=...``), the others passed whole. A
        `DataLoader`, a generator or any other iterator in the first place is a stream: each
        of its items is a batch, and no more than one is held. Keyword arguments that `chunks`
        has (`micro_batch`, `min_micro_batch`, `multiple_of`, `dim`, `static`, `split`,
        `batch`, `participants`, `rng`, `restore_batch`, `bucket`, `on_retry`, `label`) and
        ``join`` of `auto_batch` are options here; to pass one of that name to `fn`, use
        `functools.partial`.
    to : device, optional
        Where each part's output is moved before the next part runs; "cpu" keeps outputs from
        filling the device.
    pad : number or "list", optional
        What fills outputs on the right whose other sizes differ from part to part. With
        "list" tensors come back as lists of one tensor per row. By default they do where they
        cannot be joined, with a warning.
    mode : {"no_grad", "inference", "as_is"}
        Under `torch.no_grad`, `torch.inference_mode`, or as the caller has it.
    unpack : bool
        Pass a mapping as keyword arguments and a tuple or list as arguments.
    lazy : bool
        Of a stream: an iterator over the results of its items, each made when it is asked
        for, in place of the joined result.
    progress : bool
        Show rows that are done with tqdm.
    verify : bool
        First run `fn` on eight rows and on their two halves: an `OomkitWarning` names an
        output that depends on the other rows (batch statistics, scores over the batch), for
        then parts do not have the outputs of the whole. Random streams and participants with
        a `state_dict` are put back.
    """
    if not callable(fn):
        raise TypeError(f"map() expected a callable, got {type(fn).__name__}{_C.see('options')}")
    inner = _function(fn)
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
        raise TypeError(
            f"map() expected a function that returns results, got {inner.__qualname__}, which "
            "returns a coroutine or a generator that would run outside of map: pass a plain "
            "function that runs it to its end"
            f"{_C.see('options')}"
        )
    if not args and not kwargs:
        raise TypeError(f"map() expected a batch after the function{_C.see('options')}")
    if mode not in ("no_grad", "inference", "as_is"):
        raise ValueError(
            f"map() expected mode to be 'no_grad', 'inference' or 'as_is', got {mode!r}"
            f"{_C.see('options')}"
        )
    if not (pad is None or pad == "list" or isinstance(pad, (int, float))):
        raise TypeError(
            f"map() expected pad to be a number or 'list', got {pad!r}{_C.see('options')}"
        )
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in _CHUNKS}
    name = getattr(_function(fn), "__qualname__", type(fn).__qualname__)
    options["label"] = options.get("label") or f"map({name})"
    given = {
        "to": to,
        "pad": pad,
        "mode": mode,
        "unpack": unpack,
        "progress": progress,
        "verify": verify,
    }
    key = ("map", options["label"], _key(fn), _here(2))
    is_stream = bool(args) and _is_stream(args[0])
    run = _Run(fn, args[1:], kwargs, {**options, **given, "key": key})
    if is_stream:
        return run.lazy(args[0]) if lazy else run.joined(args[0])
    if lazy:
        raise TypeError(
            "map(lazy=True) expected an iterator or a DataLoader, "
            f"got {type(args[0]).__name__ if args else 'keyword arguments'}"
            f"{_C.see('options')}"
        )
    return run.whole(args[:1])
