"""The fake device, compiled once, installed for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.collector import hide_nothing
from helpers.compiled import compile_library

from device import Device, load_backend
from oomkit import _C

pytest.importorskip("oomkit._bridge")


@pytest.fixture(autouse=True)
def _modules_are_not_searched_for_garbage() -> None:
    """Here they are, as on a device: of a program that hides objects oomkit gives back less."""
    hide_nothing()


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_backend(tmp_path_factory.mktemp("device"))


@pytest.fixture
def fake(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Not installed yet: install(type, index, live) does that."""
    device = Device(backend, monkeypatch)
    yield device
    device.remove()
    for index in range(4):
        for type_ in (1, 12, 13, 20):
            _C.device_budget_set(type_, index, None)


@pytest.fixture
def cuda(fake: Device) -> Device:
    """One that counts the tensors of the CPU as its own."""
    return fake.install()


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A CUDA runtime that has nothing but a last error, one for each thread."""
    import ctypes

    folder: Path = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(
        """
        _Thread_local int last_error;
        int comes_back, asked;
        int cudaGetLastError(void);
        int cudaPeekAtLastError(void);
        int number(int which, int value, int set);
        int cudaPeekAtLastError(void)
        {
            asked++;
            return last_error;
        }
        int cudaGetLastError(void)
        {
            int error = last_error;
            asked++;
            last_error = comes_back;
            return error;
        }
        int number(int which, int value, int set)
        {
            int *place = which == 0 ? &last_error : which == 1 ? &comes_back : &asked;
            if (set) {
                *place = value;
            }
            return *place;
        }
        """
    )
    path = compile_library(
        folder / "runtime.c", folder / "libcudart.so.13", ["-Wl,-soname,libcudart.so.13"]
    )
    return ctypes.CDLL(str(path))


@pytest.fixture
def last_error(runtime: Any) -> Iterator[Any]:
    """Its numbers: last_error of this thread, what comes_back once it was taken, asked."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch has loaded a runtime of its own, which would be asked")
    names = ("last_error", "comes_back", "asked")

    class Numbers:
        def __getattr__(self, name: str) -> int:
            return int(runtime.number(names.index(name), 0, 0))

        def __setattr__(self, name: str, value: int) -> None:
            runtime.number(names.index(name), value, 1)

    numbers = Numbers()
    for name in names:
        setattr(numbers, name, 0)
    yield numbers
    for name in ("last_error", "comes_back"):
        setattr(numbers, name, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Calls of the device's functions are counted here, run by run."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.no_proof)
