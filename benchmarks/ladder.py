"""How little memory is enough, and what training costs there: oomkit's ladder and others.

Four models, each with AdamW and with SGD and momentum, under byte budgets on the CPU that are
shares of the plain program's peak. First the smallest share at which three steps are
trained, by bisection; then rows in a second at some shares, beside the plain program without
a budget, in one process by turns. README.md beside this file has more. `make ladder` makes
the environment; without it, packages that are not installed are named.

Usage: python benchmarks/ladder.py [--quick] [--output benchmarks/results/ladder-cpu]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import importlib
import logging
import os
import platform
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.trial import FORK
from peers.watch import Errors, allocated
from peers.workloads import GPT, Work, adamw, images, mlp, sentences, tiny, vectors
from torch import Tensor, nn

import oomkit

GRID = 0.025  # of the plain peak: the places that bisection tries
HIGHEST = 1.1
SHARES = (1.0, 0.8, 0.6, 0.4, 0.3)
WARM, TIMED = 10, 5  # steps before the clock, and pairs of steps under it
SAME = 0.05  # of the update: parameters that differ more are another training
NOISE = 0.02  # of speeds
PATIENCE = 120  # seconds for one run
EVERYTHING = 2**50
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
CONTENDERS = [
    "plain",
    "composer_policy",
    "with_accelerate",
    "with_lightning",
    "with_torch_max_mem",
    "with_oomkit_split",
    "with_oomkit",
]


# --- what is trained ---


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def conv_net(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        *(Residual(channels) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
    )  # fmt: skip


class Words(nn.Module):
    """Most of its numbers are in a table."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.rest = mlp(width, 4 * width, 4 * width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.table(x).mean(1))


