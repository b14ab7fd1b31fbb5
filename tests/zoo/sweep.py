"""A fault at each allocation of a model's forward and backward, and what becomes of it."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import oomkit

from .base import SEED
from .case import CALLS, Case, Place, Run, run
from .model import ROWS, Expected, Model

PHASES = ("forward", "backward")

TOLERANCE = 1e-12

EXHAUSTED = Expected(
    "OutOfMemory",
    r"as before the (step|backward\(\))",
    "every further allocation fails: no micro-batch is small enough",
    kind="exhausted",
)
NO_COPIES = Expected(
    "OutOfMemory",
    "gradients cannot be restored|contain a part of this batch",
    "gradients at entry have moved, nobody has a copy, and what they hold is not exactly what "
    "the replay would add",
    kind="no copies",
    always=False,
)


@dataclass
class Outcome:
    """What was found of one model in some cases."""

    model: str
    faults: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """recovered, again (the few bytes were asked for once more), committed, or Expected.kind."""
    worst: float = 0.0
    """Largest difference where rounding is allowed."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def expected_of(model: Model, case: Case, phase: str) -> list[Expected]:
    """Outcomes other than recovery; none of them: it has to be recovered."""
    stated = model.expected(case, phase)
    expected = [] if stated is None else [stated]
    if case.times == "always":
        expected.append(EXHAUSTED)
    # One interrupted backward of the whole batch can be set aside: not one that drew numbers
    # or moved statistics, none that unscale_() or clipping has gone over, and none for which
    # there is no replay. A split one leaves the caller's gradients alone until its last
    # backward is done.
    whole = case.k == 1 and (model.moves or case.times == "always")
    if case.gradients == "off" and (whole or phase == "forward"):
        expected.append(NO_COPIES)
    return expected


def count(model: Model, case: Case, phase: str) -> int:
    if model.places is None:
        run(model, case)  # the first one in a process fills caches
    counted = run(model, case, count=phase)
    if counted.error is not None:
        raise AssertionError(f"{model.name}, {case}: undisturbed: {counted.text}")
    return counted.seen


def chosen(model: Model, case: Case, number: int | None) -> list[Place]:
    """All places, or so many of each phase, drawn by the seed."""
    number = model.places if number is None else number
    draw = random.Random(f"{SEED} {model.name} {case}")
    places = []
    for phase in PHASES:
        all_of_phase = [Place(phase, n + 1) for n in range(count(model, case, phase))]
        if number is not None and number < len(all_of_phase):
            all_of_phase = sorted(draw.sample(all_of_phase, number), key=lambda p: p.nth)
        places += all_of_phase
    return places


def sweep(model: Model, cases: list[Case], number: int | None = None) -> Outcome:
    begin = time.perf_counter()
    outcome = Outcome(model.name)
    oomkit._C._prove(not model.coupled)
    try:
        _sweep(model, cases, number, outcome)
    finally:
        oomkit._C._prove(True)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _sweep(model: Model, cases: list[Case], number: int | None, outcome: Outcome) -> None:
    for case in cases:
        references: dict[str, Run] = {}
        for place in chosen(model, case, number):
            outcome.faults += 1
            try:
                kind, worst = judge(model, case, place, references)
            except AssertionError as wrong:
                outcome.failures.append(f"{model.name} ({case}) {place.phase} {place.nth}: {wrong}")
            else:
                outcome.kinds[kind] += 1
                outcome.worst = max(outcome.worst, worst)


def judge(model: Model, case: Case, place: Place, references: dict[str, Run]) -> tuple[str, float]:
    """(what became of it, difference); AssertionError where that is not what is expected."""
    got = run(model, case, place)
    assert got.fired, f"the fault did not strike ({got.seen} allocations)"
    assert not got.foreign, f"warned: {got.foreign}"
    expected = expected_of(model, case, place.phase)
    if got.error is None:
        wanted = [e.error for e in expected if e.always]
        assert not wanted or not got.ooms, f"recovered where {wanted} is expected"
        worst = recovered(model, case, got, references)
        return ("recovered" if got.ooms else "again"), worst
    if getattr(got.error, "committed", False):
        committed(model, case, got, references)
        return "committed", 0.0
    kind = type(got.error).__name__
    told = f"{kind}: {got.text}"
    met = [e for e in expected if kind == e.error and re.search(e.says, got.text, re.DOTALL)]
    assert met, told
    not_begun(got, re.search(NO_COPIES.says, got.text) is not None)
    return met[-1].kind, 0.0


