"""The fake device, compiled once, installed for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from device import Device, compile_library, load_backend
from oomkit import _C

pytest.importorskip("oomkit._bridge")


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
    """A CUDA runtime that has nothing but a last error."""
    import ctypes

    folder: Path = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(
        """
        int last_error, comes_back, asked;
        int cudaGetLastError(void);
        int cudaGetLastError(void)
        {
            int error = last_error;
            asked++;
            if (!comes_back) {
                last_error = 0;
            }
            return error;
        }
        """
    )
    path = compile_library(
        folder / "runtime.c", folder / "libcudart.so.13", ["-Wl,-soname,libcudart.so.13"]
    )
    return ctypes.CDLL(str(path))


@pytest.fixture
def last_error(runtime: Any) -> Iterator[Any]:
    """Its numbers: last_error, comes_back, asked."""
    import ctypes

    class Numbers:
        def __getattr__(self, name: str) -> int:
            return ctypes.c_int.in_dll(runtime, name).value

        def __setattr__(self, name: str, value: int) -> None:
            ctypes.c_int.in_dll(runtime, name).value = value

    numbers = Numbers()
    for name in ("last_error", "comes_back", "asked"):
        setattr(numbers, name, 0)
    yield numbers
    for name in ("last_error", "comes_back"):
        setattr(numbers, name, 0)
