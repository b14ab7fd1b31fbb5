"""All faults of a body, each in a process of its own.

python -m nomemory.sweep [--stride N] [--first N] BODY ...
"""

from __future__ import annotations

import argparse
import compileall
import functools
import gc
import importlib.util
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.collector import hide_modules

from . import witness
from .body import OURS, Body
from .fault import NEVER, Fault, Outcome, suffer
from .fork import CALM, SWEEP, apart
from .listed import listed
from .lost import loses

PROVE = {
    "import oomkit": 61, "inside, call, backward": 301, "errors": 1, "classifying": 1,
    "figures": 1, "decorating": 3, "reporting": 5, "guarding": 7, "a healthy call": 7,
    "sizes in a checkpoint": 5, "trials": 7, "searching": 7, "reserving": 7,
    "remembered sizes": 47, "loops": 23, "": 113,
}  # fmt: skip
"""Strides of `make prove`: "" is of all others, recoveries of some 85,000 allocations each."""

MOST = 2**22
"""Allocations of a call; more are none of ours."""


@dataclass
class Found:
    cases: int = 0
    total: int = 0
    """Allocations of the undisturbed call."""
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def leaf(body: Body, fault: Fault) -> Outcome:
    outcome = Outcome()
    with body.armed():
        box = list(suffer(body.call, fault, outcome))
    if box[1] is not None:
        box[1].__traceback__ = None
    body.after(outcome, box)
    return outcome


