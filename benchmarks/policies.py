"""Which micro-batch do policies arrive at, and what does the way there cost?

The planner is oomkit's own C code (csrc/core/plan.c, slices.c and knowledge.c, built
here into a library and called as it is); the others are re-implementations of what well-known
packages do, in a few lines each. They all train against the same models of memory:

    a first micro-batch of n rows needs   max(c + a n, c + g)
    a later one                           c + a n + g + t

above a baseline, in MiB, with g the gradients (they accumulate from the first to the
later ones) and t what is there twice while one of them is added to: of the gradient of
the largest parameter all or nothing or a part, for activations are being freed by then.
The constants of the large models were fitted to allocation traces of one training step
(parameters and AdamW's state are the baseline), but for t, which is assumed; those marked
"here" are measured in this run under the CPU budget allocator, with t as if it were 0.

Usage: python benchmarks/policies.py [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import oomkit

CORE = Path(__file__).resolve().parents[1] / "csrc" / "core"
MIB = 2**20
UNKNOWN = 2**64 - 1
FIRST, LATER = 0, 1
CALLS = 12


@dataclass(frozen=True)
class Model:
    name: str
    baseline: float  # MiB
    constant: float
    row: float
    gradients: float
    scale: int = 1  # of the batches: rows of an MLP are small
    largest: float = 0.0  # gradient of one parameter, as the planner is told
    twice: float = 0.0  # as much of it comes on top of a later micro-batch's peak

    def peak(self, role: int, rows: int) -> float:
        activations = self.constant + self.row * rows
        if role == LATER:
            return activations + self.gradients + self.twice
        return max(activations, self.constant + self.gradients)

    def fits(self, role: int, rows: int, budget: float) -> bool:
        return self.baseline + self.peak(role, rows) <= budget


MODELS = [
    Model("GPT-2 124M, T=512", 1893, 17, 586.2, 631, largest=147),
    Model("GPT-2 124M, T=1024, explicit attention", 1893, 5, 1747, 631, largest=147),
    Model("ResNet-50, 224 x 224", 293, 28, 82.7, 98, largest=7.8),
    Model("large MLP", 30, 1, 0.05, 30, 16, largest=16, twice=8),
    Model("fine-tuning, gradients rival activations", 3000, 10, 40, 1500, largest=250),
]
BATCHES = [32, 64, 128, 256]
SHARES = [0.9, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07]  # of the whole batch's activations


def measured_models() -> Iterable[Model]:
    """Small models, fitted to two whole steps and one in two micro-batches."""
    torch.set_num_threads(1)
    kinds: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
        (
            "MLP, here",
            lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)),
            (64,),
        ),
        (
            "convolutions, here",
            lambda: nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            ),
            (3, 16, 16),
        ),
    ]
    for name, make, shape in kinds:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def train(x: torch.Tensor, model: nn.Module = model, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        peaks = []
        for rows in (256, 512):
            step = oomkit.auto_batch(train, reduction="mean")
            optimizer.zero_grad()
            step(torch.ones(rows, *shape))
            record = step.records[-1]
            peaks.append((record.peak_allocated - record.baseline) / MIB)
        each = [p.numel() * p.element_size() / MIB for p in model.parameters()]
        gradients = sum(each)
        slope = (peaks[1] - peaks[0]) / 256
        scale = 16 if name.startswith("MLP") else 1
        constant = max(peaks[0] - 256 * slope, 0.0)
        yield Model(name, 2 * gradients, constant, slope, gradients, scale, max(each))


# --- oomkit's planner, as it is ---


class Point(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_int64), ("bytes", ctypes.c_uint64)]


class Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("largest_ok", "smallest_failed")),
        *((name, ctypes.c_uint64) for name in ("ok_room", "failed_room")),
        ("points", Point * 4),
        ("count", ctypes.c_int64),
    ]


class Knowledge(ctypes.Structure):
    _fields_ = [
        ("roles", Sizes * 2),
        *(
            (name, ctypes.c_uint32)
            for name in ("successes", "failures", "missed", "fooled", "late")
        ),
        *((name, ctypes.c_uint32) for name in ("healthy", "retried")),
        ("batch", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("optimizer_bytes", ctypes.c_uint64),
        ("borrowed", ctypes.c_int32),
        ("recalled", ctypes.c_int32),
        ("margin", ctypes.c_double),
    ]


class Measured(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("rows", ctypes.c_int64 * 2),
        ("bytes", ctypes.c_uint64 * 2),
        *(
            (name, ctypes.c_uint64)
            for name in ("optimizer_bytes", "baseline_bytes", "budget_bytes", "gradient_bytes")
        ),
        ("alloc_retries", ctypes.c_uint32),
    ]


class Plan(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("batch", "accumulation", "first", "multiple_of")
    ] + [("rung", ctypes.c_uint32)]


class Request(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "min_micro_batch", "multiple_of", "start_accumulation")
        ),
        *((name, ctypes.c_uint64) for name in ("baseline_bytes", "budget_bytes", "gradient_bytes")),
        ("largest_gradient", ctypes.c_uint64),
        ("may_be_whole", ctypes.c_int32),
        ("margin", ctypes.c_double),
    ]


def build(folder: str) -> ctypes.CDLL:
    compiler = shutil.which("cc") or sysconfig.get_config_var("CC").split()[0]
    library = Path(folder) / "planner.so"
    sources = [str(CORE / name) for name in ("plan.c", "slices.c", "knowledge.c")]
    subprocess.run(
        [compiler, "-std=c11", "-O2", "-shared", "-fPIC", *sources, "-o", str(library)], check=True
    )
    planner = ctypes.CDLL(str(library))
    planner.oomkit_plan_count.restype = ctypes.c_int64
    return planner


# --- training against a model of memory ---


@dataclass
class Course:
    """What a policy did in all calls of one case."""

    ooms: int = 0
    attempts: int = 0
    wasted_rows: float = 0.0
    k: int = 0
    micro_batch: int = 0


def attempt(model: Model, budget: float, sizes: list[int]) -> tuple[int, int] | None:
    """Where the micro-batches stop to fit: (index, rows), or None."""
    for index, rows in enumerate(sizes):
        if not model.fits(LATER if index else FIRST, rows, budget):
            return index, rows
    return None


def equal(batch: int, micro_batch: int) -> list[int]:
    return [min(micro_batch, batch - start) for start in range(0, batch, micro_batch)]


def note(course: Course, sizes: list[int], failed: tuple[int, int] | None) -> None:
    course.attempts += 1
    if failed is not None:
        course.ooms += 1
        course.wasted_rows += sum(sizes[: failed[0]]) + 0.5 * failed[1]


def by_sizes(
    model: Model, budget: float, batch: int, smaller: Callable[[int], int]
) -> Course | None:
    """Peers: one micro-batch size, made smaller until it fits, and kept."""
    course, rows = Course(), batch
    for _ in range(CALLS):
        while True:
            sizes = equal(batch, rows)
            failed = attempt(model, budget, sizes)
            note(course, sizes, failed)
            if failed is None:
                break
            if rows == 1:
                return None
            rows = max(1, smaller(rows))
    course.k, course.micro_batch = len(sizes), max(sizes)
    return course


def halving(model: Model, budget: float, batch: int) -> Course | None:
    return by_sizes(model, budget, batch, lambda rows: rows // 2)


def nine_tenths(model: Model, budget: float, batch: int) -> Course | None:
    return by_sizes(model, budget, batch, lambda rows: int(rows * 0.9))


def bisection(model: Model, budget: float, batch: int) -> Course | None:
    """Doubles from 2 rows to the first failure, bisects, and keeps 95 % of the result."""
    course, good, bad, rows = Course(), 0, None, 2
    while bad is None or bad - good > 1:
        rows = min(rows, batch)
        failed = attempt(model, budget, [rows, rows])
        note(course, [rows, rows], failed)
        if failed is None:
            good = rows
            if rows == batch:
                break
        else:
            bad = rows
        rows = good * 2 if bad is None else (good + bad) // 2
        if rows < 1:
            return None
    rest = by_sizes(model, budget, batch, lambda rows: rows // 2) if good == 0 else None
    if rest is not None:
        return rest
    sizes = equal(batch, max(1, int(good * 0.95)))
    for _ in range(CALLS):
        note(course, sizes, attempt(model, budget, sizes))
    course.k, course.micro_batch = len(sizes), max(sizes)
    return course


class Oomkit:
    def __init__(self, planner: ctypes.CDLL) -> None:
        self.planner = planner

    def sizes(self, plan: Plan) -> list[int]:
        found = []
        for index in range(self.planner.oomkit_plan_count(ctypes.byref(plan))):
            start, length = ctypes.c_int64(), ctypes.c_int64()
            self.planner.oomkit_plan_slice(
                ctypes.byref(plan), ctypes.c_int64(index), ctypes.byref(start), ctypes.byref(length)
            )
            found.append(length.value)
        return found

    def call(
        self, known: Knowledge, model: Model, budget: float, batch: int, course: Course
    ) -> bool:
        base, limit = int(model.baseline * MIB), int(budget * MIB)
        gradients = int(model.gradients * MIB)
        request = Request(batch, 1, 1, 1, base, limit, gradients, int(model.largest * MIB), 1, 0.0)
        plan, reason = Plan(), ctypes.c_int()
        pointers = (ctypes.byref(known), ctypes.byref(request))
        assert not self.planner.oomkit_plan_choose(
            *pointers, ctypes.byref(plan), ctypes.byref(reason)
        )
        while True:
            sizes = self.sizes(plan)
            failed = attempt(model, budget, sizes)
            note(course, sizes, failed)
            if failed is None:
                break
            room = (ctypes.c_uint64(base), ctypes.c_uint64(limit), ctypes.c_uint64(gradients))
            if failed[0] > 0:
                peak = ctypes.c_uint64(int(model.peak(FIRST, sizes[0]) * MIB))
                self.planner.oomkit_know_measured(
                    pointers[0], FIRST, ctypes.c_int64(sizes[0]), peak, *room
                )
            role = LATER if failed[0] else FIRST
            self.planner.oomkit_know_failed(pointers[0], role, ctypes.c_int64(failed[1]), *room)
            if self.planner.oomkit_plan_next(
                *pointers, ctypes.byref(plan), ctypes.byref(plan), ctypes.byref(reason)
            ):
                return False
        later = max(sizes[1:], default=0)
        measured = Measured(batch, len(sizes), budget_bytes=limit, baseline_bytes=base)
        measured.gradient_bytes = gradients
        measured.rows[:] = [sizes[0], later]
        measured.bytes[:] = [
            int(model.peak(FIRST, sizes[0]) * MIB),
            int(model.peak(LATER, later) * MIB) if later else 0,
        ]
        self.planner.oomkit_know_worked(pointers[0], ctypes.byref(measured))
        course.k, course.micro_batch = len(sizes), max(sizes)
        return True

    def run(self, model: Model, budget: float, batch: int) -> Course | None:
        course, known = Course(), Knowledge()
        for _ in range(CALLS):
            if not self.call(known, model, budget, batch, course):
                return None
        return course

    def remembered(self, model: Model, budget: float, batch: int) -> Course | None:
        """What a second run does that begins with the knowledge of the first."""
        known = Knowledge()
        for _ in range(CALLS):
            if not self.call(known, model, budget, batch, Course()):
                return None
        course = Course()
        for _ in range(CALLS):
            self.call(known, model, budget, batch, course)
        return course


# --- the table ---


def best(model: Model, budget: float, batch: int) -> tuple[int, int]:
    """(k*, n*): the fewest micro-batches that fit, with a larger first one where that
    helps, and the largest later one. (0, 0) where not even one row fits."""
    first = max((n for n in range(batch + 1) if n and model.fits(FIRST, n, budget)), default=0)
    later = max((n for n in range(batch + 1) if n and model.fits(LATER, n, budget)), default=0)
    if first == batch:
        return 1, batch
    return (1 + math.ceil((batch - first) / later), later) if first and later else (0, 0)


def cases(models: list[Model]) -> list[tuple[Model, float, int]]:
    found = []
    for model, rows, share in itertools.product(models, BATCHES, SHARES):
        batch = rows * model.scale
        budget = model.baseline + model.gradients + model.constant + model.row * batch * share
        if best(model, budget, batch)[0] > 1:
            found.append((model, budget, batch))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table there too")
    options = parser.parse_args()
    models = [*MODELS, *measured_models()]
    chosen = cases(models)
    lines = [
        f"{len(chosen)} cases ({len(models)} models x budgets x batches), {CALLS} calls each",
        "",
    ]
    lines += [
        f"{model.name}: baseline {model.baseline:.1f}, c {model.constant:.2f}, a {model.row:.4f}, "
        f"g {model.gradients:.1f}, of one parameter {model.largest:.1f} MiB "
        f"({model.twice:.0f} of them twice)"
        for model in models
    ]
    lines += [
        "",
        f"{'policy':28}{'OOMs':>7}{'most':>6}{'attempts':>10}{'wasted':>9}{'n/n*':>7}"
        f"{'k = k*':>8}{'none':>6}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        planner = Oomkit(build(folder))
        policies: dict[str, Callable[[Model, float, int], Course | None]] = {
            "halving": halving,
            "x 0.9": nine_tenths,
            "doubling, bisection, 95 %": bisection,
            "oomkit": planner.run,
            "oomkit, remembered": planner.remembered,
        }
        for name, policy in policies.items():
            lines.append(row(name, policy, chosen))
    lines += [
        "",
        "OOMs, attempts: mean of a case (most: of one case), wasted: rows of failed attempts",
        "as a share of one call's; n/n*: micro-batch reached over the largest that fits later;",
        "k = k*: cases that end with the fewest micro-batches possible; none: cases given up.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


def row(
    name: str,
    policy: Callable[[Model, float, int], Course | None],
    chosen: list[tuple[Model, float, int]],
) -> str:
    courses, hits, ratios, wasted, none = [], 0, [], [], 0
    for model, budget, batch in chosen:
        course = policy(model, budget, batch)
        if course is None:
            none += 1
            continue
        k, largest = best(model, budget, batch)
        hits += course.k <= k
        ratios.append(min(1.0, course.micro_batch / largest))
        wasted.append(course.wasted_rows / batch)
        courses.append(course)
    return (
        f"{name:28}{statistics.mean(c.ooms for c in courses):7.2f}"
        f"{max(c.ooms for c in courses):6d}{statistics.mean(c.attempts for c in courses):10.2f}"
        f"{statistics.mean(wasted):9.2f}{statistics.mean(ratios):7.2f}"
        f"{hits / len(chosen):8.1%}{none:6d}"
    )


if __name__ == "__main__":
    sys.exit(main())
