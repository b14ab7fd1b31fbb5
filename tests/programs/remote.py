"""A world in a spawned worker: what disturbs a run there, and what comes back of it.

The worker is started once, by the first program that needs it, and asked again by each run.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import oomkit

from . import steps
from .world import World, logger

Body = Callable[..., None]
"""Runs in the worker: body(world, *what was pickled)."""


class Told(NamedTuple):
    """Of a world in the worker, in plain values."""

    fields: dict[str, Any]
    state: dict[str, Any]
    records: list[tuple[int, int]]
    texts: list[str]
    warned: list[tuple[bool, str]]
    error: BaseException | None


@functools.cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def call(world: World, body: Body, *pickled: Any) -> None:
    """Runs the body in the worker as if it had been run here."""
    asked = {
        name: getattr(world, name) for name in ("decorate", "place", "count", "slices", "seed")
    }
    told = _pool().submit(_work, asked, body, pickle.dumps(pickled)).result()
    for name, value in told.fields.items():
        setattr(world, name, value)
    world.remote = told.state
    records = [SimpleNamespace(batch_size=b, accumulation_steps=k) for b, k in told.records]
    world.records = [(SimpleNamespace(records=records), i) for i in range(len(records))]
    for text in told.texts:
        logger.warning(text)
    for ours, text in told.warned:
        warnings.warn(text, oomkit.OomkitWarning if ours else UserWarning, stacklevel=2)
    if told.error is not None:
        raise told.error


def _work(asked: dict[str, Any], body: Body, pickled: bytes) -> Told:
    from .harness import lines_of

    torch.set_num_threads(1)
    importlib.reload(steps)  # its steps know nothing of the run before
    arguments = pickle.loads(pickled)
    world = World(**asked)
    error = None
    with lines_of(logger) as texts, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            body(world, *arguments)
        except Exception as raised:
            error = raised.with_traceback(None)
        finally:
            world.disarm()
    warned = [(issubclass(w.category, oomkit.OomkitWarning), str(w.message)) for w in caught]
    names = ("losses", "calls", "before", "after", "seen", "fired")
    fields = {name: getattr(world, name) for name in names}
    return Told(fields, world.state(), world.told(), texts, warned, error)
