"""One trial: run under measurement, freed when it ends, told as plain values."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import _C
from ..memory import MemoryInfo, _host_bytes, cleanup, memory

log = logging.getLogger("oomkit")

# Kinds of which another attempt may be free, and which say nothing about the configuration.
PASSING = frozenset(("fragmentation", "contention"))


class _Facts(NamedTuple):
    """What `_C._trial` returns."""

    value: Any
    class_: str | None
    type: str | None
    message: str | None
    location: str | None
    report: _C.OOMReport | None
    requested: int | None
    allocated: int | None
    reserved: int | None
    usable: int | None
    baseline: int | None
    peak: int | None
    peak_reserved: int | None
    limit: int | None
    device: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended. Bytes; None where a figure is not known.

    `kind` is None for one that did not run out of memory. `needed` is what memory would have
    had to hold: the peak, or what was allocated and the request that failed, a lower bound.
    """

    value: Any
    raised: bool
    kind: str | None
    message: str | None
    location: str | None
    peak: int | None
    needed: int | None
    budget: int | None

    @property
    def violation(self) -> float | None:
        """Peak over budget, less one: negative is headroom. None where it is not known."""
        if self.kind is not None and self.kind not in PASSING:
            if self.needed is None or not self.budget:
                return _SMALLEST
            return max(self.needed / self.budget - 1, _SMALLEST)
        if self.peak is None or not self.budget:
            return None
        return self.peak / self.budget - 1


_SMALLEST = 0.01


def is_distributed() -> bool:
    distributed = torch.distributed
    return bool(
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def in_sampler(error: BaseException) -> bool:
    """Did it come out of a call to the trial: its sampler, pruner or storage?"""
    at = error.__traceback__
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__", "")).startswith("optuna.trial."):
            return True
        at = at.tb_next
    return False


def judge(error: BaseException) -> bool:
    """Whether an out-of-memory error is the trial's own. What is not, passes with a note."""
    if in_sampler(error):
        error.add_note(
            "oomkit: memory ran out in Optuna's sampler, pruner or storage, not in the "
            f"objective: the trial is not marked as out of memory{_C.see('optuna')}"
        )
        return False
    if is_distributed():
        error.add_note(
            "oomkit: several processes take part in this trial, and the others may be waiting "
            f"for this one: it is neither pruned nor retried{_C.see('optuna')}"
        )
        return False
    return True


def release() -> None:
    """Frees what nothing refers to any more. Never raises out-of-memory itself."""
    torch.clear_autocast_cache()
    try:
        cleanup()
    except (RuntimeError, MemoryError) as error:
        if not _C.is_oom_error(error):
            raise
        log.debug("emptying the cache after a trial failed: %s", error)


def _accelerator_now(device: tuple[int, int]) -> MemoryInfo | None:
    """Figures of an accelerator that came into use only inside the trial."""
    if device[0] != 0 or torch.accelerator.current_accelerator(check_available=True) is None:
        return None
    info = memory()
    return None if info.allocated is None or not info.peak_allocated else info


# What allocator.cpp says where a limit of ours refuses a request.
_BUDGET = re.compile(r"memory budget is .* \((\d+) bytes\), of which")


def _at_failure(facts: _Facts) -> tuple[int | None, int | None, int | None]:
    """(allocated, requested, the limit of ours that refused it), each as far as it is known.

    By now frames have been unwound, a step rolled back, and a `with limit_memory()` of the
    objective's has put another limit back: what was noted and said then counts.
    """
    allocated, requested, text = facts.allocated, facts.requested, facts.message
    if facts.report is not None:
        last = facts.report.attempts[-1] if facts.report.attempts else {}
        allocated = last.get("allocated_bytes") or facts.report.allocated or allocated
        requested = last.get("requested_bytes") or facts.report.requested_bytes or requested
        text = last.get("message") or text
    said = _BUDGET.search(text or "")
    return allocated, requested, None if said is None else int(said[1])


def _kind(
    raised: str,
    requested: int | None,
    allocated: int | None,
    reserved: int | None,
    usable: int | None,
    limit: int | None,
    total: int | None,
) -> str:
    """capacity, fragmentation, contention or host; see `prune_on_oom`."""
    if raised == "MemoryError" or raised.endswith("ArrayMemoryError"):
        return "host"
    if requested is None or allocated is None:
        return "capacity"
    need = round(allocated * 1.005) + requested  # messages round to two decimals
    if limit is not None and need > limit:
        return "capacity"
    if reserved is not None and (usable is None or need <= usable):
        # The bytes were there, in pieces.
        return "fragmentation" if reserved - allocated >= requested else "contention"
    if usable is not None:
        return "capacity" if total is None or need > total else "contention"
    whole = limit if limit is not None else total
    return "contention" if whole is not None and need <= whole else "capacity"


def run(
    objective: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pruned: type[BaseException],
    budget: int | None,
    keep: bool,
    ladder: int = 0,
) -> Outcome:
    """Calls the objective. Out-of-memory is an outcome; other errors pass untouched.

    With `keep` the error is the outcome's value, its frames cleared; so is one of the type
    `pruned`. At the return nothing of a trial that failed is alive. `ladder` is what steps in
    it may climb that do not say so themselves (a mask).
    """
    before = memory()
    outer = _C._ladder_scope(ladder)
    try:
        facts = _Facts(*_C._trial(objective, args, kwargs, pruned, judge, keep))
    finally:
        _C._ladder_scope(outer)
    value, failed = facts.value, facts.class_ not in (None, "cleared")
    baseline, peak, limit = facts.baseline, facts.peak, facts.limit
    reserved, usable, device = facts.reserved, facts.usable, facts.device
    allocated, requested, refused = _at_failure(facts)
    limit = limit if refused is None else refused
    figures = _accelerator_now(device)
    if figures is None:
        figures = before
    else:  # the window was the CPU's: its own counter has not been reset yet
        peak, limit, baseline, device = figures.peak_allocated, figures.budget, 0, (1, 0)
        allocated, reserved, usable = peak, None, None
    total = figures.total if figures.total is not None else _host_bytes()
    if budget is None:
        budget = limit if limit is not None else usable if usable else _usable(figures, total)
    kind = None
    if failed:
        release()
        kind = _kind(facts.type or "", requested, allocated, reserved, usable, limit, total)
        kind = kind if refused is None else "capacity"
        # A device's room says nothing about what failed on the host.
        kind = "contention" if kind == "host" and device[0] != 0 else kind
    else:
        now = memory().allocated
        if now is not None and baseline is not None and now > baseline:
            gc.collect()  # cycles hold what the trial left
    message = facts.message
    if facts.class_ == "cleared":
        behind = _out_of_memory_behind(value)
        if behind is not None:  # a handler by hand: the trial must not be told as one that fits
            kind, message = "capacity", behind
    needed = peak
    if failed and allocated is not None:
        needed = max(peak or 0, allocated + (requested or 0), refused or 0)
    raised = facts.class_ is not None
    return Outcome(value, raised, kind, message, facts.location, peak, needed, budget)


def _out_of_memory_behind(error: BaseException) -> str | None:
    """The text of the out-of-memory error that a TrialPruned was raised for, or None.

    In an `except` block it is the context. One in the sampler is not the trial's.
    """
    behind = error.__cause__ or error.__context__
    if behind is None or not _C.is_oom_error(behind) or in_sampler(behind):
        return None
    return str(behind)


def _usable(figures: MemoryInfo, total: int | None) -> int | None:
    if figures.free is not None and figures.reserved is not None:
        return figures.free + figures.reserved
    return total
