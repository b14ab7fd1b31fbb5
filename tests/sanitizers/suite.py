"""What `make sanitize` runs; `make prove` has it as a suite.

Each unit first runs programs with planted defects: a tool that does not name the defect and our
own frame proves nothing. Then comes what must be silent.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from helpers import core_programs as core
from prove.suite import Result, read_pytest

from .builds import COMMON, FLAGS, LIBRARIES, PLANTS, ROOT, built, library
from .parts import ADDRESS, LEAKS, THREAD, Part
from .reports import Run, reports_in, run_under

HERE = Path(__file__).parent

# tool, plants, and what the reports have to say of each of them beside a frame of plants.c
Plant = tuple[str, str, Sequence[str]]
BEGUN = "all is imported"
"""What planted.py and threads.py say before they come to a defect."""
TOOLS = {
    "leak": "LeakSanitizer", "object-leak": "LeakSanitizer", "race": "ThreadSanitizer",
    "signed-overflow": "UBSan", "misaligned": "UBSan",
}  # fmt: skip
"""By defect; the others are AddressSanitizer's."""
IN_EXTENSIONS: dict[str, list[Plant]] = {
    "address": [
        ("address", "ring:use-after-free", ["heap-use-after-free"]),
        ("address", "ring:signed-overflow", ["signed integer overflow"]),
        ("address", "budget:overflow-of-heap", ["heap-buffer-overflow"]),
        ("address", "budget:misaligned", ["misaligned address"]),
    ],
    "leak": [
        ("leak", "ring:leak,budget:leak,ring:object-leak",
         ["plant_leaks.*__wrap_oomkit_ring_push", "plant_leaks.*__wrap_oomkit_budget_reserve",
          "PyBytes_FromStringAndSize.*plant_objects"]),
    ],
    "thread": [
        ("thread", "ring:race,budget:race",
         ["data race.*plant_count", "data race.*__wrap_oomkit_budget_reserve"]),
    ],
}  # fmt: skip


def _found(run: Run, wanted: Sequence[str]) -> list[str]:
    """What of `wanted` no report of our own code says."""
    return [w for w in wanted if not any(re.search(w, report, re.DOTALL) for report in run.ours)]


def lines_of(plant: Plant, missing: Sequence[str]) -> list[str]:
    """For the table: which tool, which defect, found or not."""
    _, names, wanted = plant
    return [
        f"planted {name:26s} {TOOLS.get(name.partition(':')[2], 'AddressSanitizer'):17s} "
        f"{'NOT found' if what in missing else 'found'}"
        for name, what in zip(names.split(","), wanted, strict=True)
    ]


def judge_plant(plant: Plant, run: Run, result: Result) -> None:
    """A defect that the program did not get to is not one that the tool has missed."""
    _, name, wanted = plant
    missing = _found(run, wanted)
    result.cases += 1
    result.lines += lines_of(plant, missing)
    if not missing and run.code != 0:
        return
    how = f"no report has {missing}" if BEGUN in run.output else "the program never came to it"
    result.failures.append(
        f"planted {name} was not found, {how}: it ended with {run.code} and said: "
        f"{run.output[-500:]} {run.reports[:2]}"
    )


def _check_plants(tool: str, planted: Path, tree: Path, result: Result) -> None:
    program = "threads.py" if tool == "thread" else "planted.py"
    for plant in IN_EXTENSIONS[tool]:
        command = [sys.executable, str(HERE / program)]
        judge_plant(plant, run_under(plant[0], command, planted, tree, plant[1]), result)
    run = run_under(tool, [sys.executable, str(HERE / program)], planted, tree)
    result.cases += 1
    if run.ours or (run.code != 0 and tool != "leak"):
        result.failures.append(f"without a plant: {run.code} {run.ours[:1]} {run.output[-500:]}")


def _run_part(tool: str, parts: Sequence[Part], tree: Path, result: Result) -> None:
    leave_out = " or ".join(f"({part.leave_out})" for part in parts if part.leave_out)
    command = [
        sys.executable, "-m", "pytest", "-q", "-rN", "--tb=short", "-p", "no:cacheprovider",
        "-m", "not gpu", *(["-k", f"not ({leave_out})"] if leave_out else []),
        *(f"tests/{part.file}" for part in parts),
    ]  # fmt: skip
    run = run_under(tool, command, tree, tree)
    _judge(tool, run, result)


