"""examples/larger_than_memory.py, small: the plain program dies, the protected one trains."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.own_process import run_program

import oomkit

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "larger_than_memory.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    for name in ("rich", "matplotlib"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("larger_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["larger_example"] = module  # data classes look their module up
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    oomkit.limit_memory(None, device="cpu")
    del sys.modules["larger_example"]


def run(tmp_path: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """As a program of its own: what tests have left would count in its budget."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    lines = [
        "import importlib.util, sys",
        f"spec = importlib.util.spec_from_file_location('larger_example', {str(EXAMPLE)!r})",
        "module = sys.modules['larger_example'] = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(module)",
        *before,
        f"sys.exit(module.main(['--scale', 'tiny', '--output', {str(tmp_path)!r}]))",
    ]
    return run_program("\n".join(lines), cwd=EXAMPLE.parents[1], OMP_NUM_THREADS="1")


def test_it_dies_as_it_is_and_trains_when_protected(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "plain, one row at a time, budget 3MiB: CPU out of memory" in said
    assert "agrees with the plain program without a limit" in said
    notes = json.loads((tmp_path / "steps.json").read_text())
    assert {note["rung"] for note in notes} >= {2, 3}
    assert all(note["peak"] <= note["budget"] for note in notes)
    assert notes[-1]["loss"] < notes[0]["loss"]
    assert (tmp_path / "larger.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
def test_a_run_that_fits_shows_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "module.one_row_at_a_time = lambda scale, device: ''")
    assert done.returncode == 1, done.stderr


def test_a_run_that_computes_something_else_is_seen(example: ModuleType) -> None:
    notes = [{"loss": 4.0}, {"loss": 3.0}]
    assert example.verdict(notes, [4.0, 3.0])
    assert not example.verdict(notes, [4.0, 3.1])
    assert not example.verdict(notes[::-1], [3.0, 4.0])
