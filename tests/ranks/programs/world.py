"""What ranks see of each other when one of them is different, slow, or gone."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.messages import message_of
from helpers.seen import Seen
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks import ways
from oomkit._ranks import world as worlds
from oomkit.testing import inject_oom

from ..launch import Rank


def _paths_made() -> list[str]:
    """Of memory that this rank makes from now on; other jobs of the machine have theirs."""
    paths: list[str] = []
    make = worlds.World._make

    def made(self: worlds.World, size: int, epoch: int) -> Any:
        path, buffer = make(self, size, epoch)
        paths.append(path)
        return path, buffer

    worlds.World._make = made  # type: ignore[method-assign]
    return paths


def votes(rank: Rank) -> dict[str, Any]:
    """Words of all ranks, round by round, and how each was carried."""
    rank.votes_by()
    rank.join()
    made = _paths_made()
    world = worlds.meet()
    given = [(7 * (rank.rank + 1) * n) % 1000003 % 2 for n in range(200)]
    said = [world.vote(word, n) for n, word in enumerate(given)]
    expected = [
        max((7 * (other + 1) * n) % 1000003 % 2 for other in range(rank.world)) for n in range(200)
    ]
    left = [path for path in made if os.path.exists(path)]
    numbers = [[n + 0.5, *range(other + n % 3)] for n in range(9) for other in range(rank.world)]
    own = numbers[rank.rank :: rank.world]
    told = [row for n, row in enumerate(own) for row in world.gather(row, n)]
    return {"gathered": told == numbers, "right": said == expected, "way": world.way, "left": left}


def fatal(rank: Rank) -> str:
    """One rank cannot go on, and is in its next call when the others are told why."""
    rank.votes_by()
    rank.join()
    world = worlds.meet()
    world.vote(ways.FINE, 1)
    store: Any = dist.distributed_c10d._get_default_store()
    others = [f"told {other}" for other in range(rank.world) if other != rank.arguments["victim"]]
    if rank.rank == rank.arguments["victim"]:
        world.give_up("ValueError: no such label", 2)
        world.begin(False)
        store.set("begun", "")
        store.wait(others)
        return "gave up"
    store.wait(["begun"])
    try:
        world.vote(ways.FINE, 2)
    except oomkit.RankError as error:
        return f"{error.rank}: {error}"
    finally:
        store.set(f"told {rank.rank}", "")
        store.wait(others)
    return "nothing"


def different_places(rank: Rank) -> str:
    rank.votes_by()
    rank.join()
    world = worlds.meet()
    try:
        world.vote(ways.FINE, 5 + rank.rank)
    except oomkit.RankError as error:
        return message_of(error)
    return "nothing"


def of_a_way(rank: Rank) -> list[Any]:
    """What each of these programs finds, in a process group of its own."""
    found = []
    last = rank.world - 1
    for program, given in (
        (votes, {}),
        (different_places, {}),
        (fatal, {"victim": 0}),
        (fatal, {"victim": last}),
    ):
        one = Rank(rank.rank, rank.world, f"{rank.store}-{len(found)}", {**rank.arguments, **given})
        found.append(program(one))
        dist.destroy_process_group()
    return found


def comes_late(rank: Rank) -> list[int]:
    """Rank 2 of another machine makes a step, which rank 0 finds while it waits for rank 1 of its
    own: that one comes when it has been found, or when it is about to be told of here."""
    rank.votes_by()
    rank.join(20.0)
    world, when, made = worlds.meet(), rank.arguments["when"], []
    way: Any = world._way
    store: Any = dist.distributed_c10d._get_default_store()
    plain_read, plain_over = world.others.read_step, way._over

    def lets_come() -> None:
        """Rank 1 votes, and has the time to leave the round."""
        if rank.rank == 0 and not store.check(["may come"]):
            store.set("may come", "")
            while way.within.own.tag(1) != 1:
                time.sleep(0.001)
            with contextlib.suppress(Exception):
                store.wait(["left"], datetime.timedelta(seconds=1.0))

    def read_step(machine: int, place: int) -> Any:
        found = plain_read(machine, place)
        if when == "found" and found[0] == way.steps._at():
            lets_come()
        return found

    def over(*given: Any) -> Any:
        if rank.rank == 1:
            store.set("left", "")
        return plain_over(*given)

    def follow(step: int) -> None:
        if when == "told":
            lets_come()
        world.tell(step, ways.NEVER)
        dist.all_reduce(torch.zeros(1))
        made.append(step)

    world.others.read_step, way._over = read_step, over  # type: ignore[method-assign]
    world.begin(True)
    if rank.rank == 1:
        store.wait(["may come"])
    if rank.rank == 2:
        follow(7)
    world.vote(ways.FINE, 1, follow)
    return made


def one_is_missed(rank: Rank) -> dict[str, Any]:
    """Some votes in, one rank ends, and the others wait for it."""
    rank.votes_by()
    rank.join(rank.arguments["patience"])
    world = worlds.meet()
    for n in range(20):
        world.vote(ways.FINE, n)
    begin = time.monotonic()
    if rank.rank == rank.arguments["victim"]:
        die(rank.arguments["how"])
    try:
        world.vote(ways.FINE, 20)
    except oomkit.RankError as error:
        found = {"rank": error.rank, "text": str(error), "seconds": time.monotonic() - begin}
    else:
        found = {"rank": None, "text": "nothing", "seconds": 0.0}
    # Nobody learns of it by the end of a rank that was told before.
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"told {rank.rank}", "")
    store.wait([f"told {o}" for o in range(rank.world) if o != rank.arguments["victim"]])
    return found


def again_in_one_process(rank: Rank) -> list[bool]:
    """A process group that is destroyed and made anew has a world of its own."""
    import datetime

    found = []
    for turn in range(2):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rank.store}-{turn}",
            rank=rank.rank,
            world_size=rank.world,
            timeout=datetime.timedelta(seconds=60),
        )
        world = worlds.meet()
        found.append(world.vote(turn + rank.rank % 2, 1) == turn + 1)
        dist.destroy_process_group()
    return found


def started_again(rank: Rank) -> list[bool]:
    """As `torchrun` starts a job again: the store has what was said in the first start."""
    found, old = [], {}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for start in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
        worlds._generations = itertools.count()
        one = Rank(rank.rank, rank.world, f"{rank.store}-{start}", {})
        one.join(10.0)
        store: Any = dist.distributed_c10d._get_default_store()
        for key, value in old.items():
            store.set(key, value)
        dist.barrier()
        world = worlds.meet()
        found.append(world.vote(start + rank.rank % 2, 1) == start + 1)
        key = world._key
        names = [f"{key}/0/memory", *(f"{key}/{r}" for r in range(2))]
        names += [f"{key}/{r}/mapped" for r in range(2)]
        old = {name: store.get(name) for name in names} if rank.rank == 0 else {}
        dist.barrier()
        dist.destroy_process_group()
    return [*found, world.shared]


def _step() -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False, reduction="mean")
    def step(x: torch.Tensor, y: torch.Tensor, hurt: Any = None) -> None:
        optimizer.zero_grad()
        if hurt is not None:
            hurt("forward")
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if hurt is not None:
            hurt("update")
        optimizer.step()

    return step


def _meets(rank: Rank) -> None:
    rank.votes_by()
    rank.join(rank.arguments.get("patience", 60.0))
    warnings.simplefilter("ignore")


def another_version(rank: Rank) -> None:
    """One rank has another oomkit, another protocol of it, or another torch."""
    _meets(rank)
    if rank.rank == 1 and rank.arguments["of"] == "protocol":
        worlds.PROTOCOL += 1
    elif rank.rank == 1:
        {"oomkit": oomkit, "torch": torch}[rank.arguments["of"]].__version__ = "0.0.7"
    _step()(torch.randn(4, 4), torch.randn(4, 2))


def another_job(rank: Rank) -> None:
    """One rank is of another job of `torchrun`, with the same store."""
    _meets(rank)
    os.environ["TORCHELASTIC_RUN_ID"] = f"job {rank.rank}"
    _step()(torch.randn(4, 4), torch.randn(4, 2))


def another_world(rank: Rank) -> None:
    """The last process is a job of one rank, begun with the store of this one of two: where it
    tells of itself its rank 0 takes the place of that of the other job."""
    met, stands, failed = (Path(f"{rank.store}-{name}") for name in ("met", "stands", "failed"))
    if rank.rank == 2:
        _wait_for(met)
        one = Rank(0, 1, rank.store, {})
        _meets(one)
        _step()(torch.randn(4, 4), torch.randn(4, 2))
        stands.touch()
        _wait_for(failed)
        return
    one = Rank(rank.rank, 2, rank.store, {})
    _meets(one)
    step = _step()
    if rank.rank == 0:
        met.touch()
    _wait_for(stands if rank.rank == 1 else failed)
    try:
        step(torch.randn(4, 4), torch.randn(4, 2))
    finally:
        failed.touch()


def _wait_for(path: Path) -> None:
    while not path.exists():
        os.sched_yield()


def without_oomkit(rank: Rank) -> None:
    """One rank's step is not decorated."""
    _meets(rank)
    step = _step()
    if rank.rank == 1:
        step = step.__wrapped__
    step(torch.randn(4, 4), torch.randn(4, 2))


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        sys.exit(3)
    elif how == "raise":
        raise ValueError("a label that there is not")
    elif how == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def one_goes(rank: Rank) -> None:
    """Some steps in, the last rank ends in a way; the others say what they know of it.

    With `cautious` a vote comes before the first reduction, for a rank had trouble in the last
    call.
    """
    _meets(rank)
    step = _step()
    given = rank.arguments
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    step(x, y)
    if given.get("cautious"):
        with inject_oom(nth=1):
            step(x, y)
    else:
        step(x, y)

    def hurt(where: str) -> None:
        if rank.rank == rank.world - 1 and where == given["where"]:
            die(given["how"])

    step(x, y, hurt)
    step(x, y)


