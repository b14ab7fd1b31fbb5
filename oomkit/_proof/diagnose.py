"""What the first split call of a step looks into: labels of -100, and verify=."""

from __future__ import annotations

import math
from typing import Any

import torch

from .rows import findings, places
from .values import loss_of

IGNORED = -100  # the value that PyTorch's losses leave out by default

_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})

# Relative differences that rounding explains. A loss in float32 may come out of matrix
# products in TF32 (accelerators) or of a model in half precision.
_HALF = 2e-2
_ACCELERATOR = 1e-3
_SINGLE = 2e-5
_DOUBLE = 1e-9
# What the order of summation explains in a gradient, relative to its norm, by what rounding
# explains in the loss (tolerance()): a sum of n terms in another order differs by at most n eps of
# the sum of their absolute values, by sqrt(n) eps in practice (Higham, Accuracy and Stability of
# Numerical Algorithms, section 4.2).
GRADIENT = {_DOUBLE: 1e-9, _SINGLE: 2e-4, _ACCELERATOR: 5e-3, _HALF: 5e-2}
_NOISE = 0.2  # dropout masks and batch statistics differ between a slice and its halves
_CANCELS = 1e-3  # rows of size 1 that cancel to less than this leave mostly rounding
_ROUNDING = 0.02  # a whole that cancels to less than this is compared with nothing
_NODES = 400  # of a graph that is searched for changes of precision; they free one another in turn
# Nodes of functions with a dtype=, which cast inside: there is no node of the cast.
_CASTING = ("Sum", "Mean", "Prod", "Cumsum", "Cumprod", "Softmax", "LogSoftmax")
_CASTING_NODES = frozenset(f"{name}Backward{i}" for name in _CASTING for i in (0, 1))


def uneven_labels(leaf: torch.Tensor, dim: int, lengths: list[int]) -> bool:
    """Whether slices of these lengths hold unequal shares of labels that are not ignored."""
    if leaf.dtype not in _INTEGERS:
        return False
    kept = leaf != IGNORED
    if bool(kept.all()):
        return False
    counts = [int(part.sum()) for part in torch.split(kept, lengths, dim)]
    return any(
        count * lengths[0] != counts[0] * length
        for count, length in zip(counts, lengths, strict=True)
    )


def _cast(node: Any) -> set[Any]:
    """The types of numbers on both sides of a cast; None among them where one cannot be told."""
    try:
        behind, at = node.next_functions[0]
        return {node._input_metadata[0].dtype, behind._input_metadata[at].dtype}
    except (AttributeError, IndexError, RuntimeError):
        return {None}


def _precision(loss: torch.Tensor) -> str:
    """Of what the loss is made: "half" where a tensor was cast to fewer bits than 32 on the way to
    it, as autocast does, "own" where code was that torch does not have (compiled, Triton's, another
    library's), "single" where one was cast to or from single precision."""
    work: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found = ""
    while work and len(seen) < _NODES:
        node = work.pop()
        if node is None or node in seen:
            continue
        name = node.name()
        kinds = _cast(node) if name == "ToCopyBackward0" or name in _CASTING_NODES else set()
        if name == "ToCopyBackward0" or len(kinds) > 1:
            if not kinds <= _WIDE:
                return "half"
            if torch.float32 in kinds:
                found = found or "single"
        if isinstance(node, torch.autograd.function.BackwardCFunction) or "CppNode" in name:
            found = "own"
        seen.add(node)
        work.extend(following for following, _ in node.next_functions)
    return found


def tolerance(loss: torch.Tensor, is_full: bool = False) -> float:
    """The relative difference that rounding explains in a loss and in parts of it.

    Args:
        loss: or a parameter.
        is_full: no kernel of torch's computes single precision with fewer bits (`Precision`).
    """
    kind = _precision(loss)
    if loss.dtype == torch.float64 and kind != "single":
        return _DOUBLE
    if loss.dtype not in _WIDE or kind == "half":
        return _HALF
    if loss.device.type == "cpu" or (loss.device.type == "cuda" and is_full and kind != "own"):
        return _SINGLE
    return _ACCELERATOR


