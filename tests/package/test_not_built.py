"""`import oomkit` where it cannot work: in sources that were not built, for another Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.own_process import run_module, run_program

import oomkit

PACKAGE = Path(oomkit.__file__).parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The folder of a clone in which nothing was built."""
    shutil.copytree(
        PACKAGE, tmp_path / "oomkit", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return tmp_path


def error_of(folder: Path, path: str = "") -> str:
    """What `import oomkit` says at the end."""
    done = run_program("import oomkit", {**os.environ, "PYTHONPATH": path}, folder)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_in_the_folder_of_the_sources_the_installed_one_is_used(clone: Path) -> None:
    """As after `pip install .`, with a Python that is started in the same folder."""
    (clone / "setup.py").touch()
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    code = "import oomkit, oomkit.memory, oomkit._reports.page as page; print(oomkit.__file__)"

    done = run_program(f"{code}; print(page.__file__); oomkit.auto_batch", env, clone)
    assert done.stdout.splitlines() == [
        str(PACKAGE / "__init__.py"),
        str(PACKAGE / "_reports" / "page.py"),
    ], done.stderr
    done = run_module("oomkit", "env", env=env, cwd=clone)
    assert done.stdout.startswith("oomkit: "), done.stderr


def test_an_installed_one_of_other_sources_is_not_mixed_with_them(clone: Path) -> None:
    (clone / "setup.py").touch()
    with (clone / "oomkit" / "__init__.py").open("a") as stream:
        stream.write("new_name = 1\n")

    error = error_of(clone, path=str(PACKAGE.parent))

    assert error.startswith(f"ImportError: oomkit in {PACKAGE} was installed from other sources")
    assert "run `pip install .` here again" in error


def test_sources_that_were_not_built_say_so_and_what_to_do(clone: Path) -> None:
    (clone / "setup.py").touch()

    error = error_of(clone)

    assert error.startswith(f"ImportError: oomkit is not built in {clone / 'oomkit'}")
    assert f"for Python {sys.version_info.major}.{sys.version_info.minor}" in error
    assert "run `pip install .` there" in error
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
