"""How C without Python is tested: each file by a program (tests/core/test_plan.c: core/plan.c)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, TESTS = ROOT / "csrc", ROOT / "tests"
FOLDERS = ("core", "records")
PROGRAMS = TESTS / "core"
SOURCES = {path.stem: path for name in FOLDERS for path in sorted((CSRC / name).glob("*.c"))}

FLAGS = (
    "-std=c11 -g -O1 -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wold-style-definition "
    "-Wmissing-prototypes -Wundef -Wformat=2 -fvisibility=hidden -pthread"
).split()
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all".split()
WRAP = "-Wl,--wrap=malloc,--wrap=calloc".split()
# What else a file needs.
NEEDS = {
    "plan": ["slices", "knowledge"],
    "knowledge": ["plan", "slices"],
    "numbers": ["knowledge", "plan", "slices"],
    "history": ["phases", "ring", "sketch"],
}
USES_WRAP = {"budget", "fault", "history", "peak", "ring"}


def sources_of(name: str) -> list[Path]:
    """The test program of a file, the file, and those that it needs."""
    needed = [SOURCES[other] for other in (name, *NEEDS.get(name, []))]
    return [TESTS / SOURCES[name].parent.name / f"test_{name}.c", *needed]


def build(output: Path, sources: list[Path], flags: list[str]) -> subprocess.CompletedProcess:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    folders = [*(CSRC / name for name in FOLDERS), PROGRAMS]
    command = [*compiler, *FLAGS, *(f"-I{folder}" for folder in folders), *map(str, sources)]
    return subprocess.run([*command, *flags, "-o", str(output)], capture_output=True, text=True)


def run(program: Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(program)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def sanitize(tmp_path_factory) -> list[str]:
    """The sanitizers' flags, or none where their libraries are missing or do not run."""
    folder = tmp_path_factory.mktemp("sanitize")
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / "probe"
    if build(program, [source], SANITIZE).returncode or run(program).returncode:
        return []
    return SANITIZE


def check(name: str, folder: Path, flags: list[str]) -> None:
    """Builds and runs the test program of a file."""
    program = folder / f"test_{name}"
    wrap = WRAP if name in USES_WRAP else []
    built = build(program, sources_of(name), flags + wrap)
    assert built.returncode == 0, built.stderr
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    checks, _, failures = done.stdout.splitlines()[-1].partition(" checks, ")
    assert int(checks) > 0
    assert failures == "0 failures"


def names_of(folder: str) -> list[str]:
    return [name for name, path in SOURCES.items() if path.parent.name == folder]
