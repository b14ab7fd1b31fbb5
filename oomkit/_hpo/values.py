"""Plain values: what a trial's attributes may hold in every storage of Optuna."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

_DEEPEST = 8
_LONGEST = 64

_BATCH = frozenset(
    (
        *("batch_size", "batch", "bs", "train_batch_size", "micro_batch_size"),
        *("per_device_train_batch_size", "per_device_batch_size"),
    )
)
_ACCUMULATION = frozenset(
    (
        *("grad_accum", "grad_accumulation", "gradient_accumulation", "accumulation"),
        *("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps"),
        *("accumulate_grad_batches", "accum", "accum_steps"),
    )
)
EFFECTIVE = "effective_batch_size"


def plain(value: Any, depth: int = 0) -> Any:
    """A value that `json.dumps` takes: scalars of numpy and torch become Python's own.

    In memory Optuna stores anything; its databases and journals store JSON. What is neither
    number, text nor container is told by its text, and so are numbers that JSON has not.
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if depth >= _DEEPEST:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return _plain_array(value, depth)
    return str(value)


def _plain_array(value: Any, depth: int) -> Any:
    """Arrays, tensors and numpy's scalars. Large ones are told by their shape."""
    shape = getattr(value, "shape", ())
    count = math.prod(shape)
    if count > _LONGEST or getattr(value, "is_meta", False):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    to_list = getattr(value, "tolist", None)
    return str(value) if to_list is None else plain(to_list(), depth + 1)


def _known(config: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """The one value under a name of these, a prefix such as "train." aside, or None."""
    found = [
        value
        for key, value in config.items()
        if key.replace("/", ".").rpartition(".")[2] in names
        and isinstance(value, int)
        and not isinstance(value, bool)
    ]
    return found[0] if len(found) == 1 else None


def batch_key(config: Mapping[str, Any]) -> str | None:
    """The name under which a configuration has its batch size, where there is one."""
    keys = [key for key in config if key.replace("/", ".").rpartition(".")[2] in _BATCH]
    return keys[0] if len(keys) == 1 else None


def is_accumulation(key: str) -> bool:
    return key.replace("/", ".").rpartition(".")[2] in _ACCUMULATION


def configuration(params: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The plain configuration of a trial, with its effective batch size where it is known."""
    config: dict[str, Any] = plain({**params, **more})
    batch, accumulation = _known(config, _BATCH), _known(config, _ACCUMULATION)
    if EFFECTIVE not in config and batch is not None and accumulation is not None:
        config[EFFECTIVE] = batch * accumulation
    return config
