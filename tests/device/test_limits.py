"""limit_memory() of a CUDA device, and budget(): who has the rest."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.compiled import compile_library
from helpers.seen import Seen
from nomemory.fault import MISSING

import oomkit
from device import MIB, Device
from oomkit import _C
from oomkit._limits import cuda as _limits

TOTAL = 100 * MIB
UUID = "5a1f-22"


@pytest.fixture
def shares(fake: Device, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What torch was asked for, by device."""
    fake.install(live=False)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(total_memory=TOTAL, uuid=UUID)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)

    def put(share: float, index: int) -> None:
        assert cuda.is_initialized() or initialising
        fake.fraction[index] = share

    initialising: Seen[bool] = Seen()
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", put)
    queued: Seen[Any] = Seen()
    monkeypatch.setattr(cuda, "_lazy_call", queued.append)

    def initialise() -> None:
        initialising.append(True)
        for call in queued:
            call()
        fake.initialized = 1

    fake.__dict__["initialise"] = initialise
    fake.__dict__["queued"] = queued
    monkeypatch.setattr(_limits, "_before", {})
    monkeypatch.setattr(_limits, "_ours", {}, raising=False)
    monkeypatch.setattr(_limits, "_noted", [])
    return fake.fraction


def test_a_limit_is_a_share_and_goes_again(shares: dict[int, float]) -> None:
    with oomkit.limit_memory(25 * MIB, device="cuda:1"):
        assert shares == {1: 0.25}
        assert oomkit.memory("cuda:1").budget == 25 * MIB
        with oomkit.limit_memory(10 * MIB, device="cuda:1"):
            assert shares == {1: 0.1}
        assert shares == {1: 0.25}
    assert shares == {1: 1.0}
    assert oomkit.memory("cuda:1").budget is None


def test_the_programs_own_share_comes_back(shares: dict[int, float]) -> None:
    shares[0] = 0.5
    with oomkit.limit_memory("20MiB", device="cuda:0"):
        assert shares[0] == 0.2
    assert shares[0] == 0.5
    oomkit.limit_memory(None, device="cuda:0")
    assert shares[0] == 0.5


def test_a_share_above_all_of_the_device_is_none(shares: dict[int, float], fake: Device) -> None:
    """cudaMallocAsync says "no limit" as 2**64 bytes, and torch takes no share above 1."""
    shares[0] = shares[1] = float(2**64) / TOTAL
    with oomkit.limit_memory(25 * MIB, device="cuda:0"):
        assert shares[0] == 0.25
    assert shares[0] == 1.0 and _C.device_budget(1, 0) is None
    oomkit.limit_memory(25 * MIB, device="cuda:1")
    oomkit.limit_memory(None, device="cuda:1")
    assert shares[1] == 1.0


