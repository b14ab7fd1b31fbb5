"""What becomes of a program whose batch is split, beside its undecorated twin.

A call is `exact` (state and result are those of the twin, up to rounding), `refused` (a
SplitError or an oomkit.OutOfMemory, and everything is as at entry), `named` (refused, all but
gradients as at entry, and the error says that these have to be cleared), or `raised` (an error
of the program itself, everything as at entry: loud, and nothing is lost). What must not be is
`silent` (another result, whatever was warned of), `late` (refused when the update of the whole
batch had been made) and `changed` (an error, and the state is neither one).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers.seeds import seed_all
from properties.compare import difference
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import oomkit
from oomkit.testing import force_slices, inject_oom

SEED = 20240607
CALLS = 3
NEVER = 2**60
LOUD = ("exact", "refused", "named", "raised")
NAMED = ("call zero_grad() before you continue", "contain a part of this batch")

Batch = tuple[Any, ...]
Step = Callable[..., Any]


def _call(step: Step, batch: Batch) -> Any:
    return step(*batch)


@dataclass
class World:
    """What a program has made: two of them are made alike, and one is decorated."""

    step: Step
    keep: Sequence[Any]
    """What is compared: modules, optimizers, schedulers, tensors."""
    batch: Callable[[int], Batch]
    """The arguments of the n-th call, made anew each time."""
    drive: Callable[[Step, Batch], Any] = _call
    """One call as the caller makes it, with what the caller does after it."""
    options: dict[str, Any] = field(default_factory=dict)
    clears: bool = True
    """The step, or its caller, clears gradients: a call that is refused may leave them so."""
    hand: Callable[[Batch, list[int]], Any] | None = None
    """The same slices by hand, where these decide: what a split call is compared with."""
    raises: bool = False
    """A micro-batch alone may be an error to the program."""
    remembered: Callable[[], Any] | None = None
    """Plain state of the program, compared where a call is exact: a refusal does not undo it."""
    tolerance: float = 1e-9


@dataclass(frozen=True)
class Trouble:
    """Why batches are split: an error in a call, or micro-batches from the start."""

    name: str
    phase: str | None = None
    call: int = 1
    share: float = 0.0
    """Which of the phase's allocations in that call, from the first (0) to the last (1)."""
    steps: int = 1
    """0: one row at a time."""
    slices: tuple[int, ...] = ()
    """Each call runs over exactly these."""


@dataclass
class Verdict:
    kind: str
    told: str = ""
    split: bool = False
    """Were there micro-batches in any call?"""
    fired: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.told}" if self.told else self.kind


def _gradient(p: torch.Tensor) -> torch.Tensor | None:
    if p.grad is None:
        return None
    return p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach()


def state_of(world: World) -> dict[str, Any]:
    state: dict[str, Any] = {"gradients": [], "kept": []}
    for thing in world.keep:
        if isinstance(thing, nn.Module):
            parameters = list(thing.parameters())
            state["gradients"] += [_gradient(p) for p in parameters]
            state["kept"].append([p.detach() for p in parameters])
            state["kept"].append(list(thing.buffers()))
            state["kept"].append([p.requires_grad for p in parameters])
            state["kept"].append([m.training for m in thing.modules()])
        elif isinstance(thing, nn.Parameter):
            state["gradients"].append(_gradient(thing))
            state["kept"].append(thing.detach())
        elif hasattr(thing, "state_dict"):
            state["kept"].append(thing.state_dict())
        else:
            state["kept"].append(thing)
    return copy.deepcopy(state)


def _all_of(world: World) -> list[Any]:
    return [state_of(world), world.remembered() if world.remembered is not None else None]


def _with_backward(fn: Step) -> Step:
    """What backward=True stands for, without the decorator."""

    def step(*args: Any, **kwargs: Any) -> Any:
        loss = fn(*args, **kwargs)
        loss.backward()
        return loss.detach()

    return step


