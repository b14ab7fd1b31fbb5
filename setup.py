"""Builds oomkit._C (plain C, needs no torch) and oomkit._bridge (C++, needs torch's headers).

torch is found, never imported: importing it takes seconds and can fail where its libraries
are not usable, and the headers are all that is needed.

    OOMKIT_TORCHES=DIR:DIR  torch packages of several minor releases (.ci/wheel): a bridge for
                            each, in a folder of its own from which oomkit/__init__.py chooses
    OOMKIT_NO_BRIDGE=1      build without PyTorch, and leave the bridge out
    OOMKIT_WERROR=1         warnings of the compiler are errors
    OOMKIT_TRAINED=1        build twice: the first build counts the branches of steps in which
                            nothing fails, the second is optimised for them (gcc, and a torch
                            that can be imported)
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LANGUAGE_FLAGS = {
    ".c": ["-std=c11", "-fvisibility=hidden", "-ffunction-sections"],
    ".cpp": ["-std=c++20", "-fvisibility=hidden", "-fvisibility-inlines-hidden"],
}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wundef", "-Wformat=2"]
LANGUAGE_WARNINGS = {
    ".c": ["-Wstrict-prototypes", "-Wold-style-definition", "-Wmissing-prototypes"],
    ".cpp": [],
}
HEALTHY = "csrc/module/healthy.ld"
TRAINING = "csrc/module/healthy.py"
NO_TRAINING = """
OOMKIT_TRAINED=1 expected gcc 10 or newer, which can optimise for a profile, found: {}
Set CC and CXX, or build without it: a healthy call then costs some 0.1 us more."""
NOT_TRAINED = f"""
OOMKIT_TRAINED=1 runs {TRAINING} while it builds, which has failed (see above). It needs a PyTorch
that this Python can import: pip install --no-build-isolation ."""
NO_TORCH = """
oomkit is built against the PyTorch that it will run with, and this build found none.
Install PyTorch first, then oomkit: pip install torch && pip install .
With uv, or where PyTorch is not beside this Python: pip install --no-build-isolation .
Without a CPU memory budget and fault injection, and with slower figures: OOMKIT_NO_BRIDGE=1"""


def optimised(command: list[str]) -> list[str]:
    """Python's own flags before those of $CFLAGS that say nothing of optimisation.

    setuptools takes $CFLAGS in their place: with `CFLAGS=-g0` nothing is optimised, and a
    healthy call takes three times as long.
    """
    if any(flag.startswith("-O") for flag in command):
        return command
    at = next((i for i, word in enumerate(command) if word.startswith("-")), len(command))
    return [*command[:at], *shlex.split(sysconfig.get_config_var("CFLAGS") or ""), *command[at:]]


def links(linker: list[str], options: list[str]) -> bool:
    """Whether a linker knows these options: GNU's and LLVM's do, gold and Apple's do not."""
    with tempfile.TemporaryDirectory() as folder:
        made = [*linker, *options, "-x", "c", os.devnull, "-o", str(Path(folder, "made.so"))]
        try:
            return subprocess.run(made, capture_output=True).returncode == 0
        except OSError:  # no compiler: the build says so
            return False


class BuildExt(build_ext):
    """Adds the flags that belong to one language only, orders functions, and uses every core."""

    profile: tuple[str, ...] = ()  # options of compiler and linker

    def run(self) -> None:
        if os.environ.get("OOMKIT_TRAINED") == "1":
            self.train()
        super().run()

    def train(self) -> None:
        """Builds oomkit to count its branches, and runs what it is to be optimised for.

        Bridges to other releases of torch have the same functions: they use what one has counted.
        """
        folder = Path(self.build_temp, "training").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree("oomkit", folder / "oomkit", ignore=shutil.ignore_patterns("*.so"))
        kept = self.build_lib, self.inplace, self.compiler
        self.build_lib, self.inplace = str(folder), False
        self.profile = ("-flto=auto", f"-fprofile-generate={folder}", "-fprofile-update=atomic")
        super().run()
        variables = {**os.environ, "PYTHONPATH": str(folder)}
        if subprocess.run([sys.executable, TRAINING], env=variables).returncode != 0:
            sys.exit(NOT_TRAINED)
        bridges = [ext.name.split(".")[-2] for ext in self.extensions if "_bridges" in ext.name]
        for counted in list(folder.glob("*#_bridges#*.gcda")):
            before, _, after = counted.name.partition("#_bridges#")
            for bridge in bridges:
                name = f"{before}#_bridges#{bridge}#{after.partition('#')[2]}"
                if not (folder / name).exists():
                    shutil.copy(counted, folder / name)
        self.build_lib, self.inplace, self.compiler = kept
        self.profile = ("-flto=auto", f"-fprofile-use={folder}", "-fprofile-partial-training",
                        "-Wno-error=coverage-mismatch")  # fmt: skip
        self.force = True

    def build_extensions(self) -> None:
        if len(self.extensions) == 1 and os.environ.get("OOMKIT_NO_BRIDGE") != "1":
            sys.exit(NO_TORCH)
        for kind in ("compiler_so", "compiler_so_cxx"):
            if hasattr(self.compiler, kind):
                setattr(self.compiler, kind, optimised(getattr(self.compiler, kind)))
        core = next(ext for ext in self.extensions if ext.name == "oomkit._C")
        core.extra_link_args = ["-Wl,-T," + HEALTHY]
        unix = self.compiler.compiler_type == "unix"
        if not (unix and links(self.compiler.linker_so, core.extra_link_args)):
            core.extra_link_args = []
        if self.profile:
            linker = self.compiler.linker_so
            if not links(linker, [*self.profile, "-fprofile-partial-training"]):
                sys.exit(NO_TRAINING.format(shlex.join(linker)))
        plain = [(ext.extra_compile_args, ext.extra_link_args) for ext in self.extensions]
        for ext in self.extensions:
            ext.extra_compile_args = [*ext.extra_compile_args, *self.profile]
            ext.extra_link_args = [*ext.extra_link_args, *self.profile]
        compile_one = self.compiler._compile
        link = self.compiler.link_shared_object
        strict = os.environ.get("OOMKIT_WERROR") == "1"
        begun: list[Future[None]] = []

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            flags = [*extra_postargs, *LANGUAGE_FLAGS[ext]]
            if strict:
                flags += WARNINGS + LANGUAGE_WARNINGS[ext]
            begun.append(pool.submit(compile_one, obj, src, ext, cc_args, flags, pp_opts))

        def link_when_compiled(*args, **options):
            while begun:
                begun.pop().result()
            return link(*args, **options)

        self.compiler._compile = compile_with_flags
        self.compiler.link_shared_object = link_when_compiled
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            super().build_extensions()
        for ext, (compiling, linking) in zip(self.extensions, plain, strict=True):
            ext.extra_compile_args, ext.extra_link_args = compiling, linking

    def build_extension(self, ext: Extension) -> None:
        """Objects of two bridges have one name; one for another torch is built anew."""
        shared = self.build_temp
        self.build_temp = os.path.join(shared, *ext.name.split(".")[1:-1])
        mark = Path("build", f"{ext.name}.{'inplace' if self.inplace else 'lib'}.torch")
        minor = minor_of(Path(ext.library_dirs[0]).parent) if ext.library_dirs else ""
        if minor and not (mark.exists() and mark.read_text() == minor):
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)
        if minor:
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(minor)
        self.build_temp = shared


