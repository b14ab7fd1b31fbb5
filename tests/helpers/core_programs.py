"""How the programs of tests/core are built and run."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc" / "core"
PROGRAMS = ROOT / "tests" / "core"
NAMES = sorted(path.stem for path in CORE.glob("*.c"))

FLAGS = (
    "-std=c11 -g -O1 -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wold-style-definition "
    "-Wmissing-prototypes -Wundef -Wformat=2 -fvisibility=hidden -pthread"
).split()
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all".split()
WRAP = "-Wl,--wrap=malloc,--wrap=calloc".split()
# What else of the core a file needs.
NEEDS = {
    "plan": ["slices", "knowledge"],
    "knowledge": ["plan", "slices"],
    "numbers": ["knowledge", "plan", "slices"],
    "history": ["ring", "sketch"],
}
USES_WRAP = {"budget", "fault", "history", "peak", "ring"}


def build(output: Path, sources: list[Path], flags: list[str]) -> subprocess.CompletedProcess:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, f"-I{CORE}", f"-I{PROGRAMS}", *map(str, sources), *flags]
    return subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)


def run(program: Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(program)], capture_output=True, text=True)
