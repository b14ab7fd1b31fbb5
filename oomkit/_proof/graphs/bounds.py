"""Bounds on values of the whole batch, which no gradient of a proof shows while they are not met.

``loss.clamp(max=c)``, ``(loss - b).abs() + b``, a hinge on each of several task losses: while all
parts are on one side of the bound, they make the whole; in a later call one part may be on the
other side. So it is with an order over the rows (``sort``, ``topk``) while their values are equal.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

from .reach import reached, sketch

__all__ = ["Bound", "bounds", "class_weights", "ignored_labels", "of_the_batch", "order_rows"]

# Nodes of functions that are linear, or flat, on one side of a bound. Curves show in gradients.
_BENT = {
    "Abs": "abs",
    "Amax": "amax",
    "Amin": "amin",
    "Aminmax": "aminmax",
    "Celu": "celu",
    "Clamp": "clamp",
    "ClampMax": "clamp",
    "ClampMin": "clamp",
    "Copysign": "copysign",
    "Elu": "elu",
    "Fmax": "fmax",
    "Fmin": "fmin",
    "Hardshrink": "hardshrink",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Hardtanh": "hardtanh",
    "HuberLoss": "huber_loss",
    "LeakyRelu": "leaky_relu",
    "MaskedFill": "masked_fill",
    "Max": "max",
    "Maximum": "maximum",
    "Min": "min",
    "Minimum": "minimum",
    "MultiMarginLoss": "multi_margin_loss",
    "MultilabelMarginLoss": "multilabel_margin_loss",
    "PreluKernel": "prelu",
    "Relu": "relu",
    "Renorm": "renorm",
    "RreluWithNoise": "rrelu",
    "SmoothL1Loss": "smooth_l1_loss",
    "Softplus": "softplus",
    "Softshrink": "softshrink",
    "Threshold": "threshold",
    "Where": "where",
    **dict.fromkeys(("AdaptiveMaxPool2D", "AdaptiveMaxPool3D"), "adaptive_max_pool"),
    **dict.fromkeys(("FractionalMaxPool2D", "FractionalMaxPool3D"), "fractional_max_pool"),
    **dict.fromkeys(("MaxPool2D", "MaxPool2DWithIndices", "MaxPool3DWithIndices"), "max_pool"),
}
# Their names, and the attribute that says which of them: most are curves.
_NORMS = {
    "Cdist": ("cdist", "_saved_p"),
    "Dist": ("dist", "_saved_p"),
    "LinalgVectorNorm": ("norm", "_saved_ord"),
    "Norm": ("norm", "_saved_p"),
    "Pdist": ("pdist", "_saved_p"),
}
_STRAIGHT = (1.0, math.inf, -math.inf)
_REDUCED = {
    "IndexReduce": "index_reduce",
    "ScatterReduce": "scatter_reduce",
    "SegmentReduce": "segment_reduce",
}
_ORDERS = ("Cummax", "Cummin", "Kthvalue", "Median", "Mode", "Nanmedian", "Sort", "Topk")
_ENTROPIES = ("NllLoss", "NllLoss2D")
_BY_INDEX = ("Gather", "Index", "IndexSelect", "Take")
_SAVED = (
    "_saved_self",
    "_saved_other",
    "_saved_result",
    "_saved_condition",
    "_saved_mask",
    "_saved_x1",
    "_saved_x2",
    "_saved_src",
    "_saved_source",
    "_saved_data",
)
_CHOSEN = ("where", "masked_fill")  # by a condition, of which a value is all that is kept
_unknown = itertools.count(1)
_MOST = 4000  # nodes that are looked at
_VALUES = 1024  # of a tensor: with more it has rows, or is a parameter
_ALIKE = 64  # functions in a loop over samples; with more they are not told apart
_GRAPH = "graph"
# Name, shapes and values of what the function was given; None where nothing was kept. Behind those
# of a graph it follows itself: a `Sketch`, and where in it they are.
Bound = tuple[str, Any, torch.Tensor | None]


def bounds(root: torch.Tensor) -> list[Bound]:
    """Functions with a bound between a loss and the activations.

    Args:
        root: a loss.

    Returns:
        Of each, in the order of the graph, its name, and shapes and values of its input.
    """
    found: list[Bound] = []
    nodes = list(_nodes(root))
    names = [_name(kind, node) for kind, node in nodes]
    for (kind, node), name in zip(nodes, names, strict=True):
        if name:
            found.append(_bound(name, node))
        if kind in _ORDERS or (kind in ("Max", "Min") and hasattr(node, "_saved_dim")):
            found.append(("order", _ordered(node), None))
        if kind in _BY_INDEX and (rows := _left_in_place(node)):
            found.append(("in place", ((rows,),), None))
    told = [
        kind.lower() if kind in _ORDERS else name
        for (kind, _), name in zip(nodes, names, strict=True)
    ]
    at = [i for i, name in enumerate(names) if name]
    found.append(
        (_GRAPH, (sketch(nodes, [n if n not in _CHOSEN else None for n in told]), at), None)
    )
    return found


def ignored_labels(root: torch.Tensor) -> list[int]:
    """Labels that do not count in a cross entropy, of a loss's graph.

    Args:
        root: the loss.
    """
    found = [int(node._saved_ignore_index) for kind, node in _nodes(root) if kind in _ENTROPIES]
    return [value - (value >= 1 << 63) * (1 << 64) for value in found]  # some read it unsigned


def class_weights(root: torch.Tensor) -> list[torch.Tensor]:
    """What classes weigh in a cross entropy, of a loss's graph.

    Args:
        root: the loss.
    """
    found = []
    for _, node in (each for each in _nodes(root) if each[0] in _ENTROPIES):
        try:
            found.append(node._saved_weight)
        except RuntimeError:  # the graph has been freed
            continue
    return [weights.detach() for weights in found if weights is not None]


def _nodes(root: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Functions of a loss's graph and their kinds, nearest first."""
    seen = {root.grad_fn}
    work: deque[Any] = deque(node for node in seen if node is not None)
    while work and len(seen) < _MOST:
        node = work.popleft()
        yield node.name().partition("Backward")[0], node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                work.append(following)


