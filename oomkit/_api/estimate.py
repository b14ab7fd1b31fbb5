"""What a step needs, before it runs: on fake tensors, so that nothing is allocated."""

from __future__ import annotations

import gc
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from ..memory import _parse_budget
from ..report import format_bytes
from .copies import Copies

MANY = 16
_INSIDE = {
    "convolution|_rnn|lstm|gru": (
        "workspaces and layouts of convolutions and recurrent layers, which kernels choose"
    ),
    "embedding_bag.*_backward": "what the backward of EmbeddingBag sorts and counts for itself",
    "linalg_(?!vector_norm)|cholesky|triangular": "workspaces of linear algebra",
    "complex": "copies of complex tensors that an operation makes for itself",
}
"""Kernels that allocate within one operation, which fake tensors do not show."""


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
    kernels: set[str]


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations, and `complex` where one has such a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        if any(t.is_complex() for t in _leaves(args)):
            self.seen.add("complex")
        return func(*args, **(kwargs or {}))


class _Scalars(TorchFunctionMode):
    """Copies keep the value of a number on the host: optimizers read their count of steps."""

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            number, memo = args
            plain = type(number) is torch.Tensor and not number.requires_grad
            if plain and number.dim() == 0 and number.device.type == "cpu":
                value = number.item()
                with self.fake:
                    memo[id(number)] = torch.tensor(value, dtype=number.dtype)
                return memo[id(number)]
        return func(*args, **(kwargs or {}))


@contextmanager
def _random_states(tracker: Any) -> Iterator[None]:
    """Copies of the random state are real tensors, which torch.utils.checkpoint keeps."""
    plain = torch.get_rng_state

    def tracked() -> torch.Tensor:
        state = plain()
        tracker.track_external(state)
        return state

    torch.get_rng_state = tracked
    try:
        yield
    finally:
        torch.get_rng_state = plain


def _run(step: Any, batch: tuple[Any, ...], rows: int, to: int) -> _Run:
    """With `to` of the batch's rows; the second step has gradients and state already."""
    # Private modules of torch's, of which the package needs none otherwise.
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies = Copies()
    with FakeCopyMode(mode), _Scalars(mode):
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
    followed: Any = tracker.memory_tracking
    begins = tracker._pre_fw_hook

    def begins_again(module: torch.nn.Module, inputs: Any) -> None:
        if not tracker._mod_tracker.is_bw:  # it refuses a module that is called once more
            followed.pop(module, None)
        begins(module, inputs)

    tracker._pre_fw_hook = begins_again  # type: ignore[method-assign]
    tracker.track_external(*roots, *optimizers, *_leaves(given))
    kernels = _Kernels()
    with warnings.catch_warnings(), mode, tracker, _random_states(tracker), kernels:
        warnings.simplefilter("ignore")
        copied(*given)
        gc.collect()  # of cycles, which reentrant checkpoints leave
        copied(*given)
    peak = _by_kind(tracker, "peak").get("TOTAL", 0)
    return _Run(_by_kind(tracker, "current"), peak, roots, kernels.seen)


def _unknown(kernels: set[str], devices: set[str]) -> tuple[str, ...]:
    """What fake tensors do not show."""
    found = [text for names, text in _INSIDE.items() if any(re.search(names, k) for k in kernels)]
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
        many, more, most = (_run(step, batch, rows, MANY * n * rows).peak for n in (1, 2, 3))
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
    unknown = _unknown(few.kernels, {t.device.type for t in _leaves(batch)})
    if abs(most - 2 * more + many) > most / 100:
        unknown += (
            "peaks of other numbers of rows: they do not grow evenly (samples are compared?)",
        )
    per_row = max(0, (more - many) // (MANY * rows))
    parameters = {id(p): p for module in few.modules for p in module.parameters()}
    trained = [p for p in parameters.values() if p.requires_grad]
    return Estimate(
        rows=rows,
        parameters=sum(p.numel() * p.element_size() for p in parameters.values()),
        gradients=sum(p.numel() * p.element_size() for p in trained),
        optimizer_state=few.kinds.get("OPT", 0),
        per_row=per_row,
        fixed=more - per_row * 2 * MANY * rows,
        least=few.peak,
        unknown=unknown,
    )