def count(body: Body, stride: int = 1) -> int:
    """How many allocations the undisturbed call makes, or up to 2 % more or half a stride. A
    fault beyond them is none, and to know it takes a run for each guess."""

    def reached(nth: int) -> bool:
        answer = apart(lambda: _probe(body, Fault(nth, once=False)), body.limit)
        return bool(answer.died) or answer.value

    low, high = 0, max(64, stride // 2)
    while reached(high):
        low, high = high, high * 4
        if high > MOST:  # a call that hangs or dies at each of them would be counted for ever
            raise RuntimeError(f"{body.name}: no end after {low} allocations")
    while high - low > max(1 + high // 50, stride // 2):
        middle = (low + high) // 2
        if reached(middle):
            low = middle
        else:
            high = middle
    return high


def _probe(body: Body, fault: Fault) -> bool:
    outcome = Outcome()
    with body.armed():
        suffer(body.call, fault, outcome)
    return outcome.reached


def verdict(
    body: Body, answer: Any, still: Any, places: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """(what came of it in a word, what is wrong with it)."""
    if answer.died:
        known = listed(answer.died, places)
        return (known, []) if known else ("crash", [answer.died])
    outcome: Outcome = answer.value
    wrong = list(outcome.wrong)
    kind = outcome.error or "success"
    if outcome.error and outcome.error not in OURS:
        known = listed(f"{outcome.error}: {outcome.text}", places)
        if known:
            kind = known
        else:
            wrong.append(f"{outcome.error}: {outcome.text} at {' < '.join(outcome.where[::-1])}")
    for line in outcome.unraisable:
        if not line.startswith(tuple(OURS)) and not listed(line, places):
            wrong.append(f"unraisable {line}")
    wrong += body.judge(outcome)
    if (
        outcome.error
        and still is not None
        and isinstance(outcome.values, dict)
        and "alive" in outcome.values
    ):
        more = outcome.values["alive"] - still["alive"]
        # What a step knows of its last call may hold a tensor or three (the last whole loss).
        if (sum(more.values()) > more["Tensor"] or more["Tensor"] > 3) and not loses(places):
            wrong.append(f"still alive: {dict(more)}")
    return kind, wrong


def cases(body: Body, total: int, stride: int, first: int) -> Iterator[Fault]:
    for nth in range(first, total + 1, stride):
        yield Fault(nth)
    lasting = range(first + stride // 2, total + 1, stride * body.rarer)
    for nth in lasting if body.lasting else ():
        yield Fault(nth, once=False)


def sweep(body: Body, stride: int = 1, first: int = 1, least: int = 0) -> Found:
    """In this process, which has to be one that nothing else needs.

    Args:
        stride: of the allocations that fail.
        first: the first of them.
        least: so many fail all the same, where there are so many.
    """
    logging.getLogger("oomkit").addHandler(logging.NullHandler())
    logging.getLogger("oomkit").propagate = False
    begin = time.perf_counter()
    compile_sources()
    try:
        found = _sweep(body, stride, first, least)
    finally:
        body.finish()
    found.seconds = time.perf_counter() - begin
    return found


def _sweep(body: Body, stride: int, first: int, least: int) -> Found:
    found = Found()
    witness.open_room()
    body.prepare()
    gc.collect()
    gc.freeze()
    calm = apart(lambda: leaf(body, Fault(NEVER)), CALM)
    still = None
    if not calm.died and isinstance(calm.value.values, dict):
        still = calm.value.values
    kind, wrong = verdict(body, calm, None)
    found.failures += [f"{body.name}: without a fault: {line}" for line in wrong]
    found.total = body.total or count(body, stride)
    stride = min(stride, max(1, found.total // least)) if least else stride
    for fault in cases(body, found.total, stride, first):
        answer = apart(lambda fault=fault: leaf(body, fault), body.limit)
        places = witness.places()
        kind, wrong = verdict(body, answer, still, places)
        wrong = [f"{line}; refused: {' | '.join(places[:4])}" for line in wrong]
        found.cases += 1
        found.kinds[kind] += 1
        found.failures += [f"{body.name}: {fault}: {kind}: {line}" for line in wrong]
    return found


@functools.cache
def compile_sources() -> None:
    """So that what is imported without memory is not compiled: CPython 3.11's compiler gives
    objects back twice that it had no memory for (an allocation of makecode() in compile.c
    that fails, found with gdb), and a call crashes later in whatever comes then."""
    spec = importlib.util.find_spec("oomkit")
    assert spec is not None and spec.origin is not None
    compileall.compile_dir(Path(spec.origin).parent, quiet=2)


def load() -> None:
    """Once for all bodies: they have nothing else in common."""
    import torch._dynamo  # torch.optim imports it at the first update

    import oomkit  # noqa: F401

    torch.set_num_threads(1)  # other threads do not come along into a child
    hide_modules()


def main() -> int:
    from .bodies import BODIES

    parser = argparse.ArgumentParser(prog="nomemory.sweep", description=__doc__)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--strides", type=json.loads, default={}, help="of some: {name: stride}")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("body", nargs="*")
    arguments = parser.parse_args()
    bad = 0
    compile_sources()  # not again in each process of a body
    for body in BODIES:
        if arguments.body and not any(part in body.name for part in arguments.body):
            continue
        stride = arguments.strides.get(body.name, arguments.stride)
        first = 1 + (arguments.first - 1) % stride
        if body.loaded:
            load()
        answer = apart(lambda body=body, a=stride, b=first: sweep(body, a, b), SWEEP)
        if answer.died:
            answer.value = Found(failures=[answer.died])
        found: Found = answer.value
        bad += len(found.failures)
        if arguments.json:
            print(json.dumps({"name": body.name} | vars(found)), flush=True)
            continue
        told = ", ".join(f"{n} {kind}" for kind, n in found.kinds.most_common())
        print(
            f"{body.name}: {found.cases} of {found.total} x 2, {told}, "
            f"{len(found.failures)} failures, {found.seconds:.1f} s",
            flush=True,
        )
        if arguments.brief:
            alike: dict[str, list[str]] = {}
            for line in found.failures:
                alike.setdefault(re.sub(r"\d+", "#", line), []).append(line)
            for lines in alike.values():
                print(f"  {len(lines):5}", lines[0][:700], flush=True)
            continue
        for line in found.failures[:200]:
            print("   ", line[-900:], flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
