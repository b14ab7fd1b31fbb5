"""Tools for testing programs against running out of memory, without running out of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from . import _C

__all__ = ["force_slices", "inject_oom"]

_PHASES = {"forward": 0, "backward": 1, "optimizer": 2, "recovery": 3}


def _check_count(name: str, value: object, more: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"inject_oom() expected {name} to be an int of at least 1{more}, "
            f"got {type(value).__name__!r}"
            f"{_C.see('options')}"
        )
    if not 1 <= value < 2**63:
        raise ValueError(
            f"inject_oom() expected {name} to be an int of at least 1{more}, got {value}"
            f"{_C.see('options')}"
        )
    return value


class inject_oom:
    """inject_oom(*, nth=1, times=1, min_bytes=1, phase=None, then=None)

    Make the n-th matching allocation of the `with` block fail as if memory had run out.

    The failure is a real `torch.OutOfMemoryError` from the CPU allocator. Allocations
    without bytes are never counted; those that oomkit makes for itself (copies, marks,
    what it needs to roll back) belong to the phase "recovery", whenever they are made, and
    count only where that phase is asked for.

    Parameters
    ----------
    nth : int
        Which matching allocation fails first, counted from 1.
    times : int or None
        How many in a row fail from there; None: all that follow.
    min_bytes : int
        Smaller requests neither fail nor count.
    phase : {"forward", "backward", "optimizer", "recovery"}, optional
        Only allocations of this phase count. What happens outside a decorated call is
        "forward", except inside the `step` of an optimizer. Each thread has a phase of its
        own; one that knows nothing of phases (autograd's) has that of the thread it works for.
    then : inject_oom, optional
        What is to fail after that: its count begins when the last of these failures has
        happened. At most four in a row.

    Attributes
    ----------
    fired : int
        Allocations that were made to fail, by this one and those that follow it.
    seen : int
        Allocations that match the one in force, the failed ones included.
    """

    def __init__(
        self,
        *,
        nth: int = 1,
        times: int | None = 1,
        min_bytes: int = 1,
        phase: str | None = None,
        then: inject_oom | None = None,
    ) -> None:
        self._nth = _check_count("nth", nth)
        self._times = 0 if times is None else _check_count("times", times, " or None")
        self._min_bytes = _check_count("min_bytes", min_bytes)
        if phase is not None and not (isinstance(phase, str) and phase in _PHASES):
            raise ValueError(
                "inject_oom() expected phase to be 'forward', 'backward', 'optimizer', "
                f"'recovery' or None, got {phase!r}"
                f"{_C.see('options')}"
            )
        self._phases = 0 if phase is None else 1 << _PHASES[phase]
        if then is not None and not isinstance(then, inject_oom):
            raise TypeError(
                f"inject_oom() expected then to be another inject_oom, got {type(then).__name__!r}"
                f"{_C.see('options')}"
            )
        self._then = then
        self._open = False
        self._counts = (0, 0)
        self._hooks: list[RemovableHandle] = []
        self._before_step: list[tuple[int, int]] = []
        self._phase_at_entry = 0

    @property
    def fired(self) -> int:
        return (_C.fault_stats()[1]) if self._open else self._counts[1]

    @property
    def seen(self) -> int:
        return (_C.fault_stats()[0]) if self._open else self._counts[0]

    def __enter__(self) -> inject_oom:
        # Without it, "backward" would be seen only once a decorated step had run.
        _C._watch_backward()
        schedules = []
        stage: inject_oom | None = self
        while stage is not None:
            schedules.append((stage._nth, stage._times, stage._min_bytes, stage._phases))
            stage = stage._then
        hooks: list[RemovableHandle] = []
        try:
            # Rather than the interception of a decorated call: they see every optimizer.
            hooks.append(register_optimizer_step_pre_hook(self._step_begins))
            hooks.append(register_optimizer_step_post_hook(self._step_ends))
            _C.own_hooks(len(hooks))
            _C.fault_arm(*schedules)  # the last that can fail: nothing would disarm it
        except BaseException:
            for hook in hooks:
                hook.remove()
            raise
        self._open = True
        self._hooks = hooks
        self._before_step.clear()
        self._phase_at_entry = _C.phase_set(_PHASES["forward"])
        _C.phase_set(self._phase_at_entry)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What needs memory comes last: without any, nothing stays armed.
        _C.fault_disarm()
        self._open = False
        # A step that failed has no end: its phase would stay.
        _C.phase_set(self._phase_at_entry)
        try:
            self._hooks[0].remove()
        finally:
            self._hooks[1].remove()
        self._hooks = []
        seen, fired, _ = _C.fault_stats()
        self._counts = (seen, fired)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        previous = _C.phase_set(_PHASES["optimizer"])
        self._before_step.append((id(optimizer), previous))

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Entries above this optimizer's own belong to steps that failed.
        while self._before_step:
            owner, previous = self._before_step.pop()
            _C.phase_set(previous)
            if owner == id(optimizer):
                return


class force_slices:
    """force_slices(lengths)

    Make every decorated call of the `with` block run over exactly these slices.

    The undisturbed plan that a recovered call is compared with: the same slices give the
    same result, bit for bit.

    Parameters
    ----------
    lengths : sequence of int
        Rows of each micro-batch, in order; they must add up to the batch.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        sizes = tuple(lengths)
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(
                f"force_slices() expected a sequence of ints of at least 1, got {lengths!r}"
                f"{_C.see('options')}"
            )
        self._lengths = sizes
        self._before: list[tuple[int, ...] | None] = []

    def __enter__(self) -> force_slices:
        self._before.append(_C._force_slices(self._lengths))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _C._force_slices(self._before.pop())
