"""What a step needs, before it runs: on fake tensors, so that nothing is allocated."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from ..memory import _parse_budget
from ..report import format_bytes
from .copies import Copies

MANY = 16
_WORKSPACES = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)


@dataclass(frozen=True)
class Estimate:
    """Bytes that a step needs, by torch's own tracker over fake tensors.

    Attributes
    ----------
    rows : int
        Of the batch that was given.
    parameters, gradients, optimizer_state : int
        After a first update.
    per_row : int
        What each row adds to the peak.
    fixed, least : int
        What rows are added to; and the peak with hardly any, which is often the update's. The
        peak is the larger of `least` and `fixed + per_row * rows`.
    unknown : tuple of str
        What the figures leave out, or may.
    """

    rows: int
    parameters: int
    gradients: int
    optimizer_state: int
    per_row: int
    fixed: int
    least: int
    unknown: tuple[str, ...]

    def peak(self, rows: int) -> int:
        """The peak with so many rows at once."""
        return max(self.least, self.fixed + self.per_row * rows)

    def largest(self, budget: int | str) -> int:
        """Rows of the largest micro-batch that fits; 0 where none does."""
        size = _parse_budget(budget, "largest")
        if size < self.least:
            return 0
        return max(0, (size - self.fixed) // max(1, self.per_row))

    def __str__(self) -> str:
        lines = [
            ("parameters", format_bytes(self.parameters)),
            ("gradients", format_bytes(self.gradients)),
            ("optimizer state", format_bytes(self.optimizer_state)),
            ("each row", format_bytes(self.per_row)),
            (f"peak with {self.rows} rows", format_bytes(self.peak(self.rows))),
            *(("not known", text) for text in self.unknown),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)

    __repr__ = __str__


def _leaves(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _sliced(value: Any, rows: int, to: int, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with so many rows, as fake tensors."""
    if isinstance(value, torch.Tensor):
        made = fake(value)
        if value.dim() == 0 or value.shape[0] != rows:
            return made
        times = -(-to // rows)
        return made.repeat(times, *[1] * (value.dim() - 1))[:to].clone()
    if isinstance(value, dict):
        return {key: _sliced(item, rows, to, fake) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_sliced(item, rows, to, fake) for item in value)
    return value


def _training(model: torch.nn.Module, optimizer: Any) -> Callable[..., None]:
    """A plain step of a model: the sum of what it returns stands for the loss."""

    def step(*batch: Any) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        sums = [t.float().sum() for t in _leaves(model(*batch)) if t.is_floating_point()]
        torch.autograd.backward(torch.stack(sums).sum())
        if optimizer is not None:
            optimizer.step()

    return step


def _by_kind(tracker: Any, kind: str) -> dict[str, int]:
    """Bytes by category over all devices."""
    total: dict[str, int] = {}
    for snapshot in tracker.get_tracker_snapshot(kind).values():
        for name, size in snapshot.items():
            key = str(getattr(name, "name", name)).upper()
            total[key] = total.get(key, 0) + int(size)
    return total


@dataclass
class _Run:
    """Two steps of a copy on fake tensors."""

    kinds: dict[str, int]  # bytes by category afterwards
    peak: int
    modules: list[torch.nn.Module]


def _run(step: Any, batch: tuple[Any, ...], rows: int, to: int) -> _Run:
    """With `to` of the batch's rows; the second step has gradients and state already."""
    # Private modules of torch's, of which the package needs none otherwise.
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies = Copies()
    with FakeCopyMode(mode):
        copied = copies.of(step)
    with mode:
        given = _sliced(batch, rows, to, mode.from_tensor)
    known = [v for v in copies.memo.values() if isinstance(v, torch.nn.Module)]
    inner = {id(child) for module in known for child in module.children()}
    roots = [module for module in known if id(module) not in inner]
    optimizers = [v for v in copies.memo.values() if isinstance(v, torch.optim.Optimizer)]
    tracker = MemTracker()
    # It would hook frozen parameters, too, which torch refuses.
    for parameter in (p for root in roots for p in root.parameters() if not p.requires_grad):
        handle = torch.utils.hooks.RemovableHandle(OrderedDict())
        tracker._param_to_grad_hook_handles[parameter] = (handle, handle)
    tracker.track_external(*roots, *optimizers, *_leaves(given))
    with warnings.catch_warnings(), mode, tracker:
        warnings.simplefilter("ignore")
        copied(*given)
        tracker.reset_mod_stats()
        copied(*given)
    peak = _by_kind(tracker, "peak").get("TOTAL", 0)
    return _Run(_by_kind(tracker, "current"), peak, roots)


def _unknown(modules: list[torch.nn.Module], devices: set[str]) -> tuple[str, ...]:
    """What fake tensors do not show."""
    found = []
    if any(isinstance(m, _WORKSPACES) for root in modules for m in root.modules()):
        found.append(
            "workspaces and layouts of convolutions and recurrent layers, which kernels choose"
        )
    if devices - {"cpu"}:
        found.append("the context, libraries and fragmentation of the device")
    return tuple(found)


def estimate(step_or_model: Any, *batch: Any, optimizer: Any = None) -> Estimate:
    """estimate(step_or_model, *batch, optimizer=None) -> Estimate

    What a step with this batch needs, by copies on fake tensors: nothing is allocated or changed.

    Parameters
    ----------
    step_or_model : callable
        A function that makes a whole training step, decorated or not, or a module: then the sum
        of its outputs stands for the loss.
    *batch
        What it is called with; the first tensor's first dimension counts rows.
    optimizer : torch.optim.Optimizer, optional
        Of the module.

    Raises
    ------
    ValueError
        No tensor with two rows was given, the step reads values of its tensors (`loss.item()`),
        which fake ones have not, or torch's tracker cannot follow it.
    """
    step = getattr(step_or_model, "__wrapped__", step_or_model)
    if isinstance(step_or_model, torch.nn.Module):
        step = _training(step_or_model, optimizer)
    first = next((t for t in _leaves(batch) if t.dim()), None)
    if first is None or first.shape[0] < 2:
        raise ValueError(
            f"estimate() expected a batch with a tensor of at least two rows{_C.see('estimate')}"
        )
    rows = first.shape[0]
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    try:
        # With many rows activations rule, with two what does not depend on rows.
        few = _run(step, batch, rows, 2)
        many, more = (_run(step, batch, rows, MANY * n * rows) for n in (1, 2))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            "estimate() cannot run the step on fake tensors, because it reads values of its "
            f"tensors ({error}); pass a step without calls such as .item(), or the module"
            f"{_C.see('estimate')}"
        ) from None
    except Exception as error:
        raise ValueError(
            "estimate() cannot know: the step does not run on fake tensors with other numbers of "
            f"rows under torch's tracker ({type(error).__name__}: {error})"
            f"{_C.see('estimate')}"
        ) from error
    per_row = max(0, (more.peak - many.peak) // (MANY * rows))
    parameters = {id(p): p for module in few.modules for p in module.parameters()}
    trained = [p for p in parameters.values() if p.requires_grad]
    return Estimate(
        rows=rows,
        parameters=sum(p.numel() * p.element_size() for p in parameters.values()),
        gradients=sum(p.numel() * p.element_size() for p in trained),
        optimizer_state=few.kinds.get("OPT", 0),
        per_row=per_row,
        fixed=more.peak - per_row * 2 * MANY * rows,
        least=few.peak,
        unknown=_unknown(few.modules, {t.device.type for t in _leaves(batch)}),
    )