def replay_differs(
    whole: float, made: float, scale: float, limit: float, noise: bool
) -> str | None:
    """What to say of a replay whose losses do not make the loss that the call had, or None.

    Args:
        whole: the loss of the call; NaN where it is not known.
        made: what the micro-batches' losses make by their weights.
        scale: the largest part of that.
        limit: the relative difference that rounding explains.
        noise: whether random numbers or batch statistics are in them.
    """
    limit = max(limit, _NOISE) if noise else limit
    scale = max(abs(whole), scale)
    difference = abs(whole - made) / scale if scale > 0 else 0.0
    if not math.isfinite(whole) or difference <= limit or abs(whole - made) <= limit * _CANCELS:
        return None  # micro-batches without a finite loss where the call had one are said
    return (
        f"ran again in micro-batches for its backward(), and their losses add up to {made:.6g} "
        f"instead of {whole:.6g}, so their gradients are not those of that call. Either something "
        "that the step reads has changed since (a global, an attribute), or the loss couples the "
        "samples of a batch, or it is not a mean over them (see reduction= and weight= of "
        "auto_batch)"
    )


def _times(share: float, value: float) -> float:
    return share * value if share else 0.0  # a mean over nothing is NaN


class Verification:
    """Three runs of a step (a slice, its first half, its second half) and the verdict.

    The engine calls `root` in place of each outermost backward, `finish` at the end of each
    run and `judge` after the third. No graph outlives its run.
    """

    def __init__(self) -> None:
        self._roots: list[float] = []
        self._losses: list[list[float]] = []
        self._outputs: list[dict[str, Any]] = []
        self._rows: list[int] = []
        self.tolerance = 0.0

    def root(self, roots: Any, gradients: tuple[Any, ...] = ()) -> None:
        """The tensors of one backward, and the gradients that they are given."""
        tensors = roots if isinstance(roots, (tuple, list)) else (roots,)
        self.tolerance = max([self.tolerance, *map(tolerance, tensors)])
        value, size = loss_of(tensors, gradients)
        cancels = not self._losses and abs(value) < _ROUNDING * size
        self._roots.append(math.nan if cancels else value)

    def finish(self, result: Any, loss: Any, rows: int) -> None:
        """The end of a run: its returned loss counts where no backward ran."""
        outputs: dict[str, Any] = {}
        if not self._roots:
            if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point():
                self.root(loss)
            elif isinstance(result, float):
                self.tolerance = max(self.tolerance, _SINGLE)
                self._roots.append(result)
            noted = result if isinstance(result, float) else loss if self._roots else None
            outputs = places(result, noted)
        self._losses.append(self._roots)
        self._outputs.append(outputs)
        self._rows.append(rows)
        self._roots = []

    def judge(
        self,
        label: str,
        first: list[float],
        second: list[float],
        is_sum: bool,
        moved: bool,
    ) -> tuple[bool | None, str] | None:
        """(equal, text), or None where there is nothing to compare.

        Equal is None where noise let nothing but a coarse comparison be made.
        """
        # Difference, limit, and what it is where it is no loss.
        seen: list[tuple[float, float, str]] = []
        limit = max(self.tolerance, _NOISE) if moved else self.tolerance
        for i, (whole, one, two) in enumerate(zip(*self._losses, strict=False)):
            group = min(i, len(first) - 1)
            pair = first[group], second[group]
            made = _times(pair[0], one) + _times(pair[1], two)
            scale = max(abs(whole), abs(_times(pair[0], one)), abs(_times(pair[1], two)))
            if math.isfinite(whole) and math.isnan(made):  # one part is a mean over nothing
                seen.append((math.inf, limit, ""))
                continue
            difference = abs(whole - made) / scale if scale > 0 else math.nan
            if not math.isfinite(difference) or (
                difference > limit and abs(whole - made) <= limit * _CANCELS
            ):
                continue
            seen.append((difference, limit, ""))
        total = self._rows[1] + self._rows[2]
        shares = self._rows[1] / total, self._rows[2] / total
        for finding in findings(self._outputs, self._rows, shares):
            most = max(finding.limit, _NOISE) if moved else finding.limit
            seen.append((finding.difference, most, finding.text))
        if not seen:
            return None
        difference, limit, what = max(seen, key=lambda each: each[0] / (each[1] or _DOUBLE))
        how = "the sum" if is_sum else "the weighted mean"
        noisy = "; a coarse comparison, because the step draws random numbers" if moved else ""
        if difference <= limit:
            return None if moved else True, (
                f"compared losses and results of {label}: {self._rows[0]} rows give {how} of "
                f"{self._rows[1]} and {self._rows[2]} of them (relative difference "
                f"{difference:.1e}{noisy}); gradients were not compared, because larger "
                "micro-batches do not fit"
            )
        return False, (
            f"{what or f'the loss of all rows is not {how} of the losses of its parts'} "
            f"({self._rows[0]} rows against the first {self._rows[1]} and the other "
            f"{self._rows[2]}, relative difference {difference:.1e}{noisy})"
        )

    def fits(self, one: float, two: float) -> bool:
        """Whether the losses of the parts, with these weights, make those of the whole."""
        seen = 0
        for whole, first, second in zip(*self._losses, strict=False):
            made = _times(one, first) + _times(two, second)
            if not abs(whole - made) <= self.tolerance * max(abs(whole), abs(made)):
                return False
            seen += 1
        return seen > 0


