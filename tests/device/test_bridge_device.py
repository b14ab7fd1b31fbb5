"""The bridge's calls to a device, against an allocator of libc10's kind that a test scripts."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bridge_table import UNKNOWN, DeviceStats, api

from device import EFAILED, EOOM, EUNSUPPORTED, HERE, MIB, OK, PRIVATE

FIELDS = (
    *("ready", "stats_fault", "reset_fault", "empty_fault", "calls"),
    *("allocated", "peak", "reserved", "retries"),
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    target = tmp_path_factory.mktemp("allocator") / "fake_allocator.so"
    torch_folder = Path(torch.__file__).parent
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [
        *(*compiler, "-std=c++20", "-O0", "-Wall", "-Wextra", "-fPIC", "-shared"),
        *("-isystem", str(torch_folder / "include"), str(HERE / "fake_allocator.cpp")),
        *("-o", str(target), f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class Allocator:
    def __init__(self, library: Any) -> None:
        self.__dict__["library"] = library

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.library, f"fake_{name}").value

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_int64.in_dll(self.library, f"fake_{name}").value = value


@pytest.fixture
def allocator(library: Any) -> Iterator[Allocator]:
    allocator = Allocator(library)
    for name in FIELDS:
        setattr(allocator, name, 0)
    library.fake_put_in()
    yield allocator
    library.fake_take_out()
    for name in FIELDS:
        setattr(allocator, name, 0)


def stats() -> Any:
    found = DeviceStats()
    status = api.device_stats(PRIVATE, 0, found)
    return list(found) if status == OK else status


def test_nothing_is_asked_of_a_device_before_it_is_initialised(allocator: Allocator) -> None:
    assert api.device_initialized(PRIVATE) == 0
    assert stats() == EUNSUPPORTED
    assert api.device_reset_peak(PRIVATE, 0) == EUNSUPPORTED
    assert api.device_empty_cache(PRIVATE) == EUNSUPPORTED
    assert api.device_expandable(PRIVATE) == EUNSUPPORTED
    assert allocator.calls == 0


def test_figures_reset_and_flush(allocator: Allocator) -> None:
    allocator.ready = 1
    allocator.allocated, allocator.peak, allocator.reserved = 3 * MIB, 5 * MIB, 8 * MIB
    allocator.retries = 4
    assert stats() == [3 * MIB, 8 * MIB, 5 * MIB, 8 * MIB, UNKNOWN, UNKNOWN, 4, 2]
    assert api.device_reset_peak(PRIVATE, 0) == OK
    assert stats()[2] == 3 * MIB
    assert api.device_empty_cache(PRIVATE) == OK


def test_negative_figures_are_none(allocator: Allocator) -> None:
    """Bytes freed on another thread between two counters."""
    allocator.ready, allocator.allocated = 1, -512
    assert stats()[0] == 0


def test_errors_of_the_allocator_are_statuses(allocator: Allocator) -> None:
    allocator.ready = allocator.stats_fault = allocator.reset_fault = 1
    assert stats() == EFAILED
    assert api.device_reset_peak(PRIVATE, 0) == EFAILED
    for fault, status in ((1, EOOM), (2, EFAILED), (3, EFAILED)):
        allocator.empty_fault = fault
        assert api.device_empty_cache(PRIVATE) == status


def test_settings_are_those_in_effect(allocator: Allocator) -> None:
    allocator.ready = 1
    assert api.device_expandable(PRIVATE) == 0
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert api.device_expandable(PRIVATE) == 1
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert api.device_expandable(PRIVATE) == 0


def in_child(question: Any) -> int:
    """What `question` answers in a forked child, 0 to 9 for 0 to -9."""
    child = os.fork()
    if child == 0:
        os._exit(abs(question()))
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_does_not_touch_the_device_of_its_parent(allocator: Allocator) -> None:
    allocator.ready = 1
    for question in (
        lambda: api.device_initialized(PRIVATE),
        stats,
        lambda: api.device_reset_peak(PRIVATE, 0),
        lambda: api.device_empty_cache(PRIVATE),
    ):
        assert in_child(question) == EUNSUPPORTED
    assert in_child(lambda: in_child(lambda: api.device_empty_cache(PRIVATE))) == EUNSUPPORTED
    assert api.device_initialized(PRIVATE) == 1 and stats()[0] == 0


def test_a_child_may_use_a_device_that_its_parent_did_not(allocator: Allocator) -> None:
    def uses() -> int:
        allocator.ready = 1
        return api.device_empty_cache(PRIVATE)

    assert in_child(uses) == OK
