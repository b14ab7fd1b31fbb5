"""`import oomkit` where it cannot work: in sources that were not built, for another Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import oomkit

PACKAGE = Path(oomkit.__file__).parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The folder of a clone in which nothing was built."""
    shutil.copytree(
        PACKAGE, tmp_path / "oomkit", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return tmp_path


def error_of(folder: Path) -> str:
    """What `import oomkit` says at the end, in a Python that is started in the folder."""
    done = subprocess.run(
        [sys.executable, "-c", "import oomkit"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_sources_that_were_not_built_say_so_and_what_to_do(clone: Path) -> None:
    (clone / "setup.py").touch()

    error = error_of(clone)

    assert error.startswith(f"ImportError: oomkit is not built in {clone / 'oomkit'}")
    assert f"for Python {sys.version_info.major}.{sys.version_info.minor}" in error
    assert "run `pip install --no-build-isolation --editable .` there" in error
    assert "this folder hides an installed oomkit" in error
    assert "circular" not in error


def test_an_extension_of_another_python_is_not_built_for_this_one(clone: Path) -> None:
    (clone / "setup.py").touch()
    (clone / "oomkit" / "_C.cpython-39-x86_64-linux-gnu.so").touch()

    assert error_of(clone).startswith("ImportError: oomkit is not built in ")


def test_an_installed_package_for_another_python_is_to_be_installed_anew(clone: Path) -> None:
    (clone / "oomkit" / "_C.cpython-39-x86_64-linux-gnu.so").touch()

    error = error_of(clone)

    assert error.startswith("ImportError: oomkit is not built in ")
    assert "install it again for this Python" in error


def test_an_extension_that_cannot_be_loaded_keeps_its_own_error(clone: Path) -> None:
    built = Path(oomkit._C.__file__).name
    (clone / "oomkit" / built).write_bytes(b"no library")

    assert "not built" not in error_of(clone)
