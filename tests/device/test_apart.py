"""What a process can be but once: with more devices than there is room for, with libraries of the
driver that lack what is looked for. Each in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
from _ctypes import dlclose
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import compile_library
from helpers.own_process import run_program

import oomkit
from device import (
    CUDA,
    MIB,
    PRIVATE,
    ROWS,
    Body,
    Device,
    load_backend,
    out_of_memory,
    run,
)
from oomkit import _C

TESTS = Path(__file__).resolve().parents[1]
ROOM = 64


def apart(body: Any, folder: Path) -> None:
    """One of the functions here, in a process that has torch and nothing else."""
    call = (
        f"import pathlib, {__name__} as here; here._C._prove(False); "
        f"here.{body.__name__}(pathlib.Path({str(folder)!r}))"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = run_program(f"{call}; print('to its end')", {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and done.stdout == "to its end\n", done.stdout + done.stderr


# --- more devices than there is room for ---


def the_65th(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = Device(load_backend(folder), monkeypatch)
        for index in range(ROOM):
            _C.device_budget_set(PRIVATE, index, 1 << 40)
        cuda.install()
        cuda.fraction[0] = 0.5
        with pytest.raises(RuntimeError, match="too many devices"):
            _C.device_budget_set(CUDA, 0, MIB)
        assert _C.device_budget(CUDA, 0) is None
        found = oomkit.memory("cuda:0")
        assert found.allocated is not None and found.budget is None and found.total == 100 * MIB
        assert oomkit.max_memory_allocated("cuda:0") is None

        body = Body(out_of_memory())
        step = run(body)
        assert body.sizes == [8, 4, 4] and cuda.empty_calls == 1 and cuda.reset_calls == 0
        record = step.records[0]
        assert record.peak_allocated is record.baseline is record.budget is None
        with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard() as guard:
            raise out_of_memory()
        assert caught.value.report.device == "cuda:0"
        assert guard.records[0].peak_allocated is None and cuda.empty_calls == 2
        # Allocators that throw are asked each time: nothing is noted of them.
        cuda.stats_status, before = -5, cuda.stats_calls
        for _ in range(5):
            assert oomkit.memory("cuda:0").allocated is None
        assert cuda.stats_calls == before + 5
        assert _C.device_budget(PRIVATE, ROOM - 1) == 1 << 40
        cuda.remove()


def the_64th(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = Device(load_backend(folder), monkeypatch)
        for index in range(ROOM - 1):
            _C.device_budget_set(PRIVATE, index, 1 << 40)
        cuda.install()
        _C.device_budget_set(CUDA, 0, 1 << 40)
        assert oomkit.memory("cuda:0").budget == 1 << 40
        record = run(Body()).records[0]
        assert record.peak_allocated is not None and record.budget == 1 << 40
        cuda.remove()


def test_a_device_too_many_has_no_limit_and_no_peaks_and_recovers(tmp_path: Path) -> None:
    apart(the_65th, tmp_path)


def test_the_last_device_that_there_is_room_for(tmp_path: Path) -> None:
    apart(the_64th, tmp_path)


# --- the CUDA or HIP runtime ---

RUNTIME = """
_Thread_local int last_error; int comes_back, asked;
int *place(int which);
int *place(int which) { return which == 0 ? &last_error : which == 1 ? &comes_back : &asked; }
"""
TAKE = """
int {0}GetLastError(void);
int {0}GetLastError(void) {{ int e = last_error; asked++; last_error = comes_back; return e; }}
"""
PEEK = """
int {0}PeekAtLastError(void);
int {0}PeekAtLastError(void) {{ asked++; return last_error; }}
"""


def library(folder: Path, soname: str, text: str) -> Any:
    """Loaded, so that it is found by its name."""
    source = folder / f"{soname}.c"
    source.write_text(text)
    path = compile_library(source, folder / soname, [f"-Wl,-soname,{soname}"])
    return ctypes.CDLL(str(path))


def is_loaded(name: str) -> bool:
    try:
        dlclose(ctypes.CDLL(name, mode=os.RTLD_NOLOAD)._handle)
    except OSError:
        return False
    return True


class Runtime:
    def __init__(self, folder: Path, soname: str, *parts: str) -> None:
        prefix = "hip" if "hip" in soname else "cuda"
        text = RUNTIME + "".join(part.format(prefix) for part in parts)
        self.library = library(folder, soname, text)
        self.library.place.restype = ctypes.POINTER(ctypes.c_int)

    def number(self, which: int, value: int | None = None) -> int:
        place = self.library.place(which)
        if value is not None:
            place[0] = value
        return int(place[0])


def look(folder: Path, incomplete: list[Runtime], found: Runtime | None) -> None:
    """The last error of `found` is taken, and one of a lost context ends the step; nothing of those
    that are incomplete is called."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = Device(load_backend(folder), monkeypatch).install()
        everyone = [*incomplete, *([found] if found else [])]
        for runtime in everyone:
            runtime.number(0, 2)
        body = Body(out_of_memory())
        run(body)
        assert body.sizes == [8, 4, 4]
        for runtime in everyone:
            assert runtime.number(0) == (0 if runtime is found else 2)
            runtime.number(0, 719)
        body = Body(error := out_of_memory())
        step = oomkit.auto_batch(body)
        with torch.no_grad():
            if found is None:
                step(ROWS)
                assert body.sizes == [8, 4, 4]
            else:
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    step(ROWS)
                assert caught.value is error and body.sizes == [8]
        assert all(runtime.number(2) == 0 for runtime in incomplete)
        assert found is None or found.number(2) > 0
        cuda.remove()


