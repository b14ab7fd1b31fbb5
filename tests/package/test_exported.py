"""What the built extensions export: the one function that Python looks for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from oomkit import _C, _bridge


def exported(path: str) -> list[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is missing: it comes with the compiler that builds the extensions")
    done = subprocess.run(
        [nm, "-D", "--defined-only", path], capture_output=True, text=True, check=True
    )
    return sorted(line.split()[-1].partition("@")[0] for line in done.stdout.splitlines())


@pytest.mark.parametrize("module", [_C, _bridge], ids=["_C", "_bridge"])
def test_nothing_but_the_entry_is_exported(module: object) -> None:
    name = module.__name__.rpartition(".")[2]
    assert exported(module.__file__) == [f"PyInit_{name}"]
    assert hasattr(ctypes.CDLL(module.__file__), f"PyInit_{name}")


def test_more_would_be_seen() -> None:
    assert len(exported(torch._C.__file__)) > 1