def _name(kind: str, node: Any) -> str | None:
    """The name of a function that is linear, or flat, on one side of a bound, or None."""
    if kind in _REDUCED:
        return _REDUCED[kind] if node._saved_reduce in ("amax", "amin", "max", "min") else None
    if kind not in _NORMS:
        return _BENT.get(kind)
    name, which = _NORMS[kind]
    return name if getattr(node, which, None) in _STRAIGHT or _is_of_one(node) else None


def _is_of_one(node: Any) -> bool:
    """Whether a norm is that of a single number: its absolute value."""
    try:
        of, result = getattr(node, "_saved_self", None), getattr(node, "_saved_result", None)
    except RuntimeError:  # the graph has been freed
        return False
    return of is not None and (result is None or result.numel() == of.numel())


def _bound(name: str, node: Any) -> Bound:
    shapes, values = [], []
    for attribute in _SAVED:
        try:
            value = getattr(node, attribute, None)
        except RuntimeError:  # the graph has been freed
            continue
        if isinstance(value, torch.Tensor) and not value.is_nested:  # that has rows, and no shape
            shapes.append(tuple(value.shape))
            if value.numel() <= _VALUES:
                plain = value.detach().resolve_conj()
                plain = torch.view_as_real(plain) if plain.is_complex() else plain
                values.append(plain.double().flatten().cpu())
    if len(values) < len(shapes):
        return name, tuple(shapes), None
    return name, tuple(shapes), torch.cat(values) if values else None