def find_torch() -> Path | None:
    """The folder of the installed torch package, or None.

    An isolated build of pip runs the Python of the environment that it builds for, whose
    packages it hides from `import`.
    """
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    found += [Path(folder) / "torch" for folder in site.getsitepackages()]
    return next((folder for folder in found if (folder / "include" / "c10").is_dir()), None)


def minor_of(torch: Path) -> str:
    """ "2_13" of a torch package."""
    text = (torch / "version.py").read_text()
    found = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
    if found is None:
        raise ValueError(f"{torch / 'version.py'} names no version")
    return "_".join(found.groups())


def export_only(version_script: str) -> list[str]:
    """Linker options that keep what c10's headers define inline out of the symbol table."""
    return [f"-Wl,--version-script={version_script}"] if sys.platform == "linux" else []


# From the bottom up: docs/explanation/design.md has the plan of the house.
FOLDERS = (
    "py device tree batch result members call ranks sizes optim plain undo ladder hook accum "
    "engine proof deferred loop types module"
).split()


def extensions() -> list[Extension]:
    headers = sorted(glob("csrc/**/*.h", recursive=True))
    python_include = ["-isystem", sysconfig.get_paths()["include"]]
    core = [
        f"csrc/core/{name}.c" for name in ("plan", "slices", "knowledge", "numbers", "classify")
    ]
    sources = [path for name in ("records", *FOLDERS) for path in sorted(glob(f"csrc/{name}/*.c"))]
    found = [
        Extension(
            "oomkit._C",
            sources=sources + core,
            depends=[*headers, HEALTHY],
            extra_compile_args=python_include,
        )
    ]
    torches = [Path(path) for path in os.environ.get("OOMKIT_TORCHES", "").split(":") if path]
    if torches:
        bridges = {f"oomkit._bridges.torch_{minor_of(torch)}._bridge": torch for torch in torches}
    else:
        torch = find_torch()
        bridges = {"oomkit._bridge": torch} if torch is not None else {}
    return found + [bridge(name, torch, headers) for name, torch in bridges.items()]


def bridge(name: str, torch: Path, headers: list[str]) -> Extension:
    """The bridge to one minor release of torch."""
    core = [f"csrc/core/{name}.c" for name in ("budget", "peak", "fault")]
    return Extension(
        name,
        sources=sorted(glob("csrc/torch/*.cpp")) + core,
        depends=[*headers, "csrc/torch/exports.map"],
        # No path to torch is written into the library: `import torch` has loaded
        # libc10 before, whichever it is.
        extra_compile_args=[
            *("-isystem", sysconfig.get_paths()["include"]),
            *("-isystem", str(torch / "include")),
        ],
        library_dirs=[str(torch / "lib")],
        libraries=["c10"],
        extra_link_args=export_only("csrc/torch/exports.map"),
        language="c++",
    )


def index_page(readme: str) -> str:
    """The README for a package index, where nothing lies beside it that a link could lead to."""
    without_pictures = re.sub(r"!\[[^\]]*\]\((?!https:)[^)]*\)\n*", "", readme)
    return re.sub(r"\[([^\]]*)\]\((?!https:|#)[^)]*\)", r"\1", without_pictures)


if __name__ == "__main__":
    setup(
        license="BSD-3-Clause",
        long_description=index_page(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildExt},
    )