def undisturbed(
    model: Model, case: Case, slices: dict[int, list[int]], references: dict[str, Run]
) -> Run:
    key = repr(slices)
    if key not in references:
        # Over given slices k does not matter; calls that are not named run whole.
        references[key] = run(model, replace(case, k=1), slices=slices)
        assert references[key].error is None, references[key].text
        assert references[key].slices == slices, "the reference has other slices"
    return references[key]


def recovered(model: Model, case: Case, got: Run, references: dict[str, Run]) -> float:
    want = undisturbed(model, case, got.slices, references)
    first = want
    if case.returned and got.whole and got.ooms:
        # Nothing had failed when the loss was handed out: it is that of the first plan.
        planned = {call: s for call, s in got.slices.items() if call < case.call}
        if case.k > 1:
            planned[case.call] = [ROWS // case.k] * case.k
        first = undisturbed(model, case, planned, references)
    worst = 0.0
    for call in range(CALLS):
        wanted = dict(want.states[call + 1])
        if call == case.call:
            wanted["loss"] = first.states[call + 1]["loss"]
        worst = max(worst, compare(case, wanted, got.states[call + 1], f"after call {call}"))
    return worst


def committed(model: Model, case: Case, got: Run, references: dict[str, Run]) -> None:
    """The update stands, whole and once."""
    assert isinstance(got.error, oomkit.OutOfMemory)
    want = undisturbed(model, case, got.slices, references)
    ignore = ("loss", "scaler")
    a, b = dict(want.states[case.call + 1]), dict(got.states[-1])
    for key in ignore:
        a.pop(key, None), b.pop(key, None)
    compare(case, a, b, "after the update")


def not_begun(got: Run, told: bool) -> None:
    """Everything is as before the call, or as between it and its caller's backward; of
    gradients it may be `told` that they are not."""
    before, after = dict(got.middle or got.states[-2]), dict(got.states[-1])
    for state in (before, after):
        state.pop("loss")
    if told:
        moved = [k for k in before if k.startswith("gradient") and before[k] != after[k]]
        assert moved, "refused for gradients that are as they were"
    for key in before:
        # What the step's own zero_grad() had cleared stays cleared.
        if key.startswith("gradient") and (after[key] is None or told):
            before[key] = after[key]
    differing = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    assert not differing, f"refused, but changed: {sorted(differing)[:4]}"


def compare(case: Case, want: dict[str, Any], got: dict[str, Any], when: str) -> float:
    """Bit for bit; without copies of the gradients at entry within TOLERANCE."""
    differing = sorted(k for k in want.keys() | got.keys() if want.get(k) != got.get(k))
    if not differing:
        return 0.0
    distances = {k: distance(want.get(k), got.get(k)) for k in differing}
    worst = max(distances.values())
    told = ", ".join(f"{k} by {v:.2g}" for k, v in list(distances.items())[:4])
    allowed = TOLERANCE if case.gradients == "off" else 0.0
    assert worst <= allowed and worst == worst and "rng" not in distances, f"{when}: {told}"
    return worst


def distance(a: Any, b: Any) -> float:
    if not (isinstance(a, tuple) and isinstance(b, tuple)) or a[:2] != b[:2]:
        return float("inf")
    if a[0] == "sparse":
        return distance(a[2], b[2]) if a[1] == b[1] else float("inf")
    kind = {"torch.complex64": "c8", "torch.complex128": "c16", "torch.float64": "f8"}
    dtype = kind.get(a[0], "f4" if a[0] == "torch.float32" else "u1")
    x, y = np.frombuffer(a[2], dtype), np.frombuffer(b[2], dtype)
    worst = float(np.max(np.abs(x.astype("c16") - y.astype("c16"))))
    return max(worst, 5e-324)
