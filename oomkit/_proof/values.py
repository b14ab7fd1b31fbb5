"""What two runs of a step show: gradients, results, parameters; how far they are apart."""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .rows import leaves_of

__all__ = [
    "WIDE",
    "added",
    "apart",
    "dense",
    "far",
    "gap",
    "host",
    "is_rounding",
    "is_same",
    "kept_leaves",
    "limit",
    "list_lengths",
    "loss_of",
    "mark",
    "norm",
    "norms",
    "number",
    "own",
    "pieces",
    "precision",
    "shapes",
    "shown",
    "sizes",
    "why_unjoined",
    "without",
]

# A loss that cancels to nothing (advantages of a group, whose mean is 0) is rounding of its terms.
_NOTHING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Matrix products of other sizes are summed in another order; a result may be a difference.
_VALUE = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 5e-2,
    torch.int64: 0.1,  # an argmax may flip by rounding
    torch.int32: 0.1,
    torch.bool: 0.1,
}
_EXACT, _HALF = 1e-9, 2e-2  # tolerance() of a loss in double precision, and in half
_IN_LIST = re.compile(r"(.*)\[\d+\]$")  # the place of an element
_SAMPLE = 64  # values of a parameter that tell that it has moved
_CHUNK = 1 << 16  # elements that a cache holds
_PIECE = 1 << 20  # of an accelerator, whose memory may be full: 4 MiB in single precision
_RECKONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)
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


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def norms(gradients: Sequence[torch.Tensor]) -> int:
    """What tells that one of them was changed, and waits for their devices: a few operations for
    all that are alike.

    Returns:
        A number that stands for their norms; 0 where torch has none for them.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    try:
        for gradient in map(own, gradients):
            plain = gradient.detach()
            if plain.layout != torch.strided:
                plain = plain._values() if plain.layout == torch.sparse_coo else plain.values()
            alike.setdefault((plain.device, plain.dtype), []).append(plain)
        told = [
            torch.stack(torch._foreach_norm(some, 2, dtype=_WIDER.get(dtype))).tolist()
            for (_, dtype), some in alike.items()
        ]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # quantized, nested
        return 0
    return hash(repr(told)) or 1


def precision(value: float) -> torch.dtype:
    """What a number was computed in, by its bits: ``(out == y).float().mean().item()``."""
    return torch.float32 if ctypes.c_float(value).value == value else torch.float64


def limit(value: Any, of_loss: float) -> float:
    """What rounding explains in a result, relative.

    Args:
        of_loss: what it explains in the loss of the step.
    """
    if isinstance(value, torch.Tensor):
        return max(_VALUE.get(value.dtype, 0.0), _of_wide(value.dtype == torch.float64, of_loss))
    if type(value).__module__ == "numpy":
        kind = value.dtype.str[1:]
        known = {"f8": 1e-8, "f4": 1e-3, "f2": 5e-2}.get(kind, 0.1)
        return max(known, _of_wide(kind == "f8", of_loss))
    if not isinstance(value, float):
        return _VALUE[torch.float32]
    kinds = {_EXACT: precision(value), _HALF: torch.bfloat16}  # as the loss is
    return _VALUE[kinds.get(of_loss, torch.float32)]


def _of_wide(is_wide: bool, of_loss: float) -> float:
    """Of a number in double precision that may be made of a loss in single or in half:
    ``np.mean([loss.item()])``, ``loss.double()``."""
    kinds = {_EXACT: torch.float64, _HALF: torch.bfloat16}
    return _VALUE[kinds.get(of_loss, torch.float32)] if is_wide else 0.0


def dense(value: torch.Tensor) -> torch.Tensor:
    """Strided, real and of a kind that can be reckoned with: a complex number is two."""
    value = own(value)
    value = value if value.layout == torch.strided else value.to_dense()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value if value.dtype in _RECKONED else value.to(torch.float64)


def pieces(
    *tensors: torch.Tensor, device: torch.device | None = None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one size, side by side and piece by piece.

    Args:
        tensors: as `dense` leaves them.
        device: where the pieces are to be; None for that of the first tensor that is on an
            accelerator. A host needs minutes for what an accelerator adds up in a second.
    """
    flat = [t.reshape(-1) for t in tensors]
    if device is None:
        device = next((t.device for t in flat if t.device.type != "cpu"), flat[0].device)
    size = _CHUNK if device.type == "cpu" else _PIECE
    for begin in range(0, flat[0].numel(), size):
        yield tuple(t[begin : begin + size].to(device) for t in flat)


