"""Builds oomkit._C (plain C, needs no torch) and oomkit._bridge (C++, needs torch's headers).

torch is found, never imported: importing it takes seconds and can fail where its libraries
are not usable, and the headers are all that is needed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LANGUAGE_FLAGS = {
    ".c": ["-std=c11", "-fvisibility=hidden"],
    ".cpp": ["-std=c++20", "-fvisibility=hidden", "-fvisibility-inlines-hidden"],
}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wundef", "-Wformat=2"]
LANGUAGE_WARNINGS = {
    ".c": ["-Wstrict-prototypes", "-Wold-style-definition", "-Wmissing-prototypes"],
    ".cpp": [],
}
NOTICE = """\
oomkit: PyTorch was not found by this build, so oomkit._bridge is left out: no CPU memory
oomkit: budget, no fault injection, slower memory figures. To have them, install PyTorch and
oomkit: then run `pip install --no-build-isolation .`"""


class BuildExt(build_ext):
    """Adds the flags that belong to one language only."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile
        strict = os.environ.get("OOMKIT_WERROR") == "1"

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            flags = [*extra_postargs, *LANGUAGE_FLAGS[ext]]
            if strict:
                flags += WARNINGS + LANGUAGE_WARNINGS[ext]
            return compile_one(obj, src, ext, cc_args, flags, pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extensions()


def find_torch() -> Path | None:
    """The folder of the installed torch package, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / "include" / "c10").is_dir() else None


def export_only(version_script: str) -> list[str]:
    """Linker options that keep what c10's headers define inline out of the symbol table."""
    return [f"-Wl,--version-script={version_script}"] if sys.platform == "linux" else []


# From the bottom up: docs/design.md has the plan of the house.
FOLDERS = (
    "py device tree batch result members call ranks sizes optim plain undo ladder hook accum "
    "engine proof deferred loop types module"
).split()


def extensions() -> list[Extension]:
    headers = sorted(glob("csrc/**/*.h", recursive=True))
    python_include = ["-isystem", sysconfig.get_paths()["include"]]
    core = [
        f"csrc/core/{name}.c"
        for name in ("plan", "slices", "knowledge", "numbers", "classify", "ring")
    ]
    found = [
        Extension(
            "oomkit._C",
            sources=[path for name in FOLDERS for path in sorted(glob(f"csrc/{name}/*.c"))] + core,
            depends=headers,
            extra_compile_args=python_include,
        )
    ]
    torch = find_torch()
    if torch is None:
        print(NOTICE, file=sys.stderr)
        return found
    core = [f"csrc/core/{name}.c" for name in ("budget", "peak", "fault")]
    found.append(
        Extension(
            "oomkit._bridge",
            sources=sorted(glob("csrc/torch/*.cpp")) + core,
            depends=[*headers, "csrc/torch/exports.map"],
            # No path to torch is written into the library: `import torch` has loaded
            # libc10 before, whichever it is.
            extra_compile_args=[*python_include, "-isystem", str(torch / "include")],
            library_dirs=[str(torch / "lib")],
            libraries=["c10"],
            extra_link_args=export_only("csrc/torch/exports.map"),
            language="c++",
        )
    )
    return found


setup(license="BSD-3-Clause", ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
