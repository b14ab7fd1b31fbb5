"""A wheel's bridges: one for each minor release of torch, of which the import takes one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.own_process import run_program

import oomkit

_bridge = pytest.importorskip("oomkit._bridge")

MINOR = ".".join(torch.__version__.split(".")[:2])
# What an editable install adds finds the bridge of another folder.
SCRIPT = """
import sys, warnings
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import oomkit
print(oomkit.__path__[0])
bridge = sys.modules.get("oomkit._bridge")
print(bridge.__file__ if bridge else None)
print(*(warning.message for warning in caught if "oomkit" in str(warning.message)))
"""


def imported(folder: Path, *minors: str) -> list[str]:
    """Imports a copy of oomkit whose one bridge lies where a wheel has those to these minors."""
    package = folder / "oomkit"
    left_out = shutil.ignore_patterns("_bridge.*.so", "__pycache__")
    shutil.copytree(Path(oomkit.__file__).parent, package, ignore=left_out)
    for minor in minors:
        there = package / "_bridges" / f"torch_{minor.replace('.', '_')}"
        there.mkdir(parents=True)
        shutil.copy(_bridge.__file__, there)
    done = run_program(SCRIPT, cwd=folder)
    assert done.returncode == 0, done.stderr
    where, bridge, warned = done.stdout.splitlines()
    assert where == str(package)
    return [bridge, warned]


def test_the_bridge_to_the_installed_torch_is_taken(tmp_path: Path) -> None:
    bridge, warned = imported(tmp_path, "2.9", MINOR, "99.1")

    folder = f"torch_{MINOR.replace('.', '_')}"
    assert Path(bridge).parent == tmp_path / "oomkit" / "_bridges" / folder
    assert warned == ""


def test_without_one_to_the_installed_torch_those_that_are_there_are_named(tmp_path: Path) -> None:
    bridge, warned = imported(tmp_path, "99.10", "99.9")

    assert bridge == "None"
    assert f"this wheel has bridges to torch 99.9, 99.10, installed is {MINOR}" in warned


def test_a_build_without_torch_says_that_it_has_no_bridge(tmp_path: Path) -> None:
    _, warned = imported(tmp_path)

    assert "the bridge to torch is missing (it was built without PyTorch)" in warned
