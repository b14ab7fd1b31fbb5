"""Lines that a step writes to its trainer's log: one for the batch, as without a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

__all__ = ["Line", "collected", "joined"]


class Line(NamedTuple):
    """What `Trainer.log` was called with."""

    logs: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def collected(trainer: Any) -> Iterator[list[Line]]:
    """What is logged in the body, in place of logging it.

    Args:
        trainer: whose `log` the body calls.
    """
    lines: list[Line] = []

    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        lines.append(Line(dict(logs), args, kwargs))

    there = vars(trainer)
    replaced = there.get("log")
    there["log"] = log
    try:
        yield lines
    finally:
        if replaced is None:
            there.pop("log", None)
        else:
            there["log"] = replaced


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if type(value) in (int, float) else None


def _loss(result: Any) -> float | None:
    first = result[0] if isinstance(result, tuple) and result else result
    return _number(first) if isinstance(first, torch.Tensor) else None


def joined(
    parts: Sequence[Sequence[Line]],
    mean: Callable[[str, list[list[Any]]], list[Any]],
    result: Any,
    scale: int,
) -> list[Line]:
    """One line for each that the micro-batches have written.

    Args:
        parts: lines of each micro-batch.
        mean: of a name's values, a list for each micro-batch.
        result: of the call; what adds up to its loss is added, as that is.
        scale: by which the result's loss was divided.
    """
    if len(parts) < 2:
        return [line for lines in parts for line in lines]
    made, loss = [], _loss(result)
    for at in range(max(map(len, parts))):
        there = [lines[at] if at < len(lines) else None for lines in parts]
        last = [line for line in there if line is not None][-1]
        logs = dict(last.logs)
        for name in logs:
            values = [[] if line is None else [line.logs.get(name)] for line in there]
            numbers = [_number(value) for each in values for value in each]
            if None in numbers:
                continue
            total = sum(number for number in numbers if number is not None)
            if loss is not None and _is(total, loss, scale):
                logs[name] = total
            elif len(set(numbers)) > 1:
                given = iter(numbers)
                (logs[name],) = mean(name, [[next(given)] if each else [] for each in values])
        made.append(Line(logs, last.args, last.kwargs))
    return made


def _is(total: float, loss: float, scale: int) -> bool:
    return any(abs(total - loss * by) <= 1e-5 * abs(loss * by) for by in {1, scale})
