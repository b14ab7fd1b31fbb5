"""The demo at a tiny scale: all three runs, and a verdict that can be negative."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import oomkit

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"
STEPS = 3


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    for name in ("numpy", "rich", "matplotlib"):
        pytest.importorskip(name)
    output = tmp_path_factory.mktemp("demo")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(oomkit.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "100",
    }
    command = [sys.executable, str(FOLDER / "demo.py"), "--scale", "tiny"]
    command += ["--steps", str(STEPS), "--output", str(output)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    return result, output


@pytest.fixture
def show() -> ModuleType:
    for name in ("numpy", "rich"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("demo_show", FOLDER / "show.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_show"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_demo_agrees(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, _ = finished

    assert result.returncode == 0, result.stdout + result.stderr
    assert "run 3 agrees with run 1" in result.stdout
    assert f"{32 * STEPS} of {32 * STEPS} samples seen" in result.stdout


def test_demo_shows_the_plain_run_die(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result, output = finished

    assert "torch.OutOfMemoryError: CPU out of memory. Tried to allocate" in result.stdout
    assert not (output / "plain.json").exists()


def test_demo_shows_its_decision(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result, _ = finished

    pattern = r"\w+ step=1 micro_batch=32->16 accumulation=1->2 reason=\w+"
    assert re.search(pattern, result.stdout)


def test_demo_leaves_its_results(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, output = finished
    run = json.loads((output / "oomkit.json").read_text())

    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "agrees" in (output / "table.txt").read_text()
    assert len(run["losses"]) == STEPS
    assert [record["step"] for record in run["records"]] == [1, 2, 3]
    assert run["records"][0]["ooms"] >= 1
    reference = json.loads((output / "reference.json").read_text())
    samples = json.loads((output / "plain-memory.json").read_text())
    assert samples["forwards"][0][1] == 32  # what the picture shows of the run that died
    assert max(size for _, size in samples["memory"]) <= run["records"][0]["budget"]
    assert run["peak_bytes"] < reference["peak_bytes"]


def results(**changes: Any) -> dict[str, Any]:
    record = {"outcome": "finished", "batch_size": 4, "ooms": 0, "time_lost": 0.0}
    run = {"losses": [2.0, 1.0], "batch_size": 4, "records": [dict(record), dict(record)]}
    return {**run, **changes}


@pytest.mark.parametrize(
    ("changes", "gradient", "agrees"),
    [
        ({}, 0.0, True),
        ({"losses": [2.0, 1.0009]}, 0.0, True),
        ({"losses": [2.0, 1.002]}, 0.0, False),
        ({"losses": [2.0, float("nan")]}, 0.0, False),
        ({}, 0.9e-5, True),
        ({}, 1.1e-5, False),
        ({}, float("nan"), False),
        ({"records": results()["records"][:1]}, 0.0, False),
    ],
)
def test_verdict(
    show: ModuleType, tmp_path: Path, changes: dict[str, Any], gradient: float, agrees: bool
) -> None:
    import numpy as np

    for name, shift in (("reference", 0.0), ("oomkit", gradient)):
        np.savez(
            tmp_path / f"{name}.npz",
            gradients=np.array([1.0 + shift, 0.0]),
            parameters=np.array([1.0]),
        )

    truth = show.compare(tmp_path, results(), results(**changes))

    assert truth.agrees is agrees
    assert truth.line().startswith("run 3 agrees" if agrees else "RUN 3 DISAGREES")


def test_a_run_of_another_length_is_an_error(show: ModuleType, tmp_path: Path) -> None:
    import numpy as np

    for name in ("reference", "oomkit"):
        np.savez(tmp_path / f"{name}.npz", gradients=np.ones(2), parameters=np.ones(1))

    with pytest.raises(RuntimeError, match="run 3 made 1 steps, run 1 2"):
        show.compare(tmp_path, results(), results(losses=[2.0]))
