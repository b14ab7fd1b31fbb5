"""examples/tune_max.py where what it needs is missing: it says what, and the command."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tune_max.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_max_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("lacks", "commands"),
    [
        (("optuna", "mlflow"), "pip install -r requirements/tune_max.txt"),
        (("oomkit",), "pip install --no-build-isolation ."),
        (
            ("rich", "oomkit"),
            "pip install -r requirements/tune_max.txt && pip install --no-build-isolation .",
        ),
    ],
)
def test_what_is_missing_is_said(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lacks: tuple[str, ...],
    commands: str,
) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None if name in lacks else object())
    assert example.main(["--n-trials", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tune_max.py needs {', '.join(lacks)}, not installed for ")
    assert said.endswith(f"In the folder of oomkit's sources: {commands}\n")


def test_what_is_needed_is_pinned(example: ModuleType) -> None:
    lines = "\n".join(
        (ROOT / "requirements" / name).read_text() for name in ("tune_max.txt", "search.txt")
    )
    pinned = {name.lower() for name in re.findall(r"^([\w-]+)==", lines, re.MULTILINE)}
    names = {"mlflow": "mlflow-skinny"}
    assert {names.get(name, name) for name in example.NEEDED} <= pinned
    assert re.search(r"^-r search.txt$", lines, re.MULTILINE)
    assert (ROOT / "requirements" / "integrations.txt").read_text().count("-r search.txt") == 1
