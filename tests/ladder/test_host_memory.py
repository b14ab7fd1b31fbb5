"""Host memory that is to be had: the machine's, and what control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import oomkit
from ladder.test_host_state import PARAMS, Program, room, same
from oomkit._ladder import host

MIB = 2**20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 100 MiB available and no control groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * 1024} kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    return tmp_path


def group(folder: Path, limit: object, used: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_what_the_machine_has(machine: Path) -> None:
    assert host.available() == 100 * MIB


def test_a_group_leaves_less(machine: Path) -> None:
    group(machine / "cgroup", 50 * MIB, 20 * MIB)
    assert host.available() == 30 * MIB


def test_a_group_without_a_limit(machine: Path) -> None:
    group(machine / "cgroup", "max", 20 * MIB)
    assert host.available() == 100 * MIB


def test_a_group_of_its_own(machine: Path) -> None:
    group(machine / "cgroup", "max", 20 * MIB)
    (machine / "own").write_text("0::/job/7\n")
    group(machine / "cgroup" / "job" / "7", 10 * MIB, 4 * MIB)
    assert host.available() == 6 * MIB


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("at", ["job", "job/7", "job/7/step_0", "job/7/step_0/task_0"])
def test_a_limit_of_a_group_above_its_own(machine: Path, at: str, version: int) -> None:
    """SLURM sets the limit of a job, and no more for its tasks."""
    (machine / "own").write_text(f"{'0:' if version == 2 else '7:memory'}:/job/7/step_0/task_0\n")
    top = machine / "cgroup" / ("" if version == 2 else "memory")
    for folder in ("job", "job/7", "job/7/step_0", "job/7/step_0/task_0"):
        no_limit: object = "max" if version == 2 else 2**63 - 4096
        group(top / folder, 50 * MIB if folder == at else no_limit, 20 * MIB, version)
    assert host.available() == 30 * MIB


def test_the_least_of_several_limits_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/job/7/task\n")
    for folder, limit in (("job", 60), ("job/7", 40), ("job/7/task", 90)):
        group(machine / "cgroup" / folder, limit * MIB, 20 * MIB)
    assert host.available() == 20 * MIB


def test_a_group_that_the_namespace_hides(machine: Path) -> None:
    (machine / "own").write_text("0::/../job\n")
    group(machine / "job", 1 * MIB, 0)
    group(machine / "cgroup", 50 * MIB, 10 * MIB)
    assert host.available() == 40 * MIB


def test_the_first_version_of_groups(machine: Path) -> None:
    (machine / "own").write_text("3:cpu:/x\n7:cpuset,memory:/job\n")
    group(machine / "cgroup" / "memory" / "job", 10 * MIB, 3 * MIB, version=1)
    assert host.available() == 7 * MIB


def test_more_in_use_than_the_limit_is_none_left(machine: Path) -> None:
    group(machine / "cgroup", 10 * MIB, 12 * MIB)
    assert host.available() == 0


def test_without_proc_the_system_is_asked(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert (host.available() or 0) > 0


def test_what_cannot_be_read_is_not_known(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").write_text("MemAvailable: many kB\n")
    monkeypatch.delattr(host.os, "sysconf")
    assert host.available() is None


@pytest.mark.parametrize(("kept", "expected"), [(20, 120), (60, 160)])
def test_pinned_memory_that_torch_keeps_is_to_be_had(
    machine: Path, monkeypatch: pytest.MonkeyPatch, kept: int, expected: int
) -> None:
    """What is more than half of the rest is given back first: it may be of other sizes.

    The machine has 100 MiB beside what torch keeps."""
    given_back: list[None] = []

    def empty() -> None:
        given_back.append(None)
        (machine / "meminfo").write_text(f"MemAvailable: {(100 + kept) * 1024} kB\n")

    def stats() -> dict[str, int]:
        cached = 0 if given_back else kept * MIB
        return {"allocated_bytes.current": 7 * MIB + cached, "active_bytes.current": 7 * MIB}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", stats)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty, raising=False)
    assert host.available() == expected * MIB
    assert len(given_back) == (kept > 50)


# --- what an update in parts takes of it ---


class Machine:
    """A machine of which oomkit's copies are all that is taken: half of it may be."""

    def __init__(self, bytes_: int) -> None:
        self.bytes, self.peak = bytes_, 0
        self._copies: list[tuple[StorageWeakRef, int]] = []
        self._clone = torch.Tensor.clone

    def taken(self) -> int:
        self._copies = [copy for copy in self._copies if not copy[0].expired()]
        return sum(size for _, size in self._copies)

    def available(self) -> int:
        return max(self.bytes - self.taken(), 0)

    def clone(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        made = self._clone(tensor, **options)
        storage = made.untyped_storage()
        self._copies.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.taken())
        return made


