"""Libraries and modules in C that only tests load."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def compile_library(source: Path, target: Path, flags: Sequence[str] = ()) -> Path:
    """A shared library from one C file, with the compiler that the core's tests use."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = sysconfig.get_paths()["include"]
    common = ["-std=c11", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command = [*compiler, *common, "-isystem", include, str(source), "-o", str(target), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def load_module(source: Path, folder: Path, flags: Sequence[str] = ()) -> Any:
    """An extension module from one C file, which names it. Not in sys.modules."""
    name = source.stem
    path = compile_library(source, folder / f"{name}.so", flags)
    loader = ExtensionFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
