"""What two runs of a step show: gradients, results, parameters; how far they are apart."""

from __future__ import annotations

import math
from typing import Any

import torch

from .rows import leaves_of

__all__ = [
    "added",
    "apart",
    "dense",
    "far",
    "gap",
    "host",
    "is_same",
    "kept_leaves",
    "mark",
    "norm",
    "number",
    "own",
    "shapes",
    "shown",
    "sizes",
    "without",
]

_SAMPLE = 64  # values of a parameter that tell that it has moved
_CHUNK = 1 << 16  # elements that a cache holds
_RECKONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDE = (torch.float32, torch.float64)
_TINY = 1e-30  # smaller squares may have been lost in single precision


def own(value: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is spread over several; else the tensor."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value
    local = getattr(value, "_local_tensor", value)
    return local if isinstance(local, torch.Tensor) else value


def norm(value: torch.Tensor) -> float:
    value = own(value)
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.to_dense()
    if not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(dense(value.detach()), dtype=torch.float64))


def dense(value: torch.Tensor) -> torch.Tensor:
    """Strided, real and of a kind that can be reckoned with: a complex number is two."""
    value = own(value)
    value = value if value.layout == torch.strided else value.to_dense()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value if value.dtype in _RECKONED else value.to(torch.float64)


def without(value: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor:
    """A host copy of what a step has added to a gradient."""
    if entry is None or entry.shape != value.shape:
        return host(value)
    return host(value) - own(entry)


def added(value: torch.Tensor, entry: torch.Tensor | None) -> float:
    """The norm of what a step has added to a gradient."""
    if entry is None:
        return norm(value)
    size = apart(value, entry.to(value.device))
    return size if math.isfinite(size) else norm(value)


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of a difference; infinite where there is none."""
    if one.layout == two.layout == torch.sparse_coo:
        return norm(one - two.to(one.device))
    one, two = dense(one.detach()), dense(two.detach())
    if one.shape != two.shape:
        return math.inf
    two = two.to(one.device)
    size = float(torch.linalg.vector_norm(one - two, dtype=torch.float64))
    if size == size:
        return size
    gap = torch.where(one.isnan() & two.isnan() | (one == two), 0.0, one - two)
    size = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
    return size if size == size else math.inf


def sizes(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float, float]:
    """The norms of both, and of their difference; each is read once."""
    flat = [dense(each.detach()) for each in (one, two)]
    plain = all(
        each.is_contiguous() and each.device.type == "cpu" and each.dtype in _WIDE for each in flat
    )
    if not plain or flat[0].shape != flat[1].shape or flat[0].dtype != flat[1].dtype:
        return norm(one), norm(two), apart(one, two)
    first, second = (each.reshape(-1) for each in flat)
    squares = [0.0, 0.0, 0.0]
    for begin in range(0, first.numel(), _CHUNK):
        a, b = first[begin : begin + _CHUNK], second[begin : begin + _CHUNK]
        for k, part in enumerate((a, b, a - b)):
            squares[k] += float(torch.dot(part, part))
    if not math.isfinite(sum(squares)) or min(squares[:2]) < _TINY:
        return norm(one), norm(two), apart(one, two)
    return math.sqrt(squares[0]), math.sqrt(squares[1]), math.sqrt(squares[2])


def host(value: torch.Tensor) -> torch.Tensor:
    plain = own(value).detach()
    return plain.clone() if plain.device.type == "cpu" else plain.cpu()


def mark(param: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """What tells that a parameter was written to: a write through .data has no version."""
    version = 0 if param.is_inference() else param._version
    mine = own(param)
    if param.layout != torch.strided or torch.nn.parameter.is_lazy(param) or not mine.numel():
        return version, None
    plain = mine.detach()
    flat = plain.reshape(-1) if plain.is_contiguous() else plain.flatten()
    return version, dense(host(flat[:: max(1, flat.numel() // _SAMPLE)]))


def is_same(now: tuple[int, torch.Tensor | None], was: tuple[int, torch.Tensor | None]) -> bool:
    """Of two marks."""
    if now[0] != was[0] or now[1] is None or was[1] is None:
        return now[0] == was[0]
    return torch.equal(torch.nan_to_num(now[1]), torch.nan_to_num(was[1]))


def number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        item = value.item()  # a scalar, or an array of one element
        return float(item) if isinstance(item, int | float) else None
    return None


def kept(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return host(value) if value.layout == torch.strided else None
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else None
    return value


def kept_leaves(result: Any) -> dict[str, Any]:
    """The values in a result, by place, without their graphs."""
    return {place: kept(value) for place, value in leaves_of(result, "result", (tuple, list))}


def gap(one: Any, two: Any) -> float:
    """How far two results are apart, relative; infinite where they cannot be compared."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape:
            return math.inf
        if not one.numel():
            return 0.0
        if not one.is_floating_point() and not one.is_complex():
            unlike = (one != two).double()
            return float(unlike.mean()) if one.ndim else float("inf") * float(unlike or 0.0)
        scale = float(torch.nan_to_num(one, posinf=0.0, neginf=0.0).abs().max())
        gap = torch.where(one == two, 0.0, (one - two).abs())
        gap = torch.where(one.isnan() & two.isnan(), 0.0, gap)
        widest = float(gap.max())
        return math.inf if widest != widest else widest / scale if scale else widest
    first, second = number(one), number(two)
    if isinstance(one, bool) or first is None or second is None:
        return 0.0 if one is two or one == two else math.inf
    if first == second or (first != first and second != second):
        return 0.0
    scale = max(abs(first), abs(second))
    gap_ = abs(first - second) / scale if scale else math.nan  # 0 and nan
    return gap_ if gap_ == gap_ else math.inf


def shown(now: Any, was: Any) -> str:
    if isinstance(now, torch.Tensor) and now.numel() > 1:
        return f"off by {gap(was, now):.2g}"
    values = [v.item() if isinstance(v, torch.Tensor) else v for v in (now, was)]
    return " instead of ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in values)


def shapes(now: Any, was: Any) -> str:
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor) and now.shape != was.shape:
        return f"of shape {tuple(now.shape)} instead of {tuple(was.shape)}"
    return shown(now, was)


def far(one: float, two: float, limit: float) -> bool:
    if one == two or (one != one and two != two):
        return False
    scale = max(abs(one), abs(two))
    return not abs(one - two) <= limit * scale