def test_a_limit_that_could_not_go_can_go_later(
    shares: dict[int, float], fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    oomkit.limit_memory(25 * MIB, device="cuda:0")

    def refuse(share: float, index: int) -> None:
        raise RuntimeError("not now")

    with monkeypatch.context() as for_once:
        for_once.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
        with pytest.raises(RuntimeError, match="not now"):
            oomkit.limit_memory(None, device="cuda:0")
    assert shares[0] == 0.25 and _C.device_budget(1, 0) == 25 * MIB
    oomkit.limit_memory(None, device="cuda:0")
    assert shares[0] == 1.0 and _C.device_budget(1, 0) is None


def test_a_share_that_the_program_asks_for_meanwhile_stays(
    shares: dict[int, float], fake: Device
) -> None:
    """What is there at the end is not what we have put there."""
    with oomkit.limit_memory(25 * MIB, device="cuda:0"):
        shares[0] = 0.75
    assert shares[0] == 0.75 and _C.device_budget(1, 0) is None
    with oomkit.limit_memory(25 * MIB, device="cuda:0"):
        with oomkit.limit_memory(10 * MIB, device="cuda:0"):
            pass
        assert shares[0] == 0.25
    assert shares[0] == 0.75


def test_a_limit_that_is_refused_is_no_error_where_warnings_are(
    shares: dict[int, float],
    fake: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.initialized = 0
    oomkit.limit_memory(30 * MIB, device="cuda:0")
    oomkit.limit_memory(40 * MIB, device="cuda:1")
    put = torch.cuda.set_per_process_memory_fraction

    def refuse(share: float, index: int) -> None:
        if index == 0:
            raise RuntimeError("does not yet support setMemoryFraction")
        put(share, index)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    with warnings.catch_warnings(), caplog.at_level("WARNING", "oomkit"):
        warnings.simplefilter("error")
        fake.initialise()
    assert shares == {1: 0.4} and "cuda:0' has no effect" in caplog.text


def test_a_limit_initialises_nothing(shares: dict[int, float], fake: Device) -> None:
    fake.initialized = 0
    oomkit.limit_memory(30 * MIB, device="cuda:0")
    with oomkit.limit_memory(30 * MIB, device="cuda:1"):
        pass
    assert shares == {} and len(fake.queued) == 1
    fake.initialise()
    assert shares == {0: 0.3}
    oomkit.limit_memory(None, device="cuda:0")
    assert shares == {0: 1.0}


def test_an_allocator_that_refuses_a_share_is_no_failure_of_cuda(
    shares: dict[int, float], fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch runs what we note while it initialises CUDA, and an error would end that."""
    fake.initialized = 0
    oomkit.limit_memory(30 * MIB, device="cuda:0")
    oomkit.limit_memory(40 * MIB, device="cuda:1")
    put = torch.cuda.set_per_process_memory_fraction

    def refuse(share: float, index: int) -> None:
        if index == 0:
            raise RuntimeError("does not yet support setMemoryFraction\nException raised from")
        put(share, index)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    with pytest.warns(oomkit.OomkitWarning, match=r"'cuda:0' has no effect.*setMemoryFraction\)"):
        fake.initialise()
    assert shares == {1: 0.4}
    assert _C.device_budget(1, 0) is None and _C.device_budget(1, 1) == 40 * MIB
    with pytest.raises(RuntimeError, match="setMemoryFraction"):
        oomkit.limit_memory(10 * MIB, device="cuda:0")
    assert _C.device_budget(1, 0) is None
    oomkit.limit_memory(None, device="cuda:0")  # nothing to put back


def test_an_interrupt_while_cuda_is_initialised_is_one(
    shares: dict[int, float], fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.initialized = 0
    oomkit.limit_memory(30 * MIB, device="cuda:0")

    def interrupted(share: float, index: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.initialise()


def test_the_share_allows_all_of_the_limit() -> None:
    for total in (84974239744, 25438715904, 15828320256):
        for limit in (8 << 30, 1 << 30, 3 * 2**29, total, total + 1, 2 * MIB):
            share = _limits.share_of(limit, total)
            assert 0 < share <= 1
            assert min(limit, total) <= int(share * total) <= min(limit, total) + 16


# --- who has the rest ---


def _figures(fake: Device) -> None:
    for name, value in {"allocated": 10, "reserved": 15}.items():
        fake.backend.set(f"now.{name}", value * MIB)


def test_bytes_beside_torch_count(shares: dict[int, float], fake: Device) -> None:
    """15 of torch, 60 free: 25 are of contexts, libraries and others."""
    _figures(fake)
    found = oomkit.budget("cuda:0")
    assert (found.total, found.free) == (100 * MIB, 60 * MIB)
    assert (found.allocated, found.reserved, found.beside) == (10 * MIB, 15 * MIB, 25 * MIB)
    assert found.usable == 75 * MIB
    with oomkit.limit_memory(40 * MIB, device="cuda:0"):
        limited = oomkit.budget("cuda:0")
        assert limited.limit == limited.usable == 40 * MIB


def test_the_cpu_has_its_limit() -> None:
    with oomkit.limit_memory("1GiB", device="cpu"):
        found = oomkit.budget("cpu")
        assert found.limit == found.usable == 1 << 30
        assert found.total is found.beside is None


def test_the_device_is_checked() -> None:
    with pytest.raises(ValueError, match=r"budget\(\) does not know the device 'abacus'"):
        oomkit.budget("abacus")


@pytest.mark.parametrize("name", ["meta", "hpu"])
def test_a_type_without_memory_here_is_said(name: str) -> None:
    with pytest.raises(ValueError, match=rf"memory\(\) has no device '{name}' here"):
        oomkit.memory(name)
    with pytest.raises(ValueError, match=rf"budget\(\) has no device '{name}' here"):
        oomkit.budget(name)


NVML = r"""
#include <string.h>
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int gi, ci; } info;
char known_uuid[64]; unsigned int count, pids[4096]; unsigned long long bytes[4096];
int opened, fails_at_init, fails_to_list;
int nvmlInit_v2(void); int nvmlShutdown(void);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *n, info *infos);
int nvmlInit_v2(void) { opened += !fails_at_init; return fails_at_init; }
int nvmlShutdown(void) { opened--; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    *device = known_uuid;
    return strcmp(uuid, known_uuid) == 0 ? 0 : 2;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *n, info *infos)
{
    unsigned int i, room = *n;
    (void)device;
    if (fails_to_list) { return 3; }
    *n = count;
    if (room < count) { return 7; }
    for (i = 0; i < count; i++) { infos[i] = (info){pids[i], bytes[i], 0, 0}; }
    return 0;
}
"""


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Found by its name once it is loaded, as the driver's would be."""
    folder: Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    path = compile_library(
        folder / "nvml.c", folder / "libnvidia-ml.so.1", ["-Wl,-soname,libnvidia-ml.so.1"]
    )
    return ctypes.CDLL(str(path))


@pytest.fixture
def nvml(nvml_library: Any) -> Iterator[Any]:
    def processes(*pairs: tuple[int, int | None], uuid: str = f"GPU-{UUID}") -> None:
        ctypes.c_uint.in_dll(nvml_library, "count").value = len(pairs)
        pids = (ctypes.c_uint * 4096).in_dll(nvml_library, "pids")
        used = (ctypes.c_ulonglong * 4096).in_dll(nvml_library, "bytes")
        for i, (pid, held) in enumerate(pairs):
            pids[i], used[i] = pid, 2**64 - 1 if held is None else held
        (ctypes.c_char * 64).in_dll(nvml_library, "known_uuid").value = uuid.encode()

    def number(name: str, value: int | None = None) -> int:
        place = ctypes.c_int.in_dll(nvml_library, name)
        if value is not None:
            place.value = value
        return place.value

    def count(value: int) -> None:
        ctypes.c_uint.in_dll(nvml_library, "count").value = value

    yield SimpleNamespace(processes=processes, number=number, count=count)
    assert number("opened") == 0, "NVML was left open"
    for name in ("fails_at_init", "fails_to_list"):
        number(name, 0)


@pytest.mark.parametrize("kind", ["GPU-", "MIG-", ""])
def test_owners_by_nvml(shares: dict[int, float], fake: Device, nvml: Any, kind: str) -> None:
    """By UUID: CUDA_VISIBLE_DEVICES and MIG slices have other numbers than NVML's."""
    _figures(fake)
    nvml.processes((os.getpid(), 22 * MIB), (4242, 3 * MIB), (4243, 4 * MIB), uuid=f"{kind}{UUID}")
    found = oomkit.budget("cuda:0")
    assert (found.own_beside, found.others) == (7 * MIB, 7 * MIB)
    assert nvml.number("opened") == 0


def test_bytes_that_nvml_does_not_tell_are_unknown(
    shares: dict[int, float], fake: Device, nvml: Any
) -> None:
    _figures(fake)
    nvml.processes((os.getpid(), 22 * MIB), (4242, None))
    assert oomkit.budget("cuda:0").others is None
    nvml.processes((4242, MIB))  # pids of another namespace
    assert oomkit.budget("cuda:0").own_beside is oomkit.budget("cuda:0").others is None


def test_many_processes_need_more_room(nvml: Any) -> None:
    nvml.processes(*((pid, pid) for pid in range(1, 301)))
    assert _C.nvml_processes(f"GPU-{UUID}") == [(pid, pid) for pid in range(1, 301)]


@pytest.mark.parametrize("fault", ["fails_at_init", "fails_to_list", "unknown"])
def test_nvml_that_cannot_tell(nvml: Any, fault: str) -> None:
    nvml.processes((1, 1), uuid="GPU-another" if fault == "unknown" else f"GPU-{UUID}")
    if fault != "unknown":
        nvml.number(fault, 1)
    assert _C.nvml_processes(f"GPU-{UUID}") is None


def test_a_list_that_never_fits_is_given_up(nvml: Any) -> None:
    """Each time it says that there are more."""
    nvml.processes((1, 1))
    nvml.count(4096)
    assert len(_C.nvml_processes(f"GPU-{UUID}") or []) == 4096
    nvml.count(4097)
    assert _C.nvml_processes(f"GPU-{UUID}") is None


def test_the_uuid_is_a_text(nvml: Any) -> None:
    for uuid in (3, None, "\udc80"):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            _C.nvml_processes(uuid)


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "not skipped")
def test_a_list_that_there_is_no_memory_for(nvml: Any) -> None:
    """The array is a hint, the list an answer; the library is closed each time (by the fixture)."""
    from nomemory.fault import remove_mem_hooks, set_nomemory

    pairs = [(2**31 + pid, 2**40 + pid) for pid in range(70)]
    nvml.processes(*pairs)
    uuid, found, call = f"GPU-{UUID}", [], _C.nvml_processes
    for nth in range(600):
        set_nomemory(nth, nth + 1)
        try:
            found.append(call(uuid))
        except MemoryError as error:
            found.append(type(error))
        finally:
            remove_mem_hooks()
        if found[-1] == pairs:
            break
    assert found[-1] == pairs and None in found and found.count(MemoryError) > 100
    assert all(one is None or one is MemoryError for one in found[:-1])