def _ordered(node: Any) -> tuple[tuple[int, ...], ...]:
    """How many values are put in order: along one dimension, or of all."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    try:
        sizes = node._saved_self.shape if sizes is None else sizes
    except RuntimeError:  # the graph has been freed: no two are known to be alike
        return ((-next(_unknown),),)
    dim = _dim(node)
    if dim is None or not sizes:
        return (tuple(sizes),)
    return ((sizes[dim],),)


def _dim(node: Any) -> int | None:
    """The dimension of a node that has one."""
    dim: int | None = getattr(node, "_saved_dim", None)
    return dim - 2**64 if dim is not None and dim >= 2**63 else dim  # torch tells -1 without a sign


def _left_in_place(node: Any) -> int:
    """How many values an index puts in the order in which they are: that of equal values, where it
    comes from an order of detached ones. 0 where it is another index."""
    try:
        saved = [getattr(node, "_saved_index", None), *getattr(node, "_saved_indices", ())]
    except RuntimeError:  # the graph has been freed
        return 0
    there = [index for index in saved if index is not None]
    if len(there) != 1 or there[0].dtype not in (torch.int64, torch.int32) or not there[0].ndim:
        return 0
    index = there[0].detach()
    if index.ndim > 1:  # of gather(): one line of them
        index = index.movedim(_dim(node) or 0, 0).flatten(1)[:, 0]
    alike = torch.equal(index, torch.arange(len(index), dtype=index.dtype, device=index.device))
    return len(index) if alike else 0


def order_rows(whole: list[Bound], parts: list[list[Bound]], before: int) -> int:
    """Whether values of different rows are put in order: as many fewer in a part as it has rows.

    Args:
        whole: of the whole.
        parts: of each part.
        before: what it was in the last proof.

    Returns:
        2 they are, 1 an index over rows may be such an order and left all in place, 0 neither.
    """

    def sizes(kind: str) -> list[list[Any]]:
        return [[at for name, at, _ in each if name == kind] for each in (whole, *parts)]

    def differ(found: list[list[Any]]) -> bool:
        return any(each != found[0] for each in found[1:])

    if before == 2 or differ(sizes("order")):
        return 2
    # One of equal values leaves all rows of each part in place, if it is one row, too; numbers of
    # the batch's rows begin anew in none but the first.
    in_place = sizes("in place")
    return int(all(in_place) and differ(in_place))


def of_the_batch(whole: list[Bound], parts: list[list[Bound]], limit: float) -> str | None:
    """The name of a bound on a value that all rows make, or None.

    What is of rows has another shape in a part than in the whole. What is of a single sample, in
    a loop over samples, is met with the same values in a part. What is of parameters alone has
    the same values everywhere.

    Args:
        whole: of the whole.
        parts: of each part.
        limit: what rounding explains, relative.
    """
    graphs = [[of for name, of, _ in each if name == _GRAPH] for each in (whole, *parts)]
    told = []
    for each in zip(*graphs, strict=False) if len({len(of) for of in graphs}) == 1 else ():
        name, of_rows = reached(*(of for of, _ in each))
        if name:
            return name
        told.append(of_rows)
    whole, *parts = (_untold(each, told) for each in (whole, *parts))
    of_parts = [_by_shape(part) for part in parts]
    for (name, shapes), found in _by_shape(whole).items():
        others = [part.get((name, shapes), []) for part in of_parts]
        if not all(others):
            continue
        if all(len(other) == len(found) for other in others):
            if any(
                _differ(value, other[i], limit) or _is_flat(name, shapes, value)
                for other in others
                for i, value in enumerate(found)
            ):
                return name
            continue
        for value in found if len(found) <= _ALIKE else ():
            if all(_differ(value, each, limit) for other in others for each in other):
                return name
    return None


def _untold(found: list[Bound], told: list[set[int]]) -> list[Bound]:
    """Without those that have rows by their graphs: of these, as many may be chosen in a part."""
    left: list[Bound] = []
    of_this: list[Bound] = []
    graphs = iter(told)
    for bound in found:
        if bound[0] == _GRAPH:
            of_rows = next(graphs, set())
            left += [each for each, i in zip(of_this, bound[1][1], strict=True) if i not in of_rows]
            of_this = []
        elif bound[0] not in ("order", "in place"):
            of_this.append(bound)
    return left


def _by_shape(found: list[Bound]) -> dict[tuple[str, Any], list[torch.Tensor]]:
    kinds: dict[tuple[str, Any], list[torch.Tensor]] = defaultdict(list)
    for name, shapes, value in found:
        if value is not None and value.numel():  # none of no rows is met
            kinds[name, shapes].append(value)
    return kinds


def _differ(one: torch.Tensor, two: torch.Tensor, limit: float) -> bool:
    return not torch.allclose(one, two, rtol=limit, atol=0.0, equal_nan=True)


def _is_flat(name: str, shapes: Any, value: torch.Tensor) -> bool:
    """What was kept tells nothing of the input: the result of what is below its bound, or a
    condition. That of a mask, which is no scalar, is the same in each part."""
    if name in ("relu", "threshold"):
        return not bool(value.any())
    return name in _CHOSEN and shapes == ((),)
