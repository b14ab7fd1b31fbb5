"""Running a program: plain, decorated, and with an OOM at many places; judging what came out.

No outcome is silently different. After a fault a program has the result that it states, or
said what it states, or refused with nothing changed; inside an optimizer's step also
PartialUpdate, or an error that says that the update stands.
"""

from __future__ import annotations

import logging
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers.sample import sampled
from helpers.seeds import seed_all

import oomkit

from .world import Place, Program, State, World, logger

PHASES = ("forward", "backward", "optimizer")

# Logged where a split loss can be compared with nothing: true of every program, and no fault.
ASSUMED = ("is treated as a mean over samples", "result averaged over the rows")
WHOLE = "runs with whole batches from now on"
FOUND = "two parts of a batch give the result of the whole"


@dataclass
class Run:
    """What came out of one world."""

    world: World
    state: State
    error: str | None = None
    kind: str | None = None
    """The class of the error, "committed" for an OutOfMemory after the update."""
    texts: list[str] = field(default_factory=list)
    """Warnings of oomkit and lines of its logger."""
    split: dict[int, list[int]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    """Warnings of others."""

    @property
    def said(self) -> list[str]:
        """Without the lines that tell of a new plan, and of weights."""
        known = [text for text in self.texts if FOUND not in text]
        return [text for text in known if " micro_batch=" not in text]

    @property
    def whole(self) -> str:
        """Why a split was refused, after which the whole batch has run; or nothing."""
        return "".join(text for text in self.texts if WHOLE in text)

    @property
    def found(self) -> bool:
        """Whether the proof has found weights."""
        return any(FOUND in text for text in self.texts)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or FOUND in text:
            self._lines.append(text)


@contextmanager
def lines_of(logger: logging.Logger) -> Iterator[list[str]]:
    """The warnings that are logged meanwhile, and what is said of weights that were found."""
    lines: list[str] = []
    handler = _Lines(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def run(program: Program, world: World) -> Run:
    """Everything random starts from the seed; an error ends the program and is kept as text."""
    world.caller_backward = program.caller_backward
    seed_all(world.seed)
    random.seed(world.seed)
    np.random.seed(world.seed % 2**32)
    error = kind = None
    with lines_of(logger) as lines, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program.run(world)
        except Exception as raised:
            if not world.decorate:
                raise
            notes = "".join(f" [{note}]" for note in getattr(raised, "__notes__", ()))
            error, kind = f"{raised}{notes}", type(raised).__name__
            if getattr(raised, "committed", False):
                kind = "committed"
        finally:
            world.disarm()
    done = Run(world, world.state(), error, kind, lines, world.accumulation())
    for warning in caught:
        if issubclass(warning.category, oomkit.OomkitWarning):
            done.texts.append(str(warning.message))
        else:
            done.foreign.append(f"{warning.category.__name__}: {warning.message}")
    return done


def places(program: Program, number: int) -> list[Place]:
    """Two fifths in forward, two in backward, one in the updates, evenly over the calls."""
    found: dict[str, list[Place]] = {}
    for phase in PHASES:
        counted = run(program, World(decorate=True, count=phase))
        seen = counted.world.seen
        found[phase] = [Place(c, phase, n + 1) for c in sorted(seen) for n in range(seen[c])]
    total = sum(len(f) for f in found.values())
    assert total > 0, "no allocation at all"
    shares = {"forward": 2 * number // 5, "backward": 2 * number // 5, "optimizer": number // 5}
    spare = sum(max(0, shares[p] - len(found[p])) for p in PHASES)
    chosen: list[Place] = []
    for phase in PHASES:
        room = len(found[phase]) - shares[phase]
        more = min(spare, max(0, room))
        spare -= more
        count = min(len(found[phase]), shares[phase] + more)
        last = len(found[phase]) - 1
        steps = range(count)
        chosen += [found[phase][i * last // max(1, count - 1) if i else 0] for i in steps]
    return chosen


def difference(a: State, b: State) -> tuple[float, str]:
    """The largest difference of two states, and where; infinite where they cannot compare."""
    if a.keys() != b.keys():
        return float("inf"), f"only one has {sorted(a.keys() ^ b.keys())[:4]}"
    worst = (0.0, "")
    for key in a:
        value = _distance(a[key], b[key])
        if value > worst[0]:
            worst = (value, key)
    return worst


def _distance(x: Any, y: Any) -> float:
    if x is None or y is None:
        return 0.0 if x is y else float("inf")
    if isinstance(x, (str, bytes, bool)):
        return 0.0 if x == y else float("inf")
    left, right = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if left.shape != right.shape:
        return float("inf")
    if left.size == 0 or np.array_equal(left, right, equal_nan=True):
        return 0.0
    worst = float(np.max(np.abs(left - right)))
    return worst if np.isfinite(worst) else float("inf")


def compare(a: Run, b: Run, *, random_state: bool) -> tuple[float, str]:
    """States and losses of two whole runs."""
    streams = () if random_state else ("rng", "random", "numpy")
    first = {k: v for k, v in a.state.items() if k not in streams}
    second = {k: v for k, v in b.state.items() if k not in streams}
    first["losses"], second["losses"] = a.world.losses, b.world.losses
    return difference(first, second)


@dataclass
class Report:
    """One line of the table."""

    program: Program
    healthy: str = ""
    places: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, where: object, what: str) -> None:
        first = what.partition("\n")[0]  # an OutOfMemory goes on to tell who holds the memory
        self.failures.append(f"{self.program.name}, {where}: {first}")


def sweep(program: Program, number: int, keep: int | None = None) -> Report:
    """The whole check of one program: `number` places, or a sample of them."""
    report = Report(program)
    plain = run(program, World())
    assert plain.error is None, plain.error
    healthy = run(program, World(decorate=True))
    if healthy.error is not None:
        report.fail("without OOM", f"raised {healthy.error}")
        return report
    worst, where = compare(plain, healthy, random_state=True)
    if worst != 0.0:
        report.fail("without OOM", f"not bitwise the plain program: {where} by {worst:.3g}")
    report.healthy = "equal, bit for bit" if worst == 0.0 else "different"
    if healthy.said:
        report.fail("without OOM", f"said without need: {healthy.said}")
    references: dict[str, Run] = {}
    for place in sampled(places(program, number), keep or number):
        failed = run(program, World(decorate=True, place=place))
        if failed.world.fired != 1:
            report.fail(place, f"the fault struck {failed.world.fired} times")
            continue
        _judge(report, place, plain, failed, references)
    return report


def _judge(
    report: Report, place: Place, plain: Run, failed: Run, references: dict[str, Run]
) -> None:
    program = report.program
    if set(failed.foreign) - set(plain.foreign):
        report.fail(place, f"warned: {failed.foreign}")
    if failed.kind in ("PartialUpdate", "committed"):
        _judge_update(report, place, plain, failed)
    elif failed.kind is not None:
        if program.outcome != "refused":
            report.fail(place, f"raised {failed.kind}: {failed.error}")
            return
        report.places["refused"] += 1
        _judge_refusal(report, place, failed)
    elif failed.whole:
        _judge_whole(report, place, plain, failed)
    elif not failed.split:
        # Nothing had moved when the update failed: it was repeated, the batch not split.
        report.places["repeated"] += 1
        worst, where = compare(plain, failed, random_state=True)
        if worst != 0.0:
            report.fail(place, f"not split, but not the plain program: {where} by {worst:.3g}")
    elif program.outcome == "refused" and not program.or_equal:
        report.fail(place, "was split where it should have been refused")
    else:
        report.places["replayed"] += 1
        _judge_replay(report, place, plain, failed, references)


def _judge_update(report: Report, place: Place, plain: Run, failed: Run) -> None:
    report.places[failed.kind or ""] += 1
    if failed.kind == "PartialUpdate":
        if place.phase != "optimizer" and not _moved(failed):
            report.fail(place, f"PartialUpdate, but nothing was updated: {failed.error}")
        return
    # The update stands, exactly once; what the step did after it is the program's to judge.
    after = plain.world.after[failed.world.calls - 1]
    updated = {key: value for key, value in after.items() if ".updated" in key}
    assert updated, "keep() an optimizer"
    worst, where = difference(updated, {key: failed.state.get(key) for key in updated})
    if worst > report.program.tolerance and report.program.compare == "whole":
        report.fail(place, f"committed, but {where} differs by {worst:.3g}")


def _moved(failed: Run) -> bool:
    """Did the step change more than gradients and random streams?"""

    def kept(state: State) -> State:
        return {k: v for k, v in state.items() if k[0].isdigit() and not k.endswith(".grad")}

    return difference(kept(failed.world.before), kept(failed.state))[0] > 0.0


def _judge_whole(report: Report, place: Place, plain: Run, failed: Run) -> None:
    """A split was refused, and the whole batch has run: earlier calls may have been split."""
    report.places["whole"] += 1
    if report.program.outcome != "refused":
        report.fail(place, f"ran whole without need: {failed.whole}")
        return
    assert report.program.says is not None
    # Of an error of the step's own the notes tell more, which the line of the log has not.
    if not re.search(f"{report.program.says}|in micro-batches of", failed.whole, re.DOTALL):
        report.fail(place, f"ran whole with other words: {failed.whole}")
    worst, where = compare(plain, failed, random_state=True)
    if worst > (report.program.tolerance if failed.split else 0.0):
        report.fail(place, f"ran whole, but not as the plain program: {where} by {worst:.3g}")


def _judge_refusal(report: Report, place: Place, failed: Run) -> None:
    assert report.program.says is not None
    words = f"{report.program.says}|gradients cannot be restored"
    if not re.search(words, failed.error or "", re.DOTALL):
        report.fail(place, f"refused with other words: {failed.error}")
    now, before = dict(failed.state), failed.world.before
    told = re.search("cannot be restored|contain a part of this batch", failed.error or "")
    for key in [k for k in now if k.endswith(".grad")]:
        # What the step's own zero_grad() cleared stays cleared.
        if told or now[key] is None or not np.any(now[key]):
            now[key] = before.get(key)
    worst, where = difference(before, now)
    if worst != 0.0:
        report.fail(place, f"refused, but {where} changed by {worst:.3g}")


def _judge_replay(
    report: Report, place: Place, plain: Run, failed: Run, references: dict[str, Run]
) -> None:
    program = report.program
    if failed.found and not program.found:
        report.fail(place, f"found weights: {failed.texts}")
    key = repr((failed.split, failed.found))
    if key not in references and not program.by_proof:
        # What tests force is not proven: it is told what the proof has found.
        told = program.found if failed.found else {}
        references[key] = run(program, World(decorate=True, slices=failed.split, more=told))
    worst = 0.0
    if not program.by_proof:
        same = references[key]
        if same.error is not None:
            report.fail(place, f"the same slices, undisturbed, raised: {same.error}")
            return
        # Gradients that were there before the step are added to in another order.
        allowed = program.tolerance if program.accumulates else 0.0
        worst, where = compare(same, failed, random_state=True)
        if worst > allowed:
            report.fail(place, f"not the same slices undisturbed: {where} by {worst:.3g}")
    if program.compare == "whole":
        worst, where = compare(plain, failed, random_state=False)
        if worst > program.tolerance:
            report.fail(place, f"not the whole batch: {where} by {worst:.3g}")
    report.worst = max(report.worst, worst)
    if program.outcome == "said":
        assert program.says is not None
        if not any(re.search(program.says, text, re.DOTALL) for text in failed.said):
            report.fail(place, f"did not say {program.says!r}, only {failed.said}")
    elif [text for text in failed.said if not any(words in text for words in ASSUMED)]:
        report.fail(place, f"said without need: {failed.said}")