class _Armed:
    """The decorated step; a fault counts inside it, that of a backward in its caller, too."""

    def __init__(
        self, world: World, step: Any, fault: inject_oom | None, phase: str | None
    ) -> None:
        self._world, self._step, self._fault, self._phase = world, step, fault, phase
        self._open = ExitStack()
        # Of when it has returned: an error of its loss's backward() leaves this.
        self.left: tuple[dict[str, Any], torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        if self._phase == "backward":
            self.left = state_of(self._world), torch.get_rng_state()
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._fault is None:
            return self._step(*args, **kwargs)
        fault, self._fault = self._fault, None
        if self._phase == "backward":
            self._open.enter_context(fault)
            return self._step(*args, **kwargs)
        with fault:
            return self._step(*args, **kwargs)

    def close(self) -> None:
        self._open.close()


@contextmanager
def _seeded(call: int) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning is no refusal
        seed_all(SEED + call)
        yield


def _drive(
    world: World,
    step: Any,
    call: int,
    fault: inject_oom | None,
    trouble: Trouble,
    entries: list[tuple[dict[str, Any], torch.Tensor]] | None = None,
) -> Any:
    """One call; states that an error may leave besides that of the entry go to `entries`."""
    batch = world.batch(call)
    armed = _Armed(world, step, fault, trouble.phase)
    try:
        if not trouble.slices:
            return world.drive(armed, batch)
        with force_slices(trouble.slices):
            return world.drive(armed, batch)
    finally:
        armed.close()
        if entries is not None and armed.left is not None:
            entries.append(armed.left)


def _decorated(world: World, trouble: Trouble, rows: int, options: dict[str, Any]) -> Any:
    chosen = {**world.options, **options}
    if trouble.steps != 1:
        chosen["accumulation_steps"] = trouble.steps or rows
    return oomkit.auto_batch(world.step, **chosen)


def _fault(make: Callable[[], World], trouble: Trouble, options: dict[str, Any]) -> int:
    """Which allocation that is, of those of the healthy call before its update; 0: of none."""
    world, before = make(), []
    step = _decorated(world, trouble, 0, options)
    for call in range(trouble.call):
        with _seeded(call):
            _drive(world, step, call, None, trouble)
    counting = inject_oom(nth=NEVER, phase=trouble.phase)
    hook = register_optimizer_step_pre_hook(lambda *_: before.append(counting.seen))
    try:
        with _seeded(trouble.call):
            _drive(world, step, trouble.call, counting, trouble)
    finally:
        hook.remove()
    count = before[0] if before and before[0] else counting.seen
    return 1 + round(trouble.share * (count - 1)) if count else 0


def _lengths(step: Any) -> list[int]:
    """The slices of the last call."""
    record = step.records[-1]
    n, k = record.batch_size or 0, record.accumulation_steps
    return [n // k + (i < n % k) for i in range(k)] if k > 1 else []


def _twin(world: World, call: int, lengths: list[int]) -> Any:
    """The same call without oomkit."""
    with _seeded(call):
        if lengths and world.hand is not None:
            return world.hand(world.batch(call), lengths)
        whole = _with_backward(world.step) if world.options.get("backward") else world.step
        return world.drive(whole, world.batch(call))


def _moved(
    mine: World, now: dict[str, Any], entry: dict[str, Any], random: torch.Tensor
) -> str | None:
    """What is not as at entry."""
    asked = copy.deepcopy(entry)
    for i, grad in enumerate(now["gradients"]):
        if mine.clears and (grad is None or not grad.any()):
            asked["gradients"][i] = grad
    found = difference(now, asked, True, "state")
    if found is None and not torch.equal(torch.get_rng_state(), random):
        found = "the random state is not that of the entry"
    return found


def _ended(
    mine: World,
    entries: list[tuple[dict[str, Any], torch.Tensor]],
    error: Exception,
    twin: World,
    call: int,
) -> Verdict:
    """The verdict on a call that raised; the first of `entries` is the call's own."""
    ours = isinstance(error, oomkit.SplitError | oomkit.OutOfMemory)
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    now = state_of(mine)
    found, *others = [_moved(mine, now, entry, numbers) for entry, numbers in entries]
    if None in others:
        found = None
    if found is None:
        return Verdict("refused" if ours else "raised", told)
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if ours and any(words in text for words in NAMED):
        found = difference(now["kept"], entries[0][0]["kept"], True, "state")
        if found is None:
            return Verdict("named", told)
    try:
        _twin(twin, call, [])
    except Exception as failed:  # what the program does alone is no verdict on splitting it
        raise AssertionError("the undecorated program failed") from failed
    after = difference(now["kept"], state_of(twin)["kept"], False, "state", mine.tolerance)
    if after is None and ours:
        return Verdict("late", told)
    return Verdict("changed", f"{found}, after {told}")


def judge(
    make: Callable[[], World], trouble: Trouble, rows: int = 0, calls: int = CALLS, **options: Any
) -> Verdict:
    """The first call that is not exact decides; `options` are the decorator's."""
    nth = _fault(make, trouble, options) if trouble.phase is not None else 0
    mine, twin = make(), make()
    step = _decorated(mine, trouble, rows, options)
    verdict = Verdict("exact")
    for call in range(calls):
        struck = nth > 0 and call == trouble.call
        fault = inject_oom(nth=nth, phase=trouble.phase) if struck else None
        start = torch.Generator().manual_seed(SEED + call).get_state()
        entries = [(state_of(mine), start)]
        try:
            with _seeded(call):
                got = _drive(mine, step, call, fault, trouble, entries)
        except Exception as error:
            ended = _ended(mine, entries, error, twin, call)
            ended.fired = fault.fired if fault else 0
            ended.split = verdict.split
            return ended
        verdict.fired += fault.fired if fault else 0
        lengths = _lengths(step)
        verdict.split |= any(record.accumulation_steps > 1 for record in step.records)
        want = _twin(twin, call, lengths)
        found = difference(got, want, False, "returned", mine.tolerance) or difference(
            _all_of(mine), _all_of(twin), False, "state", mine.tolerance
        )
        if found is not None:
            verdict.kind, verdict.told = "silent", f"call {call}, {lengths}: {found}"
            return verdict
    return verdict
