"""Builds of both extensions under a sanitizer: by setup.py, from a copy of the tree.

They lie in build/sanitize, a folder each, and are built again when a source has changed. The
ordinary build is never touched. Two units of `make prove` use one of them at a time: what one
works in the other must not build again, so that a build has a stamp, and its users a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "build" / "sanitize"
PLANTS = Path(__file__).with_name("plants.c")

FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
# Assertions stay, and signed numbers may not wrap: Python's own flags would say both.
COMMON = "-O1 -g -fno-omit-frame-pointer -UNDEBUG -fno-wrapv"
# Which function of C without Python the defects stand in for.
PLANTED = {
    "_C": ("oomkit_ring_push", ["-DPLANT_IN_RING"]),
    "_bridge": ("oomkit_budget_reserve", []),
}
_IGNORED = shutil.ignore_patterns("*.so", "*.pyc", "__pycache__", ".*_cache")
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "oomkit", "tests")


class NotInstalled(RuntimeError):
    """A compiler without the library of a sanitizer."""


def library(name: str) -> str:
    """The path of a library of gcc."""
    try:
        done = subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        told = "gcc is not installed; the sanitizers need it: apt-get install gcc g++"
        raise NotInstalled(told) from error
    path = done.stdout.strip()
    if not os.path.isabs(path) or not os.path.exists(path):
        raise NotInstalled(f"gcc has no {name}; install it with gcc: apt-get install gcc g++")
    return os.path.realpath(path)


def preloaded(kind: str) -> str:
    # libstdc++ as well: it is looked for at start, when Python has not loaded it yet, and
    # without it the first C++ exception ends the process.
    return f"{library(LIBRARIES[kind][0])} {library('libstdc++.so.6')}"


def _sources() -> list[Path]:
    found = [ROOT / name for name in COPIED]
    files = [p for top in found for p in (top.rglob("*") if top.is_dir() else [top])]
    return sorted(p for p in files if p.is_file() and not _IGNORED("", p.relative_to(ROOT).parts))


def _stamp(kind: str) -> str:
    """Of all that a build is made of."""
    digest = hashlib.sha256(f"{FLAGS[kind]} {COMMON} {sys.executable} {sys.version}".encode())
    for path in _sources():
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mode}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str], where: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=where, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)[:200]} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def _copy(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=_IGNORED)
        else:
            shutil.copy2(ROOT / name, tree / name)


def _build(kind: str, folder: Path) -> None:
    for name in LIBRARIES[kind]:
        library(name)
    tree, flags = folder / "tree", f"{FLAGS[kind]} {COMMON}"
    wanted = f"{flags}\n{sys.executable} {sys.version}\n"
    if not (folder / "flags").exists() or (folder / "flags").read_text() != wanted:
        shutil.rmtree(folder / "library", ignore_errors=True)
    _copy(tree)
    env = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": FLAGS[kind], "CC": "gcc"}
    env.pop("PYTHONPATH", None)
    told = _run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder / "library"),
         "--build-temp", str(folder / "objects")],
        tree,
        env,
    )  # fmt: skip
    # How each library was linked, for the ones with defects in them.
    links = [line for line in told.splitlines() if " -shared " in line and ".so" in line]
    if links:
        (folder / "links").write_text("\n".join(links) + "\n")
    for built in (folder / "library" / "oomkit").glob("*.so"):
        shutil.copy2(built, tree / "oomkit" / built.name)
    (folder / "flags").write_text(wanted)


def _plant(kind: str, folder: Path) -> None:
    """The package once more, with libraries in which a function of the core is replaced."""
    include = [f"-I{ROOT / 'csrc' / name}" for name in ("core", "records")]
    include += ["-isystem", _python_include()]
    shutil.rmtree(folder / "planted", ignore_errors=True)
    shutil.copytree(folder / "tree" / "oomkit", folder / "planted" / "oomkit")
    for line in (folder / "links").read_text().splitlines():
        command = shlex.split(line)
        at = command.index("-o") + 1
        name = Path(command[at]).name
        module = name.partition(".")[0]
        function, defines = PLANTED[module]
        made = folder / f"plants{module}.o"
        flags = [*FLAGS[kind].split(), *COMMON.split(), "-fPIC", "-std=gnu11", *include]
        if module == "_C":
            defines = [*defines, "-DPLANT_OBJECTS"]
        _run(["gcc", *flags, *defines, "-c", str(PLANTS), "-o", str(made)], ROOT)
        command[at] = str(folder / "planted" / "oomkit" / name)
        _run([*command, str(made), f"-Wl,--wrap={function}"], folder / "tree")


def _python_include() -> str:
    import sysconfig

    return sysconfig.get_paths()["include"]


@contextmanager
def built(kind: str) -> Iterator[tuple[Path, Path]]:
    """Folders with the package under a sanitizer: as it is, and with the defects. They stay as
    they are for as long as the block lasts: a program whose working directory is taken away
    ends with an error of oneMKL, which cannot load torch's library."""
    folder, wanted = HERE / kind, _stamp(kind)
    stamp = folder / "stamp"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not stamp.exists() or stamp.read_text() != wanted:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists() or stamp.read_text() != wanted:
                stamp.unlink(missing_ok=True)
                _build(kind, folder)
                _plant(kind, folder)
                stamp.write_text(wanted)
            fcntl.flock(lock, fcntl.LOCK_SH)  # others may come between: hence the loop
        yield folder / "tree", folder / "planted"
