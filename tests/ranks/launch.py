"""Ranks of a program: processes of one machine, over gloo, each with a limit.

A program is a function of `ranks.programs`, by "module:name", that gets a `Rank`. What it
returns comes back, and where it stood when its time was up.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

common = Path(tempfile.gettempdir())
"""A folder of this run of pytest, whose workers share it."""


@dataclass
class Rank:
    """What a program is told."""

    rank: int
    world: int
    store: str
    """A file for the group to meet in."""
    arguments: dict[str, Any]

    def votes_by(self) -> None:
        """The way that is asked for: `gloo` as in a container without memory to share, `nodes`
        as on several machines, with so many ranks each."""
        from oomkit._ranks import world

        if self.arguments.get("gloo"):
            world._SHARED = "/nowhere"
        counts = self.arguments.get("nodes", ())
        names = [f"machine {node}" for node, count in enumerate(counts) for _ in range(count)]
        if names:
            world._node = lambda: names[self.rank]

    def join(self, patience: float = 60.0) -> None:
        import datetime

        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            return
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=patience),
        )


@dataclass
class Ended:
    """How one rank ended."""

    rank: int
    status: int
    result: Any
    error: str
    """What it raised, as `Type: text`, or nothing."""
    output: str

    @property
    def hung(self) -> bool:
        return "Timeout (" in self.output


class _Server:
    """Has imported torch and oomkit, and forks a rank when it is asked to."""

    def __init__(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks.launch"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def close(self) -> None:
        """Its ranks have been waited for."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **what: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of ranks has died"
        return int(answer)


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def started(
    program: str, world: int, limit: float = 100.0, **arguments: Any
) -> Iterator[tuple[list[int], Callable[..., list[Ended]]]]:
    """Numbers of the processes, and `finish()`, which waits and tells how each ended, `but` one."""
    server = _server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = {"program": program, "world": world, "folder": name, "limit": limit}
        processes = [server.ask(rank=r, arguments=arguments, **given) for r in range(world)]
        statuses: dict[int, int] = {}

        def finish(but: int | None = None) -> list[Ended]:
            ended = []
            for rank, process in enumerate(processes):
                if rank == but:
                    continue
                if process not in statuses:
                    statuses[process] = server.ask(wait=process)
                result, error = None, ""
                with contextlib.suppress(FileNotFoundError):
                    told = json.loads((folder / f"result-{rank}").read_text())
                    result, error = told["result"], told["error"]
                text = (folder / f"output-{rank}").read_text(errors="replace")
                ended.append(Ended(rank, statuses[process], result, error, text))
            return ended

        try:
            yield processes, finish
        finally:
            for process in processes:
                if process not in statuses:
                    os.kill(process, signal.SIGKILL)
                    server.ask(wait=process)


def ranks_of(program: str, world: int, limit: float = 100.0, **arguments: Any) -> list[Ended]:
    """Runs it to its end."""
    with started(program, world, limit, **arguments) as (_, finish):
        return finish()


def results_of(program: str, world: int, limit: float = 100.0, **arguments: Any) -> list[Any]:
    """The same of ranks that must all end well."""
    ended = ranks_of(program, world, limit, **arguments)
    for one in ended:
        assert one.status == 0, f"rank {one.rank} ended with {one.status}:\n{one.output[-4000:]}"
    return [one.result for one in ended]


@functools.cache
def _results_in_common(asked: str) -> list[Any]:
    name = hashlib.sha256(asked.encode()).hexdigest()[:16]
    with (common / f"ranks-{name}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another worker is at it
        file.seek(0)
        text = file.read()
        if not text:
            try:
                text = json.dumps(results_of(**json.loads(asked)))
            except AssertionError as failed:
                text = json.dumps(str(failed))
            file.write(text)
    found: Any = json.loads(text)
    assert isinstance(found, list), found
    return found


def results_once(program: str, world: int, limit: float = 100.0, **arguments: Any) -> list[Any]:
    """The same of ranks whose results several tests look at: they run once."""
    given = {"program": program, "world": world, "limit": limit}
    return _results_in_common(json.dumps(given | arguments))


def _serve() -> dict[str, Any] | None:
    """In the server until its parent is gone: None; in a rank what it is to do."""
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                return asked
        print(answer, flush=True)
    return None


def _run(asked: dict[str, Any]) -> None:
    folder, rank = Path(asked["folder"]), asked["rank"]
    output = os.open(folder / f"output-{rank}", os.O_RDWR | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    faulthandler.enable()
    faulthandler.dump_traceback_later(asked["limit"], exit=True)
    module, _, name = asked["program"].partition(":")
    told: dict[str, Any] = {"result": None, "error": ""}
    status = 0
    try:
        function = getattr(importlib.import_module(f"ranks.programs.{module}"), name)
        told["result"] = function(Rank(rank, asked["world"], f"{folder}/store", asked["arguments"]))
    except BaseException as raised:
        notes = " ".join(getattr(raised, "__notes__", []))
        told["error"] = f"{type(raised).__name__}: {raised} {notes}".strip()
        traceback.print_exc()
        sys.last_value = raised  # as at the end of a program, too
        status = 1
    (folder / f"result-{rank}.part").write_text(json.dumps(told))
    (folder / f"result-{rank}.part").rename(folder / f"result-{rank}")
    # As at the end of a program; to take all of torch apart would be a second of a core.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(status)


if __name__ == "__main__":
    # What every rank would import for itself, in seconds: an optimizer brings in torch.compile.
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import oomkit  # noqa: F401

    for program in (Path(__file__).parent / "programs").glob("*.py"):
        importlib.import_module(f"ranks.programs.{program.stem}")
    gc.freeze()  # a rank copies no page only because it looks for garbage there
    mine = _serve()
    if mine is not None:
        _run(mine)
