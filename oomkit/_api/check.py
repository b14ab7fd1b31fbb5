"""A dry run of a step: will it work when memory runs out?"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from .. import _C
from ..testing import force_slices
from .copies import Copies

_OWN = " (check)"  # behind the label, so that reports tell these runs from the step's own
RELATIVE = 1e-3  # what rounding explains between the whole batch and two parts of it


@dataclass(frozen=True)
class Check:
    """What a dry run has shown; `ok` says whether the step can be split.

    `str()` of it is a table; `status` is 0 where it can be split, else 1: an exit status.
    """

    ok: bool
    findings: tuple[tuple[str, str], ...]

    @property
    def status(self) -> int:
        return 0 if self.ok else 1

    def __str__(self) -> str:
        width = max(len(what) for what, _ in self.findings)
        return "\n".join(f"{what.ljust(width)}  {finding}" for what, finding in self.findings)

    __repr__ = __str__


@dataclass
class Run:
    """One run of a copy."""

    record: Any
    result: Any
    state: dict[str, torch.Tensor]
    said: list[str]
    norms: bool  # it normalises by the batch


class _Lines(logging.Filter):
    """Collects what oomkit's logger says, and lets no handler have it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.said.append(record.getMessage())
        return False


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Warnings and log lines of oomkit meanwhile, and none of them elsewhere."""
    log, lines = logging.getLogger("oomkit"), _Lines()
    level = log.level
    log.addFilter(lines)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            # A scheduler's copy misses what it has put into the optimizer, and says so.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", _C.OomkitWarning)
            yield lines.said
            lines.said += [
                str(w.message) for w in caught if issubclass(w.category, _C.OomkitWarning)
            ]
    finally:
        log.removeFilter(lines)
        log.setLevel(level)


def _undecorated(step: Any) -> tuple[Any, dict[str, Any]]:
    """What a step decorates, bound as it is, and its options."""
    try:
        options = _C._step_options(step)
    except TypeError:
        return step, {}
    function = step.__wrapped__ if hasattr(step, "__wrapped__") else step
    own = getattr(step, "__self__", None)
    return function if own is None else MethodType(function, own), options


def _tensors(copies: Copies) -> dict[str, torch.Tensor]:
    """Parameters of all modules that were copied, and their gradients, by name.

    Buffers are left out: statistics of a batch are those of its parts, which is a warning.
    """
    modules = [v for v in copies.memo.values() if isinstance(v, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    found: dict[str, torch.Tensor] = {}
    for module in (module for module in modules if id(module) not in inner):
        for name, parameter in module.named_parameters():
            found[f"{type(module).__name__}.{name}"] = parameter.detach().clone()
            if parameter.grad is not None:
                found[f"gradient of {type(module).__name__}.{name}"] = parameter.grad.clone()
    return found


def _norms(copies: Copies) -> list[Any]:
    """Modules that normalise by the batch."""
    batch, sample = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm
    return [
        module
        for module in copies.memo.values()
        if isinstance(module, batch)
        and not isinstance(module, sample._InstanceNorm)
        and (module.training or module.running_mean is None)
    ]


def _without_statistics(norm: Any) -> None:
    """For good in eval mode; one that has no running statistics does nothing."""
    norm.eval()
    norm.train = lambda mode=True: norm
    if norm.running_mean is None:
        norm.forward = lambda x: x


def _run(step: Any, arguments: Any, slices: list[int] | None, norms: bool = True) -> Run:
    """One call of a fresh copy, whole or in these slices."""
    function, options = _undecorated(step)
    copies = Copies()
    copied = copies.of(function)
    found = _norms(copies)
    for norm in found if not norms else ():
        _without_statistics(norm)
    given = options.pop("participants", None)
    if given:
        options["participants"] = [copies.memo.get(id(one), one) for one in given]
    options.pop("sinks", None)
    label = options.get("label") or getattr(function, "__name__", "step")
    options["label"] = f"{label}{_OWN}"
    options["verify"] = False  # the two runs are compared here
    again = _C.auto_batch(copied, **options)
    forced = nullcontext() if slices is None else force_slices(slices)
    with _listening() as said, torch.random.fork_rng(), forced:
        result = again(*arguments[0], **arguments[1])
    said = [text.replace(_OWN, "") for text in said]
    return Run(again.records[-1], result, _tensors(copies), said, bool(found))


def _number(result: object) -> float | None:
    """The loss that a step returns, as a number."""
    if isinstance(result, dict):
        result = result.get("loss")
    elif isinstance(result, (tuple, list)) and result:
        result = result[0]
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    return float(result) if isinstance(result, float) else None


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if one.shape != two.shape:
        return float("inf")
    if not one.is_floating_point() or one.numel() == 0:
        return 0.0
    scale = max(float(one.abs().max()), float(two.abs().max()), 1e-12)
    return float((one.float() - two.float()).abs().max()) / scale


def _compare(whole: Run, parts: Run, findings: list[tuple[str, str]]) -> bool:
    losses = _number(whole.result), _number(parts.result)
    ok = True
    if losses[0] is not None and losses[1] is not None:
        near = abs(losses[0] - losses[1]) <= RELATIVE * max(abs(losses[0]), 1e-12)
        ok = near
        verdict = "agree" if near else "differ"
        findings.append(("losses", f"{losses[0]:.6g} whole, {losses[1]:.6g} in parts: {verdict}"))
        if not near and abs(losses[1] * 2 - losses[0]) <= RELATIVE * abs(losses[0]):
            findings.append(("set", 'reduction="sum": the loss is a sum over samples'))
    names = whole.state.keys() & parts.state.keys()
    far = {name: _apart(whole.state[name], parts.state[name]) for name in names}
    worst = max(far, key=far.__getitem__, default=None)
    if worst is not None:
        near = far[worst] <= RELATIVE
        ok = ok and near
        text = f"{len(names)} tensors, the largest difference {far[worst]:.1e}"
        findings.append(("state afterwards", text if near else f"{text} ({worst}): differs"))
    return ok


# What a step says whose split nothing has compared: here the two runs are.
_UNCHECKED = "is treated as a mean over samples"


def check(step: Any, *args: Any, **kwargs: Any) -> Check:
    """check(step, *args, **kwargs) -> Check

    Run copies of a step with this batch, whole and in two parts, and compare them.

    The step, its model, its optimizer and torch's random stream are as before: copies run, which
    takes their memory once more. What the step prints, or writes to files, happens.

    Parameters
    ----------
    step : callable
        A decorated step, or a function that is to be one.
    *args, **kwargs
        What it is called with.

    Returns
    -------
    Check
        `ok`, `status` (an exit status), and a table as its `str()`.
    """
    findings: list[tuple[str, str]] = []
    given = args, kwargs
    try:
        whole = _run(step, given, None)
        rows = whole.record.batch_size
        if rows is None or rows < 2:
            findings.append(("batch", "none with two rows was found: pass one as an argument"))
            return Check(False, tuple(findings))
        findings.append(("batch", f"{rows} rows, split by {rows - rows // 2} and {rows // 2}"))
        halves = [rows - rows // 2, rows // 2]
        parts = _run(step, given, halves)
    except (_C.SplitError, _C.OomkitError) as error:
        findings.append(("refused", str(error).replace(_OWN, "")))
        return Check(False, tuple(findings))
    ok = _compare(whole, parts, findings)
    if not ok and whole.norms:
        ok = _compare(_run(step, given, None, False), _run(step, given, halves, False), [])
        if ok:
            text = "only its statistics differ, which are those of each part: a warning says so"
            findings.append(("BatchNorm", text))
    findings += [
        ("message", text.removeprefix("oomkit: "))
        for text in dict.fromkeys(parts.said)
        if _UNCHECKED not in text
    ]
    findings.append(("result", "can be split" if ok else "cannot be split as it is"))
    return Check(ok, tuple(findings))
