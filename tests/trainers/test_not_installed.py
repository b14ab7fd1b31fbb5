"""Adapters of libraries that are not installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

import oomkit.lightning
import oomkit.transformers


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
