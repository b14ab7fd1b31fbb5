"""What agreement costs: single votes beside gloo's and a store's, and steps with it.

Ranks are processes of this machine, over gloo. With `--machines 2+2` they vote as those of several
do, the ranks of each in memory and then their first ones over gloo, but with no network between.
Figures are rank 0's, in microseconds. With more ranks than idle cores they say how the system gives
out cores: the load is printed with them. `--blocks 60` measures healthy steps alone, in so many
blocks of 10 or 20, bare and decorated in turn: it tells what is less than single steps differ by.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks import world as worlds
from oomkit.testing import inject_oom


def _timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of single calls."""
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1000)
    return _middle(times)


WAYS = {
    "Shared": "shared memory",
    "Nodes": "memory and leaders' gloo",
    "Gloo": "gloo of its own",
}


def _votes(count: int) -> dict[str, tuple[float, float]]:
    world = worlds.meet()
    one, four = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    store: Any = dist.distributed_c10d._get_default_store()
    rows: dict[str, Callable[[], object]] = {
        f"oomkit's vote, {WAYS[world.way]}": lambda: world.vote(0, 1),
        "gloo all_reduce, one int64": lambda: dist.all_reduce(one, op=dist.ReduceOp.MAX),
        "gloo all_reduce, four int64": lambda: dist.all_reduce(four, op=dist.ReduceOp.MAX),
        "gloo barrier": dist.barrier,
        "TCPStore add": lambda: store.add("counter", 1),
    }
    if world.way == "Nodes":  # what a collective of fully_shard() costs there besides
        others = world.others
        own = others.nodes.index(others.here)
        rows["a word to other machines, in the store"] = lambda: others.write_step(
            own, 0, (-2, 0), 0
        )
        rows["a look at the word of another machine"] = lambda: others.read_step(1 - own, 0)
    found = {}
    for name, call in rows.items():
        _timed(call, count // 10)
        dist.barrier()
        found[name] = _timed(call, count)
    vote, gloo = list(rows.values())[:2]
    ratios = [_timed(vote, 1)[0] / _timed(gloo, 1)[0] for _ in range(count)]
    found["oomkit's vote / gloo all_reduce, pair by pair"] = _middle(ratios)
    return found


LAYERS = 8
ROW = 20
"""Steps that nothing but their own collectives holds together."""


def _model(kind: str, width: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers)
    if "DDP" in kind:
        model = DistributedDataParallel(model)
    else:
        for layer in layers[::2]:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


Call = Callable[[torch.Tensor, torch.Tensor], None]


def _both(kind: str, width: int) -> tuple[Call, Call, Any, tuple[torch.Tensor, torch.Tensor]]:
    """A step, bare and decorated, which have run; its model, and a batch."""
    model, optimizer = _model(kind, width)
    x, y = torch.randn(64, width), torch.randn(64, width)

    def bare(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    step = oomkit.auto_batch(bare, verify=False, reduction="mean")
    for _ in range(20):
        bare(x, y)
        step(x, y)
    return bare, step, model, (x, y)


def _in_blocks(width: int, steps: int, count: int) -> dict[str, tuple[float, float]]:
    """Microseconds of a healthy step of DDP, in blocks of so many steps: of the bare one, and what
    the decorated one takes more, from block to block. Each with its spread: half the range in
    which its median is, 19 times of 20 (by ranks, whatever the distribution)."""
    bare, step, _, (x, y) = _both("DDP", width)
    taken: dict[Call, list[float]] = {bare: [], step: []}
    for turn in range(count):
        for call in (bare, step) if turn % 2 == 0 else (step, bare):
            dist.barrier()
            block = _timed(lambda call=call: [call(x, y) for _ in range(steps)], 1)[0]
            taken[call].append(block / steps)
    more = [ours - theirs for theirs, ours in zip(taken[bare], taken[step], strict=True)]
    return {
        f"DDP step of width {width}, blocks of {steps}, bare": _with_spread(taken[bare]),
        f"DDP step of width {width}, decorated - bare": _with_spread(more),
    }


def _with_spread(values: list[float]) -> tuple[float, float]:
    values, count = sorted(values), len(values)
    low = max(0, int(count / 2 - 0.98 * count**0.5))
    return statistics.median(values), (values[count - 1 - low] - values[low]) / 2


def _healthy(kind: str, width: int, count: int) -> tuple[dict[str, tuple[float, float]], Call, Any]:
    """A step, bare and decorated in turn: by the clock, and by the processor's time of its own
    thread, with what it spins for others. Rows, the step, its model."""
    bare, step, model, (x, y) = _both(kind, width)
    times: dict[str, list[float]] = {"bare": [], "decorated": []}
    processor: dict[str, list[float]] = {"bare": [], "decorated": []}
    for turn in range(count):
        order = [("bare", bare), ("decorated", step)]
        for name, call in order if turn % 2 == 0 else order[::-1]:
            dist.barrier()
            begin = time.thread_time_ns()
            times[name] += [_timed(lambda call=call: call(x, y), 1)[0]]
            processor[name] += [(time.thread_time_ns() - begin) / 1000]
    found = {f"{kind} step, {name}": _middle(values) for name, values in times.items()}
    rows: list[float] = []
    for _ in range(max(5, count // ROW)):
        took = []
        for call in (bare, step):
            dist.barrier()
            took.append(_timed(lambda call=call: [call(x, y) for _ in range(ROW)], 1)[0])
        rows.append(took[1] / took[0])
    found[f"{kind} step, decorated / bare, {ROW} in a row"] = _middle(rows)
    ratios = [ours / bare for bare, ours in zip(*times.values(), strict=True)]
    found[f"{kind} step, decorated / bare, pair by pair"] = _middle(ratios)
    more = [ours - bare for bare, ours in zip(*processor.values(), strict=True)]
    found[f"{kind} step, bare, processor"] = _middle(processor["bare"])
    found[f"{kind} step, decorated - bare, processor"] = _middle(more)
    return found, bare, model


def _middle(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    values = sorted(values)
    return statistics.median(values), values[int(len(values) * 0.99)]


def _steps(kind: str, count: int) -> dict[str, tuple[float, float]]:
    """A healthy step, and one that fails once on the last rank."""
    found, bare, model = _healthy(kind, 256, count)
    step = oomkit.auto_batch(bare, verify=False, reduction="mean")
    x, y = torch.randn(64, 256), torch.randn(64, 256)
    step(x, y)
    failing = []
    for _ in range(max(3, min(count // 20, 10))):
        fresh = oomkit.auto_batch(
            lambda x, y: bare(x, y), verify=False, reduction="mean", model=model
        )
        fresh(x, y)
        dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            with inject_oom(nth=4, phase="backward"):
                failing.append(_timed(lambda f=fresh: f(x, y), 1)[0])
        else:
            failing.append(_timed(lambda f=fresh: f(x, y), 1)[0])
    found[f"{kind} step, one rank fails in its backward"] = statistics.median(failing), max(failing)
    return found | _exchanges(kind, lambda: bare(x, y), lambda: step(x, y))


def _exchanges(
    kind: str, bare: Callable[[], object], step: Callable[[], object]
) -> dict[str, tuple[float, float]]:
    """What ranks exchange in a healthy step of one micro-batch: in all, and beside torch's own."""
    group: Any = dist.group.WORLD
    counts = {"vote": 0, "tell": 0}
    plain = {name: getattr(worlds.World, name) for name in counts}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain[name](*args, **kwargs)

        return call

    made = []
    for call in (bare, step):
        call()  # buckets are rebuilt after an error
        for name in counts:
            setattr(worlds.World, name, counted(name))
        before = group._get_sequence_number_for_group()
        call()
        made.append(group._get_sequence_number_for_group() - before)
        for name in counts:
            setattr(worlds.World, name, plain[name])
    # Composer, as its source says: two all-reduces for each check, after each forward of a model
    # of DDP; over FSDP before each forward and backward of a sharded module, and after the
    # backward of each other one, in its first batches and after an error.
    checks = 1 if kind == "DDP" else 2 * (LAYERS + 1) + LAYERS
    return {
        f"{kind}, collectives added to torch's {made[0]}": (made[1] - made[0], 0),
        f"{kind}, votes": (counts["vote"], 0),
        f"{kind}, words to the others": (counts["tell"], 0),
        f"{kind}, collectives that Composer would add": (2 * checks, 0),
    }


STEPS = {"DDP": 10, "FSDP2": 20}
"""Kinds of models, and for one step of each: how many votes."""


def _all(world: int, count: int, kinds: list[str]) -> dict[str, tuple[float, float]]:
    """Votes and steps."""
    found = _votes(count)
    for kind in kinds:
        found |= _steps(kind, max(20, count // STEPS[kind]))
    if world <= (os.cpu_count() or 1):
        found |= _healthy("wide DDP", 1024, max(20, count // 40))[0]
    return found


BLOCKS = {256: 20, 512: 20, 1024: 10}
"""Steps of a block, by the width of the model."""


def _rank(rank: int, folder: str, machines: list[int], given: argparse.Namespace) -> None:
    world = sum(machines)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    patience = datetime.timedelta(seconds=120)
    port = int(Path(folder, "port").read_text())
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    of = [f"machine {number}" for number, ranks in enumerate(machines) for _ in range(ranks)]
    if len(machines) > 1:
        worlds._node = lambda: of[rank]
    if given.blocks > 0:
        found = {}
        for width, steps in BLOCKS.items():
            found |= _in_blocks(width, steps, given.blocks)
    else:
        found = _all(world, given.count, given.kinds)
    if rank == 0:
        lines = [f"{n:50s} {median:10.2f} {late:10.2f}" for n, (median, late) in found.items()]
        Path(folder, "table").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--machines", nargs="*", default=["2+2", "1+1"], help="ranks of each")
    parser.add_argument("--kinds", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--count", type=int, default=2000, help="votes of each kind")
    parser.add_argument(
        "--blocks", type=int, default=0, help="healthy steps alone, in so many blocks of each kind"
    )
    parser.add_argument("--say", action="append", default=[], help="a line for the table")
    parser.add_argument("--output", type=Path, help="write the table there, too")
    given = parser.parse_args()
    lines = [
        *given.say,
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
    ]
    late = "spread" if given.blocks > 0 else "p99"
    for text in [*map(str, given.ranks), *given.machines]:
        machines = [int(ranks) for ranks in text.split("+")]
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "port").write_text(str(_free_port()))
            processes.spawn(_rank, (folder, machines, given), nprocs=sum(machines))
            of = " + ".join(map(str, machines))
            title = f"{of} ranks (load before it: {load:.1f})"
            lines += ["", f"{title:50s} {'median':>10s} {late:>10s}"]
            lines.append(Path(folder, "table").read_text())
    text = "\n".join(lines)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