def one_dies_in_the_next_attempt(rank: Rank) -> None:
    """The first rank has run out of memory, and waits in a forward in micro-batches when the other
    one dies."""
    from torch.distributed.fsdp import fully_shard

    _meets(rank)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    forwards: Seen[int] = Seen()  # a list would be put back

    def hurt(*_: Any) -> None:
        forwards.append(1)
        if rank.rank == 1 and len(forwards) == 3:  # the second of the second call
            die("kill")

    model[0].register_forward_hook(hurt)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False, reduction="mean")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    x, y = torch.randn(8, 4), torch.randn(8, 2)
    step(x, y)
    if rank.rank == 0:
        with inject_oom(nth=1, phase="backward"):
            step(x, y)
    else:
        step(x, y)


def one_fails_between(rank: Rank) -> None:
    """The last rank's program ends by an error between two steps."""
    _meets(rank)
    step = _step()
    for index in range(4):
        if index == 2 and rank.rank == rank.world - 1:
            raise ValueError("a label that there is not")
        step(torch.randn(4, 4), torch.randn(4, 2))


def one_fails_in_its_last_update(rank: Rank) -> None:
    """Nobody votes any more."""
    _meets(rank)
    store: Any = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = rank.arguments["fails"] and rank.rank == rank.world - 1

    @oomkit.auto_batch(verify=False, reduction="mean")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def breaks(*_: Any) -> None:
        if fails:
            raise oomkit.PartialUpdate("half of it is done")

    optimizer.register_step_post_hook(breaks)
    try:
        step(torch.randn(4, 4), torch.randn(4, 2))
    finally:
        store.set(f"came {rank.rank}", "")
        store.wait([f"came {one}" for one in range(rank.world)])


