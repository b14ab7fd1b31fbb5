"""Copies of the sources: one that is built whole, and from it each mutant's.

A mutant is compiled with the very commands of setup.py: its one changed file anew, then linked
with the objects of the unmutated build.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .mutant import ROOT, Mutant

LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "demo-output", "results", "shared", "__pycache__", "*.egg-info", "*.so"
)
# Last on the command line: what a mutant computes does not depend on them, and half the time
# of a build does.
QUICK = "-O1 -g0"


class BuildFailed(Exception):
    """A compiler or linker refused."""


@dataclass
class Base:
    """The unmutated copy, built, with the commands that built it."""

    folder: Path
    compile: dict[str, list[str]]
    """By source, as in csrc/engine/whole.c."""
    link: list[list[str]]


def _run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def _after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def make_base(folder: Path) -> Base:
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    output = _run(
        [sys.executable, "setup.py", "build_ext", "--inplace", "--force"], folder, CFLAGS=QUICK
    )
    base = Base(folder, {}, [])
    for line in output.splitlines():
        if " -o " not in line:
            continue
        command = shlex.split(line)
        if "-c" in command:
            base.compile[_after(command, "-c")] = command
        elif "-shared" in command:
            base.link.append(command)
    if not base.compile or len(base.link) != 2:
        raise BuildFailed(f"the commands of the build were not found in its output:\n{output}")
    return base


def make_mutant(base: Base, mutant: Mutant, folder: Path) -> None:
    """The mutant's copy, ready to be imported. BuildFailed or StaleEdit."""
    shutil.copytree(base.folder, folder, ignore=shutil.ignore_patterns("build", "__pycache__"))
    mutant.apply(folder)
    if mutant.is_python:
        return
    if mutant.file not in base.compile:
        raise BuildFailed(f"{mutant.file} is compiled by no command; a header cannot be mutated")
    command = list(base.compile[mutant.file])
    old = _after(command, "-o")
    command[command.index(old)] = "mutant.o"
    _run(command, folder)
    for link in base.link:
        if old in link:
            _link(base, link, old, folder)


def _link(base: Base, link: list[str], old: str, folder: Path) -> None:
    library = folder / "oomkit" / Path(_after(link, "-o")).name
    before = library.read_bytes()
    library.unlink()
    words = ["mutant.o" if w == old else w for w in link]
    words = [str(base.folder / w) if w in link and w.endswith(".o") else w for w in words]
    words[words.index("-o") + 1] = str(library)
    _run(words, folder)
    if library.read_bytes() == before:
        raise BuildFailed(f"{library.name} is the same as without the mutant's edit")