def _judge(tool: str, run: Run, result: Result) -> None:
    # Leaks of others end the process with an error of their own, after pytest has ended well.
    clean = tool == "leak" and re.search(r"\d+ passed.* in ", run.output) is not None
    clean = clean and re.search(r"\d+ (failed|error)", run.output) is None
    said = run.output.partition("\n=====")[0] if clean else run.output
    lines = [line for line in said.splitlines() if re.search(r"(passed|failed|error).* in ", line)]
    tests = read_pytest(lines[-1] if lines else said, 0 if clean else run.code, 0.0)
    result.cases += tests.cases
    result.failures += tests.failures
    if tests.failures:
        result.failures.append(run.output[-3000:])
    if not tests.cases:
        result.failures.append(f"no test ran: {run.output[-1000:]}")
    kept = run.reports if tool == "address" else run.ours
    result.failures += [report[:3000] for report in kept]
    others = f", {len(run.reports) - len(kept)} reports of others" if tool != "address" else ""
    result.told += f"{tests.told}, {len(kept)} reports{others}"


def address() -> Result:
    result = Result()
    with built("address") as (tree, planted):
        _check_plants("address", planted, tree, result)
        _run_part("address", ADDRESS, tree, result)
    return result


def leaks() -> Result:
    result = Result()
    with built("address") as (tree, planted):
        _check_plants("leak", planted, tree, result)
        _run_part("leak", LEAKS, tree, result)
    return result


def threads() -> Result:
    result = Result()
    with built("thread") as (tree, planted):
        _check_plants("thread", planted, tree, result)
        run = run_under("thread", [sys.executable, str(HERE / "threads.py")], tree, tree)
        result.cases += 1
        if run.code != 0 or run.ours:
            result.failures += [f"threads.py: {run.code} {run.output[-1000:]}", *run.ours]
        _run_part("thread", THREAD, tree, result)
    return result


# ---- C without Python, alone: every byte of the process is instrumented

THREADED = ("budget", "fault", "peak", "ring")
IN_CORE: list[Plant] = [
    ("address", "ring:use-after-free", ["heap-use-after-free"]),
    ("address", "ring:overflow-of-heap", ["heap-buffer-overflow"]),
    ("address", "ring:signed-overflow", ["signed integer overflow"]),
    ("address", "ring:misaligned", ["misaligned address"]),
    ("address", "ring:leak", ["Direct leak of .*plant_leaks"]),
    ("thread", "budget:race", ["data race.*__wrap_oomkit_budget_reserve"]),
]


def build_core(name: str, kind: str, folder: Path, planted: bool = False) -> Path:
    """The test program of a part of the core under a sanitizer."""
    for needed in LIBRARIES[kind]:
        library(needed)
    program = folder / f"{name}-{kind}{'-planted' if planted else ''}"
    sources = core.sources_of(name)
    flags = [*FLAGS[kind].split(), *COMMON.split()]
    flags += core.WRAP if name in core.USES_WRAP else []
    if planted:
        sources.append(PLANTS)
        function = "oomkit_ring_push" if name == "ring" else "oomkit_budget_reserve"
        flags += [f"-Wl,--wrap={function}", *(["-DPLANT_IN_RING"] if name == "ring" else [])]
    done = core.build(program, sources, flags)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return program


def run_core(program: Path, plant: str = "") -> Run:
    env = {
        "OOMKIT_PLANT": plant,
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run([str(program)], env=env, capture_output=True, text=True, check=False)
    return Run(done.returncode, done.stdout, reports_in(done.stderr + done.stdout))


def planted_in_core(plant: Plant, folder: Path) -> list[str]:
    """What is wrong with the tool: nothing when it names the defect, and only then."""
    kind, name, wanted = plant
    program = folder / f"{name.partition(':')[0]}-{kind}-planted"
    if not program.exists():
        build_core(name.partition(":")[0], kind, folder, planted=True)
        quiet = run_core(program)
        if quiet.code != 0 or quiet.reports:
            return [f"{program.name} without a plant: {quiet.code} {quiet.reports[:1]}"]
    run = run_core(program, name)
    missing = _found(run, wanted)
    if run.code == 0 or missing:
        return [f"planted {name} was not found by {kind}: {run.code}, {missing}, {run.reports}"]
    return []


def core_under(kind: str, name: str, folder: Path) -> list[str]:
    run = run_core(build_core(name, kind, folder))
    return (
        [] if run.code == 0 and not run.reports else [f"{name}: {run.output[-500:]}", *run.reports]
    )


def core_alone() -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        for plant in IN_CORE:
            wrong = planted_in_core(plant, folder)
            result.failures += wrong
            result.lines += lines_of(plant, plant[2] if wrong else [])
        for name in core.SOURCES:
            result.failures += core_under("address", name, folder)
        for name in THREADED:
            result.failures += core_under("thread", name, folder)
    result.cases = len(IN_CORE) + len(core.SOURCES) + len(THREADED)
    return result


UNITS = {
    "address and undefined": address,
    "leaks": leaks,
    "threads": threads,
    "core": core_alone,
}


def prove(unit: str) -> Result:
    return UNITS[unit]()


__all__ = ["ROOT", "UNITS", "prove"]