def one_leaves(rank: Rank) -> None:
    """The last rank's data ends before the others'."""
    _meets(rank)
    step = _step()
    for _ in range(2 if rank.rank == rank.world - 1 else 4):
        step(torch.randn(4, 4), torch.randn(4, 2))


def example(rank: Rank) -> str:
    """A script, as `torchrun` starts it; what it prints is in the output."""
    given = rank.arguments
    os.environ |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank)}
    os.environ |= {"WORLD_SIZE": str(rank.world), "COLUMNS": "120"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": given["port"]}
    sys.argv = [given["script"], *given["options"]]
    try:
        runpy.run_path(given["script"], run_name="__main__")
    except SystemExit as ends:
        if ends.code:
            raise
    return "ended"


def latency(rank: Rank) -> list[float]:
    """Microseconds of single votes."""
    rank.votes_by()
    rank.join()
    world = worlds.meet()
    times = []
    for n in range(rank.arguments["count"]):
        begin = time.perf_counter()
        world.vote(0, n)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def one_does_not_map(rank: Rank) -> list[bool]:
    """A rank ends when the first one has made the memory: is that still there, and was it?"""
    rank.join(3.0)
    paths = _paths_made()

    def ends(self: worlds.World, path: str, size: int) -> Any:
        die("exit")

    worlds.World._map = ends  # type: ignore[method-assign]
    try:
        worlds.meet()
    except RuntimeError:
        return [os.path.exists(path) for path in paths]
    return []


def leave_a_segment(rank: Rank) -> str:
    """A file that an earlier job has left is neither opened nor in the way."""
    stale = Path("/dev/shm") / f"oomkit-job-{os.getuid()}-{0:016x}"
    if rank.rank == 0:
        stale.write_bytes(b"\xff" * 4096)
    try:
        rank.join()
        world = worlds.meet()
        return f"{world.shared} {world.vote(rank.rank % 2, 1)}"
    finally:
        if rank.rank == 0:
            stale.unlink()
