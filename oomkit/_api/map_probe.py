"""`verify=` of `oomkit.map`: are a few rows alone what they are among others?"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _C
from .._proof.rows import Finding, findings, places

_log = logging.getLogger("oomkit")

ROWS = 8


def _streams(generators: list[torch.Generator]) -> list[torch.Tensor]:
    """The random states that a probe could move."""
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if module is not None and module.is_initialized():
        states += module.get_rng_state_all()
    return states + [generator.get_state() for generator in generators]


def _set_streams(states: list[torch.Tensor], generators: list[torch.Generator]) -> None:
    torch.set_rng_state(states[0])
    own = len(states) - len(generators)
    if own > 1:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        torch.get_device_module(accelerator).set_rng_state_all(states[1:own])
    for generator, state in zip(generators, states[own:], strict=True):
        generator.set_state(state)


def _states(participants: list[Any]) -> list[tuple[Any, Any]]:
    """Metrics and the like, which a probe must not count in."""
    return [
        (each, copy.deepcopy(each.state_dict()))
        for each in participants
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ]


def _reached(fn: Any, values: list[Any]) -> Iterator[Any]:
    """What a function works with: its owner, cells, globals, bound arguments, and `values`."""
    yield from values
    while isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values())
        fn = fn.func
    yield from (fn, getattr(fn, "__self__", None))
    fn = getattr(fn, "__func__", fn)
    if isinstance(fn, types.FunctionType):
        found = inspect.getclosurevars(fn)
        yield from (*found.nonlocals.values(), *found.globals.values())


def _buffers(reached: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of the modules, such as running means, with copies."""
    modules = [each for each in reached if isinstance(each, torch.nn.Module)]
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    return [(buffer, buffer.detach().clone()) for buffer in buffers.values()]


Runner = Callable[[int], list[tuple[Any, int]]]


def _compare(
    run: Runner, generators: list[torch.Generator], dim: int
) -> tuple[bool, int, list[Finding]]:
    """Whether random numbers are drawn, how many rows were run, and what was found."""
    before = _streams(generators)
    together = run(ROWS)
    pairs = zip(before, _streams(generators), strict=False)
    if any(not torch.equal(one, two) for one, two in pairs):
        return True, 0, []
    rows = sum(count for _, count in together)
    halves = run(max(1, (rows + 1) // 2))
    if rows < 2 or len(together) != 1 or len(halves) != 2:
        return False, 0, []  # too few, or memory ran out
    results = [places(result, None) for result, _ in together + halves]
    counts = [count for _, count in together + halves]
    shares = (counts[1] / rows, counts[2] / rows)
    return False, rows, findings(results, counts, shares, dim)


def probe(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
    """Run a function on the first rows, and on their two halves; say what differs.

    Args:
        run: the call of map; random streams and metrics that take part are put back.
        args, kwargs: the arguments of the function, with the whole batch.
        names: the parameters that the positional ones are for.
    """
    options = {**run.options, "multiple_of": 1, "min_micro_batch": 1}
    given = options.pop("participants", None) or ()
    participants = list(given) if isinstance(given, (list, tuple)) else [given]
    few = args, kwargs

    def parts(size: int) -> list[tuple[Any, int]]:
        nonlocal few
        results = []
        cut = {**options, "micro_batch": size}
        loop = _C._chunks_of(*few, names, cut, run.fn, ("probe", run.key), None)
        with run.enter():
            for part in loop:
                if size == ROWS:
                    few = part  # what the halves are of
                with _C.guard(label=run.where):
                    rows = (loop.stop or 0) - (loop.start or 0)
                    results.append((run.fn(*part[0], **part[1]), rows))
                if size == ROWS:
                    break
        return results

    try:
        _probe(run, parts, participants, list(_reached(run.fn, [*args, *kwargs.values()])))
    except torch.OutOfMemoryError:
        pass  # no reason not to go on
    else:
        return
    _log.info("%s was not verified: out of memory", run.where)


def _probe(of: Any, run: Runner, participants: list[Any], reached: list[Any]) -> None:
    where, own = of.where, [*participants, *reached]
    generators = list(
        {id(each): each for each in own if isinstance(each, torch.Generator)}.values()
    )
    before, states, buffers = _streams(generators), _states(participants), _buffers(own)
    try:
        moved, rows, found = _compare(run, generators, of.dim)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        _set_streams(before, generators)
        for each, state in states:
            each.load_state_dict(state)
    wrong = [finding for finding in found if finding.difference > finding.limit]
    if moved:
        text = (
            f"{where} cannot be verified, since random numbers are drawn: pass a function that "
            "draws none, or leave verify= out"
            f"{_C.see('split-not-verified')}"
        )
    elif wrong:
        worst = max(wrong, key=lambda finding: finding.difference / finding.limit)
        text = (
            f"{where}: {rows} rows and their two halves have different outputs (relative "
            f"difference {worst.difference:.1e}): {worst.text}. Parts of other sizes give other "
            "outputs; compute what belongs to a row in the function, and what compares rows "
            "with each other outside of it"
            f"{_C.see('split-not-exact')}"
        )
    else:
        if rows:
            _log.info("verified %s: %d rows have the outputs of their halves", where, rows)
        return
    warnings.warn(f"oomkit: {text}", _C.OomkitWarning, stacklevel=7)
