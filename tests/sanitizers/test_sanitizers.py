"""The core's programs under ThreadSanitizer, and every tool with a defect to find.

tests/core/test_core.py runs all of them under AddressSanitizer and UBSan; `make sanitize` runs the
extensions as well.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from helpers.core_programs import build, run
from prove.suite import Result

from . import builds
from .builds import FLAGS, LIBRARIES, NotInstalled, built, library
from .parts import ADDRESS, LEAKS, THREAD
from .planted import BEGUN
from .reports import Run, is_ours, reports_in
from .suite import IN_CORE, IN_EXTENSIONS, THREADED, core_under, judge_plant, planted_in_core

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sanitized")


@pytest.fixture(scope="module", params=sorted(FLAGS))
def kind(request: pytest.FixtureRequest, folder: Path) -> str:
    """A sanitizer that can be used here. `make sanitize` fails where one cannot."""
    try:
        for name in LIBRARIES[request.param]:
            library(name)
    except NotInstalled as error:
        pytest.skip(f"the sanitizer cannot be used here: {error}")
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / f"probe-{request.param}"
    done = build(program, [source], FLAGS[request.param].split())
    if done.returncode or (done := run(program)).returncode:
        pytest.skip(f"the sanitizer cannot be used here: {done.stderr[-300:]}")
    return str(request.param)


def test_planted_defects_are_found(kind: str, folder: Path) -> None:
    plants = [plant for plant in IN_CORE if plant[0] == kind]
    assert plants
    for plant in plants:
        assert planted_in_core(plant, folder) == []


def test_threads_of_the_core_do_not_race(folder: Path, kind: str) -> None:
    if kind == "thread":
        for name in THREADED:
            assert core_under(kind, name, folder) == []


def test_parts_are_files_with_a_reason() -> None:
    for part in (*ADDRESS, *LEAKS, *THREAD):
        assert (TESTS / part.file).is_file(), part.file
        assert len(part.why) > 10, part.file


def test_a_program_that_did_not_begin_is_told_from_a_defect_that_was_not_found() -> None:
    plant = IN_EXTENSIONS["address"][0]
    mkl = "Intel oneMKL FATAL ERROR: Cannot load /x/torch/lib/libtorch_cpu.so."
    told = []
    for output in (mkl, f"{BEGUN}\n"):
        judge_plant(plant, Run(2, output), result := Result())
        assert result.lines[0].endswith("NOT found")
        told += result.failures
    assert "the program never came to it" in told[0] and mkl in told[0]
    assert "no report has ['heap-use-after-free']" in told[1] and len(told) == 2
    report = "==1==ERROR: AddressSanitizer: heap-use-after-free\n    #0 0x1 in f tests/plants.c:47"
    judge_plant(plant, Run(1, f"{BEGUN}\n", [report]), result := Result())
    assert (result.failures, result.cases) == ([], 1)
    assert result.lines[0].split()[1:] == ["ring:use-after-free", "AddressSanitizer", "found"]


def test_a_build_in_use_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, by another unit: its user's working directory was gone, and oneMKL could not load
    torch's library."""
    made: list[str] = []
    now = ["first"]
    monkeypatch.setattr(builds, "HERE", tmp_path)
    monkeypatch.setattr(builds, "_stamp", lambda kind: now[0])
    monkeypatch.setattr(builds, "_build", lambda kind, folder: made.append(now[0]))
    monkeypatch.setattr(builds, "_plant", lambda kind, folder: None)

    def is_free() -> bool:
        with (tmp_path / "address" / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with built("address"), built("address"):
        assert made == ["first"]
        assert not is_free()
    assert is_free()
    now[0] = "second"
    with built("address"):
        assert made == ["first", "second"]
        assert not is_free()


LEAK = """
=================================================================
==12==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 4354 byte(s) in 1 object(s) allocated from:
    #0 0x7f79 in __interceptor_malloc ../../../../src/libsanitizer/asan/asan_malloc_linux.cpp:69
    #1 0x7f78 in PyBytes_FromStringAndSize Objects/bytesobject.c:88

Indirect leak of 64 byte(s) in 1 object(s) allocated from:
    #0 0x7f79 in __interceptor_malloc ../../../../src/libsanitizer/asan/asan_malloc_linux.cpp:69
    #1 0x7f78 in oomkit_ring_create csrc/records/ring.c:20

SUMMARY: AddressSanitizer: 4418 byte(s) leaked in 2 allocation(s).
"""


def test_reports_are_told_apart() -> None:
    assert [is_ours(report) for report in reports_in(LEAK)] == [False, True]
    undefined = (
        "csrc/core/plan.c:3:9: runtime error: signed integer overflow: 1 + 2\n    #0 0x1 in f"
    )
    assert [is_ours(report) for report in reports_in(undefined)] == [True]
    race = (
        "WARNING: ThreadSanitizer: data race (pid=1)\n    #0 f <null> (oomkit/_C.cpython.so+0x1)\n"
    )
    assert [is_ours(report) for report in reports_in("==\n" + race + race)] == [True, True]
    assert reports_in("nothing of this\n    #0 f csrc/core/plan.c:3\n") == []