def no_functions(folder: Path) -> None:
    """Nor is what is incomplete held: it goes with the one who has loaded it."""
    names = ("libcudart.so.13", "libcudart.so.12", "libamdhip64.so.7", "libamdhip64.so.6")
    parts = ((), (TAKE,), (PEEK,), ())
    incomplete = [Runtime(folder, name, *has) for name, has in zip(names, parts, strict=True)]
    look(folder, incomplete, None)
    assert all(is_loaded(name) for name in names)
    for runtime in incomplete:
        dlclose(runtime.library._handle)
    assert not any(is_loaded(name) for name in names)


def hip_7(folder: Path) -> None:
    incomplete = [Runtime(folder, "libcudart.so.12", TAKE)]
    look(folder, incomplete, Runtime(folder, "libamdhip64.so.7", TAKE, PEEK))


def hip_6(folder: Path) -> None:
    look(folder, [], Runtime(folder, "libamdhip64.so.6", TAKE, PEEK))


def cuda_12(folder: Path) -> None:
    incomplete = [Runtime(folder, "libcudart.so.13", PEEK)]
    look(folder, incomplete, Runtime(folder, "libcudart.so.12", TAKE, PEEK))


@pytest.mark.parametrize("body", [no_functions, hip_7, hip_6, cuda_12])
def test_the_runtime_is_found_by_its_functions(body: Any, tmp_path: Path) -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch has loaded a runtime of its own, which would be asked")
    apart(body, tmp_path)


# --- NVML ---

NVML_FUNCTIONS = {
    "nvmlInit_v2": "(void) { opened++; return 0; }",
    "nvmlShutdown": "(void) { opened--; return 0; }",
    "nvmlDeviceGetHandleByUUID": "(const char *u, void **d) { *d = (void *)u; return 0; }",
    "nvmlDeviceGetComputeRunningProcesses_v3": "(void *d, unsigned *n, void *p)"
    " { (void)d; (void)p; *n = 0; return 0; }",
}


def nvml_incomplete(folder: Path) -> None:
    for missing in (*NVML_FUNCTIONS, None):
        text = "int opened;\n"
        for name, rest in NVML_FUNCTIONS.items():
            declared = rest[: rest.index("{")]
            text += f"int {name}{declared};\nint {name}{rest}\n" if name != missing else ""
        (own := folder / str(missing)).mkdir()
        loaded = library(own, "libnvidia-ml.so.1", text)
        assert _C.nvml_processes("GPU-1") == (None if missing else [])
        assert ctypes.c_int.in_dll(loaded, "opened").value == 0
        dlclose(loaded._handle)
        assert not is_loaded("libnvidia-ml.so.1"), "it is held"


def nvml_absent(folder: Path) -> None:
    assert _C.nvml_processes("GPU-1") is None


@pytest.mark.parametrize("body", [nvml_incomplete, nvml_absent])
def test_an_nvml_that_is_not_all_there_tells_nothing(body: Any, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("the driver's own library would be found")
    apart(body, tmp_path)