def some_words(words: int, length: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def make(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        return torch.randint(words, (rows * steps, length)), torch.randint(16, (rows * steps,))

    return make


def works(scale: float) -> list[Work]:
    steps = WARM + TIMED + 2
    wide = lambda size: max(8, int(size * scale) // 8 * 8)  # noqa: E731
    kinds: list[tuple[Any, ...]] = [
        ("GPT, 6 blocks", 8, lambda: GPT(wide(128), 4, 6, 64, 256), sentences(64, 256, 64), False),
        ("conv net", 32, lambda: conv_net(wide(32)), images(3, 32, 10), True),
        ("big MLP", 1024, lambda: mlp(64, *[wide(384)] * 6, 16), vectors(64, 16), False),
        ("embeddings", 256, lambda: Words(wide(20000), 64), some_words(wide(20000), 32), False),
    ]
    found = []
    for name, rows, net, data, coupled in kinds:
        for kind, optimizer in (("AdamW", adamw), ("SGD", momentum)):
            work = Work(f"{name}, {kind}", rows, 1.0, net, data, optimizer, steps=steps)
            work.coupled = coupled
            found.append(work)
    return found


# --- one run, in a process of its own ---


@dataclass
class Run:
    """What became of it."""

    died: str = ""
    ooms: int = 0
    peak: int = 0
    rungs: list[int] = field(default_factory=list)  # by step; oomkit alone has them
    values: Any = None  # of all parameters at the end
    pairs: list[tuple[float, float]] = field(default_factory=list)  # seconds: its step, plain's
    warm: float = 0.0  # seconds of the steps before the clock


class Beside:
    """The plain program's steps, for the clock. Made before the first limit: it is not counted."""

    def __init__(self, work: Work) -> None:
        self.work = copy.copy(work)
        self.model, self.optimizer = self.work.build()
        self.step()

    def step(self) -> float:
        begun = time.process_time()
        self.optimizer.zero_grad()
        self.work.loss(self.model, self.work.batch(0)).backward()
        self.optimizer.step()
        return time.process_time() - begun


class Follower:
    """Told of models and of data that is asked for; with `beside`, plain's steps in between."""

    def __init__(self, work: Work, run: Run, beside: Beside | None) -> None:
        self.run, self.beside, self.rows = run, beside, work.rows
        self.models: list[nn.Module] = []
        net, part = work.net, work.part
        self.restart()

        def fresh() -> nn.Module:
            self.models.clear()  # the one before must not be alive for us
            self.restart()
            return net()

        def counted(ids: Tensor) -> Any:
            self.handed += len(ids)
            return part(ids)

        work.net, work.part = fresh, counted  # type: ignore[method-assign]
        work.built = lambda model, _: self.models.append(model)
        work.restarted, work.pause, work.finished = self.restart, self.pause, self.finished

    def restart(self) -> None:
        """What was done so far was a search, or an attempt."""
        self.handed, self.since, self.begun = 0, 0, 0.0
        self.first = time.process_time()
        self.run.pairs.clear()

    def pause(self) -> None:
        """Loaders fetch a part ahead: what is timed is shifted, and as much."""
        if self.beside is None or self.handed < max(WARM * self.rows, self.since + self.rows):
            return
        begun = self.begun or self.first
        mine = (time.process_time() - begun) * self.rows / (self.handed - self.since)
        with oomkit.limit_memory(EVERYTHING, device="cpu"):
            theirs = self.beside.step()
            self.beside.optimizer.zero_grad()
        if self.begun:
            self.run.pairs.append((mine, theirs))
        else:
            self.run.warm = mine * self.handed / self.rows
        self.since, self.begun = self.handed, time.process_time()

    def finished(self, step: Any) -> None:
        self.run.rungs = [record.rung for record in step.records]


def attempt(adapter: Any, work: Work, budget: int, steps: int, timed: bool) -> Run:
    work, run = copy.copy(work), Run()
    work.steps = steps
    beside = Beside(work) if timed else None
    Errors.install()
    with oomkit.limit_memory(budget, device="cpu"):
        if allocated() != 0:
            raise AssertionError(f"{allocated()} bytes are there before the run")
        follower = Follower(work, run, beside)
        try:
            adapter.train(work)
        except Exception as error:  # whatever a contender dies of is a finding
            run.died = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        run.ooms = Errors.count
        run.peak = oomkit.memory("cpu").peak_allocated or 0
    if not run.died:
        parameters = follower.models[0].net.parameters()
        run.values = np.concatenate([p.detach().numpy().ravel() for p in parameters])
    return run


def in_child(function: Callable[..., Run], *args: Any) -> Run:
    ours, theirs = FORK.Pipe()

    def child() -> None:
        try:
            theirs.send(function(*args))
        except BaseException:
            theirs.send(RuntimeError(traceback.format_exc()))

    process = FORK.Process(target=child)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            process.kill()
            return Run(died=f"not done after {PATIENCE} s")
        found = ours.recv()
    except EOFError:
        process.join()
        return Run(died=f"the process ended with {process.exitcode}")
    finally:
        process.join()
    if isinstance(found, Exception):
        raise found
    return found


def steady_heap() -> None:
    """glibc gives memory back to the system, and takes it again, by thresholds that follow what
    was freed before: plain's step beside one contender has thousands of page faults, and none
    beside another. One heap for all."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that it takes


def serve(name: str, everything: list[Work], pipe: Connection) -> None:
    """A contender's process: its package is imported once, each run is a child of it."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    steady_heap()
    try:
        adapter = importlib.import_module(f"peers.adapters.{name}")
    except ImportError as error:
        pipe.send(error)
        return
    tiny().build()  # the first optimizer makes torch import its compiler
    gc.collect()
    gc.freeze()  # peers collect at each error: not what others imported
    pipe.send(adapter.NAME)
    parent = os.getppid()
    while True:
        while not pipe.poll(5):
            if os.getppid() != parent:
                return
        index, args = pipe.recv()
        try:
            pipe.send(in_child(attempt, adapter, everything[index], *args))
        except RuntimeError as error:
            pipe.send(error)


class Contender:
    def __init__(self, module: str, everything: list[Work]) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(module, everything, theirs))
        self.process.start()  # no daemon: it has children of its own. close() ends it
        theirs.close()
        found = self.pipe.recv()
        self.missing = isinstance(found, Exception)
        self.name = module.removeprefix("with_").replace("_", "-") if self.missing else found

    def ask(self, index: int, budget: int, steps: int, timed: bool = False) -> Run:
        self.pipe.send((index, (budget, steps, timed)))
        found = self.pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


# --- all of them ---


@dataclass
class Found:
    work: Work
    peak: int  # of the plain program
    floor: int  # parameters and their gradients
    smallest: dict[str, int | None]  # contender -> place on the grid; None: not even the highest
    other: dict[str, float]  # where parameters at the end are not plain's: by how much
    speeds: dict[float, dict[str, list[Run]]]  # share -> contender -> runs


def apart(work: Work, run: Run, reference: Run) -> float:
    """How far the parameters of both are apart, as a share of what the reference moved."""
    start = [p.detach().numpy().ravel() for p in work.new_model().net.parameters()]
    moved = np.linalg.norm(reference.values - np.concatenate(start))
    return float(np.linalg.norm(run.values - reference.values) / moved)


def smallest(contender: Contender, index: int, one: Found, reference: Run) -> None:
    """By bisection: a budget is taken to be enough if a smaller one was."""
    low, high = 0, round(HIGHEST / GRID) + 1
    last = None
    while high - low > 1:
        middle = (low + high) // 2
        run = contender.ask(index, int(middle * GRID * one.peak), 3)
        low, high = (middle, high) if run.died else (low, middle)
        last = last if run.died else run
    one.smallest[contender.name] = None if last is None else high
    if last is not None and not one.work.coupled:
        difference = apart(one.work, last, reference)
        if difference > SAME:
            one.other[contender.name] = difference


def speeds(
    contenders: list[Contender], found: list[Found], order: random.Random, timed: int
) -> None:
    """One run of each contender that gets through, in random order."""
    for index, one in enumerate(found):
        for share in SHARES:
            runs = one.speeds.setdefault(share, {})
            for contender in order.sample(contenders, len(contenders)):
                least = one.smallest[contender.name]
                before = runs.get(contender.name, [])
                if least is None or least > round(share / GRID) or any(run.died for run in before):
                    continue
                budget = int(share * one.peak)
                run = contender.ask(index, budget, WARM + timed + 2, True)
                runs.setdefault(contender.name, []).append(run)


def measure(contenders: list[Contender], everything: list[Work], options: Any) -> list[Found]:
    order, found = random.Random(0), []
    plain, there = contenders[0], [one for one in contenders if not one.missing]
    for index, work in enumerate(everything):
        reference = plain.ask(index, EVERYTHING, 3)
        size = 4 * sum(p.numel() for p in work.new_model().parameters())
        one = Found(work, reference.peak, 2 * size, {}, {}, {})
        for contender in there:
            smallest(contender, index, one, reference)
        found.append(one)
        print(f"{work.name}: {one.smallest}", file=sys.stderr)
    for turn in range(options.repetitions):
        speeds(there, found, order, 2 if options.quick else TIMED)
        print(f"repetition {turn + 1} of {options.repetitions} done", file=sys.stderr)
    return found


# --- what is shown ---


def speed(one: Found, share: float, name: str) -> float | None:
    """Rows in a second: medians of the runs, and of their pairs. Plain's own under its whole
    peak are 1: a model that was there before the limit is not quite as fast."""
    runs, own = (
        [
            statistics.median(theirs / mine for mine, theirs in run.pairs)
            for run in one.speeds.get(budget, {}).get(which, [])
            if run.pairs and not run.died
        ]
        for budget, which in ((share, name), (1.0, "plain"))
    )
    return statistics.median(runs) / statistics.median(own) if runs and own else None


def lost(runs: list[Run]) -> str:
    """What the steps before the clock took beyond as many of those under it, in plain steps."""
    found = []
    for run in runs:
        if run.pairs and not run.died:
            mine, theirs = (statistics.median(times) for times in zip(*run.pairs, strict=True))
            found.append((run.warm - WARM * mine) / theirs)
    return f"{statistics.median(found):.1f}" if found else "-"


def least_text(one: Found, name: str) -> str:
    if name not in one.smallest:
        return "-"
    place = one.smallest[name]
    text = f">{HIGHEST:.0%}" if place is None else f"{100 * place * GRID:.1f}"
    return text + ("*" if name in one.other else "")


def speed_text(one: Found, share: float, name: str) -> str:
    value = speed(one, share, name)
    return "-" if value is None else f"{100 * value:.0f}"


def tables(contenders: list[Contender], found: list[Found]) -> list[str]:
    names = [contender.name for contender in contenders]
    wide = max(len(one.work.name) for one in found) + 2
    head = "".join(f"{name:>19}" for name in names)
    lines = ["smallest budget in which three steps are trained, % of the plain program's peak", ""]
    lines.append(f"{'':{wide}}{'peak, MiB':>10}{'floor':>7}{head}")
    for one in found:
        lines.append(
            f"{one.work.name:{wide}}{one.peak / 2**20:10.1f}{100 * one.floor / one.peak:7.1f}"
            + "".join(f"{least_text(one, name):>19}" for name in names)
        )
    lines += ["", f"speed, % of the plain program's without a budget, after {WARM} steps", ""]
    lines.append(f"{'':{wide}}{'budget, %':>10}{head}{'rung':>6}{'OOMs':>6}{'lost':>6}")
    for one in found:
        for share in SHARES:
            ours = one.speeds[share].get(names[-1], [])
            rung = str(ours[-1].rungs[-1]) if ours and ours[-1].rungs else "-"
            ooms = str(ours[-1].ooms) if ours else "-"
            lines.append(
                f"{one.work.name:{wide}}{100 * share:10.0f}"
                + "".join(f"{speed_text(one, share, name):>19}" for name in names)
                + f"{rung:>6}{ooms:>6}{lost(ours):>6}"
            )
    missing = [contender.name for contender in contenders if contender.missing]
    if missing:
        lines += ["", f"not installed: {', '.join(missing)}"]
    lines += [""] + [
        f"* {one.work.name}, {name}: parameters are {value:.0%} of the update from plain's"
        for one in found
        for name, value in one.other.items()
    ]
    lines += [
        f"died after more than three steps: {one.work.name}, {share:.0%}, {name}: {run.died[:90]}"
        for one in found
        for share, runs in one.speeds.items()
        for name, some in runs.items()
        for run in some[-1:]
        if run.died
    ]
    return lines


def aims(contenders: list[Contender], found: list[Found]) -> list[str]:
    """What was wanted, and what came of it."""
    ours, lines = contenders[-1].name, [""]
    for one in found:
        if one.work.name.startswith(("GPT", "big MLP")):
            place = one.smallest[ours]
            met = place is not None and round(place * GRID, 4) <= 0.35
            lines.append(f"aim: {one.work.name} within 35 %: {'met' if met else 'NOT MET'}")
    for one in found:
        mine = speed(one, 0.6, ours)
        others = {
            contender.name: value
            for contender in contenders[:-2]
            if (value := speed(one, 0.6, contender.name)) is not None
        }
        faster = [name for name, value in others.items() if mine is None or value > mine + NOISE]
        if faster:
            lines.append(
                f"aim: no peer faster at 60 %: NOT MET, {one.work.name}: {', '.join(faster)}"
            )
    if len(lines) == 1 or "60" not in lines[-1]:
        lines.append(f"aim: no peer faster at 60 %, but for {NOISE:.0%}: met")
    return lines


def draw(contenders: list[Contender], found: list[Found], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = [contender.name for contender in contenders if not contender.missing]
    shown = [one for one in found if one.work.name.endswith("AdamW")] or found
    figure = pyplot.figure(figsize=(13, 7.5))
    grid = figure.add_gridspec(2, len(shown))
    top = figure.add_subplot(grid[0, :])
    width = 0.8 / len(there)
    for number, name in enumerate(there):
        places = [one.smallest.get(name) for one in found]
        heights = [0 if place is None else 100 * place * GRID for place in places]
        where = [place + width * (number - len(there) / 2) for place in range(len(found))]
        top.bar(where, heights, width, align="edge", color=f"C{number}", label=name, zorder=2)
    for place, one in enumerate(found):
        low = 100 * one.floor / one.peak
        label = "parameters and gradients" if place == 0 else None
        top.hlines(low, place - 0.45, place + 0.45, color="black", label=label, zorder=3)
    top.set_xticks(range(len(found)), [one.work.name for one in found], fontsize=8)
    top.set_ylabel("smallest budget, % of plain's peak")
    top.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    top.grid(axis="y", alpha=0.3)
    for column, one in enumerate(shown):
        axis = figure.add_subplot(grid[1, column])
        for number, name in enumerate(there):
            values = [(share, speed(one, share, name)) for share in SHARES]
            points = [(100 * x, 100 * y) for x, y in values if y is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", color=f"C{number}")
        axis.set_title(one.work.name, fontsize=10)
        axis.set_xlim(105, 25)
        axis.set_ylim(0, None)
        axis.set_xlabel("budget, % of plain's peak")
        axis.grid(alpha=0.3)
        if column == 0:
            axis.set_ylabel("speed, % of plain's")
    figure.text(0.01, 0.005, "missing: does not train there, or is not installed", fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{name}, {os.cpu_count()} cores, load {load} at the start; torch {torch.__version__}, "
        "one thread"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write FILE.txt and FILE.png")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the models' widths")
    parser.add_argument("--only", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--workloads", nargs="+", type=int, help="numbers, from 0")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, place = time.monotonic(), machine()
    if options.quick:
        options.repetitions, options.scale = 1, min(options.scale, 0.25)
    everything = works(options.scale)
    if options.workloads is not None:
        everything = [everything[number] for number in options.workloads]
    names = ["plain", *(name for name in CONTENDERS[1:-1] if name in options.only), "with_oomkit"]
    contenders: list[Contender] = []
    try:
        for name in names:
            contenders.append(Contender(name, everything))
        found = measure(contenders, everything, options)
    finally:
        for contender in contenders:
            contender.close()
    place += f"; speeds are medians of {options.repetitions} runs"
    lines = [place, "", *tables(contenders, found), *aims(contenders, found)]
    text = "\n".join([*lines, "", f"{time.monotonic() - started:.0f} s in all"])
    print(text)
    if options.output is not None:
        options.output.with_suffix(".txt").write_text(text + "\n")
        draw(contenders, found, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
