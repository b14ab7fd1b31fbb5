"""How long the tensors in a list of samples are: boxes of images, tokens of packed sequences."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FIRST", "lengths"]

FIRST = 1 << 32  # leaves of a batch from this number on are lengths, of the list of the rest
_MOST = 4  # tensors of a sample that are looked at


def lengths(name: str, samples: Any) -> list[tuple[str, torch.Tensor]]:
    """What counts them, and how long they are.

    Args:
        name: of the list, as the caller would write it.
        samples: a list or tuple of tensors, or of dictionaries, lists or tuples with tensors; of
            anything else there is nothing to tell.
    """
    if not isinstance(samples, (list, tuple)) or not samples:
        return []
    found = []
    for key in _keys(samples[0]):
        each = "len(each)" if key is None else f"len(each[{key!r}])"
        try:
            sizes = [(one if key is None else one[key]).shape[0] for one in samples]
            tensor = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        except (TypeError, LookupError, AttributeError, RuntimeError):
            continue  # samples that are not alike, or numbers
        found.append((f"[{each} for each in {name}]", tensor))
    return found


def _keys(sample: Any) -> list[Any]:
    if isinstance(sample, torch.Tensor):
        return [None]
    if isinstance(sample, dict):
        inner = list(sample.items())
    elif isinstance(sample, (list, tuple)):
        inner = list(enumerate(sample))
    else:
        return []
    return [key for key, value in inner if isinstance(value, torch.Tensor)][:_MOST]