@contextmanager
def only(bytes_: int) -> Iterator[Machine]:
    machine = Machine(bytes_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_left", machine.available)
        patch.setattr(
            torch.Tensor, "clone", lambda tensor, **options: machine.clone(tensor, **options)
        )
        yield machine


def goes_on(program: Program, machine: Machine, times: int, enough: int) -> list[float]:
    """What the steps have returned that came through; one that is refused has changed nothing."""
    found: list[float] = []
    for _ in range(4):
        before = program.picture()
        try:
            found += program.run(1)
        except oomkit.OutOfMemory as error:
            assert not error.committed
            assert "the host has no room" in str(error)
            assert same(program.picture(), before)
            assert times < enough
            break
    assert machine.peak <= machine.bytes // 2
    return found


# Times the parameters: temporaries fit or do not; all state goes; gradients, too; rows.
ROOMS = (5.0, 3.5, 2.8, 2.5, 2.15)


@pytest.mark.parametrize("times", [0, 1, 2, 4, 6, 8, 9, 10, 11, 12, 14, 20])
@pytest.mark.parametrize("size", ROOMS)
@pytest.mark.filterwarnings("ignore")
def test_never_more_than_half_of_it_is_taken(size: float, times: int) -> None:
    losses = Program("AdamW", ladder=()).run(4)
    with room(size), only(times * PARAMS) as machine:
        found = goes_on(Program("AdamW"), machine, times, enough=12)
        assert found == losses[: len(found)]


@pytest.mark.parametrize("times", [1, 4, 8, 16])
@pytest.mark.filterwarnings("ignore")
def test_nor_for_state_that_was_there_before(times: int) -> None:
    losses = Program("AdamW", ladder=()).run(6)
    with room(8.0):
        program = Program("AdamW")
        assert program.run(2) == losses[:2]
    program.optimizer.zero_grad()
    with room(1.2), only(times * PARAMS) as machine:
        found = goes_on(program, machine, times, enough=16)
        assert found == losses[2 : 2 + len(found)]


@pytest.mark.filterwarnings("ignore")
def test_nor_by_one_call_after_the_other() -> None:
    """Less and less memory: what is on the host already is a part of the half."""
    with room(8.0):
        program = Program("AdamW")
        program.run(2)
    program.optimizer.zero_grad()
    with only(3 * PARAMS) as machine:
        for _ in range(3):
            before = program.picture()
            with room(0.3), pytest.raises(oomkit.OutOfMemory) as caught:
                program.run(1)
            assert not caught.value.committed
            assert same(program.picture(), before)
            assert 0 < machine.taken() <= machine.bytes // 2


@pytest.mark.parametrize("times", [0, 1, 2, 4, 6, 8])
@pytest.mark.parametrize("size", [3.2, 2.8, 2.5])
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_were_there_are_there_again(size: float, times: int) -> None:
    with room(size), only(times * PARAMS):
        program = Program("AdamW")
        model, optimizer = program.model, program.optimizer
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=program.generator)
        before = program.picture()
        gradients = [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        with pytest.raises(oomkit.OutOfMemory, match="the host has no room") as caught:
            step(program.batch())
        assert not caught.value.committed
        assert same(program.picture(), before)
        assert not optimizer.state
        assert same([p.grad.numpy() for p in model.parameters() if p.grad is not None], gradients)