def without(value: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor:
    """A host copy of what a step has added to a gradient."""
    if entry is None or entry.shape != value.shape:
        return host(value)
    return host(value) - own(entry)


def added(value: torch.Tensor, entry: torch.Tensor | None) -> float:
    """The norm of what a step has added to a gradient."""
    if entry is None:
        return norm(value)
    size = apart(value, entry)
    return size if math.isfinite(size) else norm(value)


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of a difference; infinite where there is none."""
    if one.layout == two.layout == torch.sparse_coo:
        return norm(one - two.to(one.device))
    one, two = dense(one.detach()), dense(two.detach())
    if one.shape != two.shape:
        return math.inf
    size = _root(a - b for a, b in _whole_or_pieces(one, two))
    if size == size:
        return size
    size = _root(
        torch.where(a.isnan() & b.isnan() | (a == b), 0.0, a - b)
        for a, b in _whole_or_pieces(one, two)
    )
    return size if size == size else math.inf


def _whole_or_pieces(one: torch.Tensor, two: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    return [(one, two)] if one.device.type == two.device.type == "cpu" else pieces(one, two)


def _root(parts: Iterable[torch.Tensor]) -> float:
    """The norm of what all parts are together."""
    squares = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def sizes(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float, float]:
    """The norms of both, and of their difference; each is read once."""
    flat = [dense(each.detach()) for each in (one, two)]
    plain = all(each.is_contiguous() and each.dtype in WIDE for each in flat)
    if not plain or flat[0].shape != flat[1].shape or flat[0].dtype != flat[1].dtype:
        return norm(one), norm(two), apart(one, two)
    found = [torch.stack([torch.dot(x, x) for x in (a, b, a - b)]) for a, b in pieces(*flat)]
    squares = torch.stack(found).double().sum(0).tolist() if found else [0.0, 0.0, 0.0]
    if not math.isfinite(sum(squares)) or min(squares[:2]) < _TINY:
        return norm(one), norm(two), apart(one, two)
    return math.sqrt(squares[0]), math.sqrt(squares[1]), math.sqrt(squares[2])


def loss_of(
    roots: Sequence[Any], gradients: tuple[torch.Tensor | None, ...]
) -> tuple[float, float]:
    """What a backward differentiates: its roots times the gradients that they are given, if any;
    and what that adds up in vectors, each element without its sign. nan where nobody can tell."""
    total = size = 0.0
    for at, root in enumerate(roots):
        if not isinstance(root, torch.Tensor) or not root.is_floating_point():
            return math.nan, math.nan
        given = gradients[at] if at < len(gradients) else None
        if root.numel() == 1:
            total += float(root.detach()) * (1.0 if given is None else float(given.detach()))
            continue
        if given is None or given.shape != root.shape:
            return math.nan, math.nan
        for a, b in pieces(dense(root.detach()), dense(given.detach())):
            product = a.double() * b
            total += float(product.sum())
            size += float(product.abs_().sum())
    return (total, size) if roots else (math.nan, math.nan)


def host(value: torch.Tensor) -> torch.Tensor:
    plain = own(value).detach()
    return plain.clone() if plain.device.type == "cpu" else plain.cpu()


def mark(param: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """What tells that a parameter was written to: a write through .data has no version."""
    version = 0 if param.is_inference() else param._version
    mine = own(param)
    if (
        param.layout != torch.strided
        or param.is_meta
        or torch.nn.parameter.is_lazy(param)
        or not mine.numel()
    ):
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


def list_lengths(leaves: Mapping[str, Any]) -> dict[str, int]:
    """How many values stand in each list (or tuple) of them, by its place."""
    return dict(Counter(m[1] for place in leaves if (m := _IN_LIST.match(place))))


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


def is_rounding(one: Any, two: Any) -> bool:
    """Whether two losses differ by rounding of terms that are not small."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or one.ndim:
        return False
    return two.ndim == 0 and abs(float(one) - float(two)) <= _NOTHING.get(one.dtype, 0.0)


def why_unjoined(error: str) -> str:
    """What a `SplitError` says of the results of micro-batches of one row each."""
    why = error.partition(": ")[2].partition(" (help:")[0]
    return f"the results of single rows cannot be joined: {why}"
