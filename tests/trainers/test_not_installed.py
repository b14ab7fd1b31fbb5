"""Adapters of libraries that are not installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import oomkit
import oomkit.lightning
import oomkit.transformers

LIBRARIES = "transformers trl accelerate lightning pytorch_lightning ignite torchmetrics".split()
ROOT = Path(oomkit.__file__).parents[1]


def test_none_is_imported_with_oomkit() -> None:
    program = f"""
import sys, torch
before = set(sys.modules)
import oomkit, oomkit.lightning, oomkit.transformers
print([name for name in {LIBRARIES} if name in set(sys.modules) - before])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("extra", ["transformers", "lightning"])
def test_what_a_message_says_to_install_is_an_extra(extra: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    names = [re.split("[<>=]", each)[0] for each in extras[extra]]
    assert extra in names
    assert {*names} <= {*LIBRARIES}


@pytest.mark.parametrize("name", ["protect", "unprotect", "records"])
def test_without_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both environments have it: what looks for it finds nothing here."""
    real = importlib.util.find_spec

    def find_spec(wanted: str, *args: Any) -> Any:
        return None if wanted == "transformers" else real(wanted, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(ImportError, match=r"needs transformers: .*pip install oomkit\[transform"):
        getattr(oomkit.transformers, name)(object())


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is not None, reason="Lightning is installed here"
)
def test_without_lightning() -> None:
    with pytest.raises(ImportError, match=r"needs Lightning: .*pip install oomkit\[lightning\]"):
        oomkit.lightning.AutoBatch()
