"""examples/pretrain.py, small: it grows from one row, keeps the global batch, and resumes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import oomkit

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("pretrain_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_example"] = module  # data classes look their module up
    spec.loader.exec_module(module)
    yield module
    oomkit.limit_memory(None, device="cpu")
    del sys.modules["pretrain_example"]


def test_it_grows_stops_and_resumes(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    options = ["--scale", "tiny", "--steps", "6", "--checkpoint", str(checkpoint)]

    def run(*more: str) -> tuple[int, int, int]:
        assert example.main([*options, *more]) == 0
        said = capsys.readouterr().out
        assert "agrees with plain torch without a limit" in said
        found = re.search(
            r"global batch \[32\], OOMs (\d+), micro-batch (\d+) .* and (\d+) in the last", said
        )
        assert found is not None, said
        return tuple(int(number) for number in found.groups())  # type: ignore[return-value]

    ooms, first, last = run("--stop-after", "4")
    assert (ooms, first) == (0, 1) and last > 4
    assert run("--resume") == (0, last, last)
    assert example.main([*options, "--resume"]) == 0
    assert "6 steps already" in capsys.readouterr().out


def test_a_run_that_computes_something_else_is_seen(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = example.tokens_of, []

    def tokens_of(scale: object, step: int, device: str) -> object:
        calls.append(step)
        return real(scale, step + (len(calls) > 4), device)  # the last run gets other batches

    monkeypatch.setattr(example, "tokens_of", tokens_of)
    options = ["--scale", "tiny", "--steps", "2", "--checkpoint", str(tmp_path / "c.pt")]
    assert example.main(options) == 1