def advice(
    rules: list[tuple[str, str]],
    is_sum: bool,
    chooses: bool,
    hidden: bool,
    of_results: bool = False,
) -> str:
    """What to do about a split that is not exact.

    Args:
        rules: kind and text of weights that would make the parts the whole.
        is_sum: whether micro-batches weigh 1 now.
        chooses: it draws integers among as many as its rows make.
        hidden: numbers that no part can be given may hide what differs.
        of_results: all but what the step returns is exact.
    """
    if hidden:
        return (
            "it may choose among its rows by them. Draw by torch, numbers for each row in one "
            "call (torch.randn(len(x), 4)), or before the step. "
            'verify="warn" splits the step anyway'
        )
    kinds = [kind for kind, _ in rules]
    if ("sum" if is_sum else "rows") in kinds:
        kinds = []  # parts as heavy as each other: weights are not what is wrong
    if "rows" in kinds:
        return 'the loss is a mean over samples: pass reduction="mean" to auto_batch'
    if "sum" in kinds:
        return 'the loss is a sum over samples: pass reduction="sum" to auto_batch'
    if kinds and rules[-1][0] not in ("rows", "sum"):
        return f"the loss is a {rules[-1][1]}: pass weight= to auto_batch"
    if of_results and not chooses:
        return (
            "this result is neither a sum nor a mean over the rows (a maximum, a set, a loss that "
            "couples the samples of a batch): return it for each row, or pass join= to auto_batch, "
            'a function of the results of the parts and their rows. verify="warn" splits the step '
            "anyway"
        )
    chosen = (
        "It draws integers among as many as its rows make: where they choose among the rows "
        "(torch.randperm for MixUp, torch.randint for negatives), do that before the step. "
    )
    return (
        "a loss that couples the samples of a batch (pairs, contrastive losses, in-batch "
        f"negatives, batch statistics) cannot be split exactly. {chosen * chooses}"
        "For a mean over something other than rows (tokens, classes) pass weight= to "
        'auto_batch, for a result that is joined wrongly pass join=. verify="warn" splits the '
        "step anyway"
    )


def looks_like(ratios: list[float], wrong: int) -> str:
    """Whether all gradients are as many times as large, in words; else nothing."""
    if not ratios or wrong < len(ratios):
        return ""
    mean = sum(ratios) / len(ratios)
    alike = max(abs(r - mean) for r in ratios) <= 0.02 * mean
    if not 0.0 < mean < math.inf or not alike or abs(mean - 1.0) <= 0.02:
        return ""
    return f" (all gradients are {mean:.3g} times as large)"
