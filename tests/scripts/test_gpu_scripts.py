"""What needs a device at full size runs on the CPU, small: its code works, no more than that."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.own_process import run_script

import oomkit

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    logger, threads = logging.getLogger("oomkit"), torch.get_num_threads()
    level, disabled = logger.level, logging.root.manager.disable
    yield
    oomkit.limit_memory(None, device="cpu")
    logger.setLevel(level)  # scripts are programs: they set these for themselves
    logging.disable(disabled)
    torch.set_num_threads(threads)
    for name in [n for n in sys.modules if n.split(".")[0] == "support"]:
        del sys.modules[name]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module


def run(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--dry", *options])
    assert load(SCRIPTS / f"{name}.py").main() == 0


def result(folder: Path, name: str) -> list[dict[str, Any]]:
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["machine"]["torch"] == torch.__version__ and found["machine"]["dry"]
    assert "allocator" in found["machine"] and (folder / f"{name}.md").read_text()
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "healthy", "--output", str(tmp_path))
    calls = [row["call"] for row in result(tmp_path, "healthy")]
    assert calls[:2] == ["bare", "auto_batch"] and "memory calls" in calls


def test_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "prediction", "--output", str(tmp_path))
    rows = result(tmp_path, "prediction")
    assert {row["workload"] for row in rows} == {"gpt2-124m", "resnet50-like"}
    asked = [row for row in rows if "error, %" in row]
    assert len(asked) >= 4
    for row in asked:
        share = row["predicted, GiB"] / row["measured, GiB"] - 1
        assert row["error, %"] == pytest.approx(100 * share)
        assert abs(share) < 1, row  # of a peak, above the same baseline


def test_the_prediction_is_the_planners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asked of what the step has learnt, not computed beside it."""
    asked: list[tuple[bool, int]] = []
    real = oomkit._C._predict_sizes

    def predict(sizes: Any, later: bool, rows: int, gradients: int) -> int | None:
        asked.append((later, rows))
        found: int | None = real(sizes, later, rows, gradients)
        return None if found is None else 2 * found

    run(monkeypatch, "prediction", "--output", str(tmp_path / "as it is"))
    monkeypatch.setattr(oomkit._C, "_predict_sizes", predict)
    run(monkeypatch, "prediction", "--output", str(tmp_path / "twice"))
    once, twice = (
        [row["predicted, GiB"] for row in result(tmp_path / name, "prediction")]
        for name in ("as it is", "twice")
    )
    assert twice == pytest.approx([2 * guess for guess in once])
    assert {later for later, _ in asked} == {False, True}


def test_policies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    run(monkeypatch, "policies", "--part", str(part), "--segments", "native")
    rows = json.loads(part.read_text())
    assert [row["workload"] for row in rows] == ["gpt2-124m", "resnet50-like"]
    assert all(row["OOMs"] >= 1 and row["k"] >= 2 and row["k*"] >= 2 for row in rows), rows


@pytest.mark.whole
def test_a_part_of_the_policies_has_a_table_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = ("--workload", "resnet50-like", "--gib", "24", "--segments", "expandable")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run(monkeypatch, "policies", *part, "--output", str(tmp_path))
    (row,) = result(tmp_path, "policies-resnet50-like-24-expandable")
    assert (row["workload"], row["segments"]) == ("resnet50-like", "expandable")
    assert row["of the best fixed, %"] > 0 and row["k*"] >= 2


@pytest.mark.parametrize("name", ["oomkit", "Composer's policy", "accelerate"])
def test_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    part = tmp_path / "part.json"
    run(monkeypatch, "peers", "--part", str(part), "--only", name)
    row = json.loads(part.read_text())
    assert row["contender"] == name
    assert row["OOMs"] == "not installed" or (row["OOMs"] >= 1 and row["k"] >= 2), row


def alone(tmp_path: Path, name: str) -> None:
    """In a process of its own."""
    done = run_script(SCRIPTS / f"{name}.py", "--dry", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_ladder(tmp_path: Path) -> None:
    """Alone: its budgets are a few hundred KiB, less than what earlier tests may keep."""
    alone(tmp_path, "ladder")
    rows = result(tmp_path, "ladder")
    least = {row["contender"]: row["smallest, %"] for row in rows if "smallest, %" in row}
    assert least["plain"] == 100
    assert least["oomkit"] < least["oomkit, ladder=()"] <= least["Composer's policy"] < 100
    rungs = {row["limit, %"]: row["rung"] for row in rows if "limit, %" in row}
    assert rungs[100] == 0 and rungs[60] >= 2


def test_recovery(tmp_path: Path) -> None:
    """Alone: it replaces a call of torch before oomkit is imported."""
    alone(tmp_path, "recovery")
    (row,) = result(tmp_path, "recovery")
    assert all(row[f"{stage}, us"] >= 0 for stage in ("drop", "restore", "flush", "first kernel"))


def test_a_missing_device_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    module = load(SCRIPTS / "prediction.py")
    with pytest.raises(SystemExit, match="no CUDA device"):
        module.setup_of(module.parser(None).parse_args([]))


def test_wide_attention(capsys: pytest.CaptureFixture[str]) -> None:
    example = load(ROOT / "examples" / "wide_attention.py")
    assert example.main(["--scale", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "as it is:   CPU out of memory" in said
    assert "agrees with the same training a row at a time" in said
    assert " 0 OOMs" not in said


class Saved:
    """Bytes of what a forward keeps for its backward, each storage once; shapes alone."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.seen.values())

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor


@pytest.mark.whole
def test_wide_attention_at_full_size_does_not_fit_and_a_row_does() -> None:
    """By shapes, in single precision. Autocast keeps more: nearly all of it are the weights of
    attentions, which softmax gives in single precision and the product wants in half."""
    example = load(ROOT / "examples" / "wide_attention.py")
    scale = example.SCALES["cuda"]
    assert (scale.layers, scale.tokens, scale.batch) == (24, 512, 32)
    kept = {}
    with torch.device("meta"):
        model = example.Wide(scale)
        attentions = [m for m in model.layers[0].modules() if isinstance(m, example.Attention)]
        assert len(attentions) == 17
        for rows in (1, scale.batch):
            saved = Saved()
            with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
                loss = model(torch.zeros(rows, scale.tokens, dtype=torch.long)).sum()
            loss.backward()
            kept[rows] = saved.bytes()
    budget = example.budget_of(scale, "cuda")
    assert kept[scale.batch] > budget > 8 * kept[1]


def test_pretraining_at_full_size() -> None:
    """By shapes: 512 million parameters, 256 rows of 2048 tokens, forward and backward."""
    example = load(ROOT / "examples" / "pretrain.py")
    scale = example.SCALES["cuda"]
    assert (scale.context, scale.global_batch) == (2048, 256)
    with torch.device("meta"):
        model = example.GPT(scale)
        assert 500e6 < sum(p.numel() for p in model.parameters()) < 530e6
        out = model(torch.zeros(scale.global_batch, scale.context, dtype=torch.long))
        assert out.shape == (256, 2048, scale.vocabulary)
        out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
