"""Memory of a device: nothing is left behind, nothing is initialised, figures are right."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from collections import UserList
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from gpu import DEVICE, DRY, MIB, UNIT, allocated, block, held, on_a_device, room, settle
from oomkit import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

OOMS = 20 if DRY else 1000
FIVE = 5 * MIB / UNIT


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; it must not fail."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_thousand_real_errors_leave_nothing() -> None:
    """Neither allocated nor reserved bytes nor host memory grow."""
    model = nn.Linear(64, 64).to(DEVICE)
    x = torch.randn(8, 64, device=DEVICE)

    @oomkit.auto_batch(model=model, accumulation_steps=1, label="fails")
    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        kept = block(16 * len(x))
        model(x).sum().backward()
        kept.zero_()

    def once() -> None:
        step.load_state_dict(empty)
        with oomkit.limit_memory(limit, device=DEVICE):
            step(x)
        assert step.records[-1].ooms >= 1

    empty = step.state_dict()
    settle()
    limit = held() + 100 * UNIT
    for _ in range(5):
        once()
    settle()
    before, reserved = allocated(), held()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(OOMS):
        once()
    settle()
    assert allocated() <= before
    assert held() <= reserved
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host) << 10
    assert grown < OOMS * 4096 + (8 << 20), f"{grown} bytes of the host"


@on_a_device
def test_fragmentation_is_told_from_capacity() -> None:
    """Blocks of 5 MiB are cut from segments of 20 MiB. The step puts one into each of 32 segments
    and has their other blocks freed: 480 MiB are free, none of it in one piece of 20, and no
    segment can be returned, which torch has tried when it raises. After the drop and the flush
    the same plan passes, with its 32 blocks in 8 segments and no smaller micro-batch."""
    if _expandable():
        pytest.skip("segments that grow are not in pieces")
    settle()
    blocks = [block(FIVE) for _ in range(4 * 32)]
    del blocks[1::4]
    sizes: UserList[int] = UserList()  # a list is put back with the attempt

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        sizes.append(len(x))
        own = [block(FIVE) for _ in range(32)]
        blocks.clear()  # the batch before, say
        block(2 * len(x)).zero_()  # 256 MiB
        del own

    with torch.no_grad(), oomkit.limit_memory(held() + 16 * MIB, device=DEVICE):
        step(torch.zeros(8, 1, device=DEVICE))
    (record,) = step.records
    assert record.ooms == 1, "no error was provoked"
    assert sizes == [8, 8] and record.accumulation_steps == 1


@on_a_device
def test_capacity_is_told_from_fragmentation() -> None:
    """The device is full: the same plan is not tried again, which would be a second error."""

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        block(16 * len(x)).zero_()  # 2 GiB

    kept = block(64)
    with torch.no_grad(), room(70):
        step(torch.zeros(8, 1, device=DEVICE))
    (record,) = step.records
    assert record.ooms == 1 and record.accumulation_steps == 2
    del kept


def _expandable() -> bool:
    return bool(_C.device_expandable(*_key()))


@on_a_device
@pytest.mark.parametrize("bridge", [True, False])
def test_settings_are_the_effective_ones(bridge: bool) -> None:
    """oomkit's reading of them: of the environment, of the last call that set any, and of one that
    sets another thing. Without the bridge, too, from the release on that tells when they change."""
    code = """
        import sys
        if not BRIDGE:
            sys.modules["oomkit._bridge"] = None
        import torch, oomkit
        from oomkit import _C
        assert _C.cpu_stats()["bridge"] is BRIDGE
        assert not _C.device_expandable(1, 0), "the device is not in use yet"
        torch.zeros(1, device="cuda")
        told = [_C.device_expandable(1, 0)]
        for settings in ("max_split_size_mb:64", "expandable_segments:True", "max_split_size_mb:32",
                         "expandable_segments:False"):
            torch.cuda.memory._set_allocator_settings(settings)
            told.append(_C.device_expandable(1, 0))
        print(*map(int, told))
    """.replace("BRIDGE", str(bridge))
    for settings, first in (("", "0"), ("expandable_segments:True", "1")):
        out = python(code, PYTORCH_CUDA_ALLOC_CONF=settings, PYTORCH_ALLOC_CONF=settings)
        tells = bridge or hasattr(torch._C, "_accelerator_getAllocatorSettings")
        later = ["1", "1", "0"] if tells else [first] * 3
        assert out.split() == [first, first, *later], (settings, out)


@on_a_device
def test_a_budget_is_shared_with_a_process_that_comes_and_goes() -> None:
    """The other process holds all but 2 GiB; when it has gone the step grows back."""
    free, total = torch.cuda.mem_get_info()
    taken = max(0, free - (2 << 30))
    with subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, torch\n"
            f"held = torch.empty({taken}, dtype=torch.uint8, device='cuda')\n"
            "torch.cuda.synchronize(); print('holds', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline().strip() == "holds"
        try:
            assert (oomkit.budget(DEVICE).beside or 0) >= taken

            @oomkit.auto_batch
            def step(x: torch.Tensor) -> None:
                block(8 * len(x)).zero_()

            x = torch.zeros(32, 1, device=DEVICE)  # 4 GiB
            with torch.no_grad():
                for _ in range(3):
                    step(x)
                assert step.records[-1].accumulation_steps > 1
                other.stdin.close()
                other.wait(timeout=60)
                for _ in range(64):
                    step(x)
            assert step.records[-1].accumulation_steps == 1
        finally:
            other.kill()


@on_a_device
def test_importing_and_asking_initialises_nothing() -> None:
    python(
        """
        import torch, oomkit
        oomkit.memory("cuda:0"), oomkit.budget("cuda:0"), oomkit.max_memory_allocated("cuda:0")
        with oomkit.limit_memory("2GiB", device="cuda:0"):
            pass
        oomkit.limit_memory("1GiB", device="cuda:0")
        with oomkit.guard():
            oomkit.auto_batch(lambda x: x + 1)(torch.zeros(2))
        assert not torch.cuda.is_initialized()
        torch.zeros(1, device="cuda")
        share = torch.cuda.get_per_process_memory_fraction(0)
        total = torch.cuda.get_device_properties(0).total_memory
        assert abs(share * total - 2**30) < 16, (share, total)
        """
    )


@on_a_device
def test_a_forked_child_leaves_the_device_alone() -> None:
    python(
        """
        import os, torch, oomkit
        from oomkit import _C
        kept = torch.zeros(1, device="cuda")
        assert oomkit.memory("cuda:0").allocated > 0
        child = os.fork()
        if child == 0:
            try:
                found = oomkit.memory("cuda:0").allocated
                with oomkit.guard(on_oom="skip"):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                os._exit(0 if found is None else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert oomkit.memory("cuda:0").allocated > 0
        """
    )


@on_a_device
@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
@pytest.mark.parametrize("visible", ["0", "uuid"])
def test_other_allocators_and_other_names_of_a_device(backend: str, visible: str) -> None:
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    if visible == "uuid" and uuid is None:
        pytest.skip("this torch does not tell the UUID")
    name = "0" if visible == "0" else f"GPU-{uuid}"
    out = python(
        """
        import collections, torch, oomkit
        sizes = collections.UserList()
        @oomkit.auto_batch
        def step(x):
            sizes.append(len(x))
            torch.empty(len(x) << 28, dtype=torch.uint8, device="cuda").zero_()
        with torch.no_grad(), oomkit.limit_memory("1GiB", device="cuda"):
            step(torch.zeros(8, 1, device="cuda"))
        oomkit.budget("cuda:0"), oomkit.memory("cuda:0")
        print(sizes[0], min(sizes))
        """,
        CUDA_VISIBLE_DEVICES=name,
        PYTORCH_CUDA_ALLOC_CONF=f"backend:{backend}",
        PYTORCH_ALLOC_CONF=f"backend:{backend}",
    )
    first, smallest = map(int, out.split())
    if backend == "native":  # the other one knows no share of a process in all releases
        assert first == 8 and smallest < 8


def test_the_budget_says_who_has_the_rest() -> None:
    kept = block(64)
    found = oomkit.budget(DEVICE)
    assert found.allocated is not None and found.allocated >= 64 * UNIT
    if not DRY:
        assert found.total is not None and found.free is not None
        assert found.reserved is not None and found.reserved >= found.allocated
        assert found.usable == found.free + found.reserved
        assert found.beside is not None and found.beside > 0  # the context at least
    del kept


def test_the_runs_maximum_survives_resets() -> None:
    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        block(8 * len(x)).zero_()

    with torch.no_grad():
        step(torch.zeros(16, 1, device=DEVICE))
        step(torch.zeros(1, 1, device=DEVICE))
    high = oomkit.max_memory_allocated(DEVICE)
    assert high is not None and high >= 128 * UNIT
    first, last = step.records
    assert last.peak_allocated < first.peak_allocated
    assert isinstance(_C.run_peak(*_key()), int)


def _key() -> Any:
    return (0, -1) if DRY else (1, torch.cuda.current_device())
