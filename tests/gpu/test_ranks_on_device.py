"""One rank over NCCL, and two ranks that share a device over gloo: one runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu import DRY
from oomkit._ranks import sharded

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


def _ranks(world: int, backend: str, kind: str, folder: Path) -> list[dict[str, object]]:
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "gpu.ranks_program"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), backend, kind, str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world, said
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize(
    ("world", "kind"), [(1, "ddp"), (1, "fsdp"), (2, "ddp")], ids=["nccl-ddp", "nccl-fsdp", "gloo"]
)
def test_a_rank_that_runs_out_of_memory(world: int, kind: str, tmp_path: Path) -> None:
    backend = "gloo" if DRY or world > 1 else "nccl"
    if kind == "fsdp" and (why := sharded._torchs_refusal()) is not None:
        pytest.skip(f"torch {torch.__version__}: {why}")

    for found in _ranks(world, backend, kind, tmp_path):
        assert found["far"] < 1e-9  # type: ignore[operator]
        *others, last = found["errors"]  # type: ignore[misc]
        assert last > 0 and not any(others)
