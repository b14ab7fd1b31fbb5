"""examples/sweep_generate.py, small: what it does, not how fast."""

import importlib.util
import io
import logging
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import oomkit

PATH = Path(__file__).resolve().parents[2] / "examples" / "sweep_generate.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("sweep_generate", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sweep_generate", module)
    spec.loader.exec_module(module)
    yield module
    logging.getLogger("oomkit").handlers[1:] = []


def small(example):
    oomkit.limit_memory(None, device="cpu")  # from now on bytes are counted
    budget = (oomkit.memory("cpu").allocated or 0) + 3 * 2**20
    return example.Scale(torch.device("cpu"), [20, 30_000, 40], 2000, budget, [16, 128], 100)


def test_the_sweep_goes_on_and_finds_what_fixed_sizes_find(example):
    console = Console(record=True, width=140, file=io.StringIO())
    scale = small(example)
    points = example.sweep(scale, console, plain=False)
    console.print(example.table_of(points, scale))
    text = console.export_text()
    assert [bool(point.error) for point in points] == [False, True, False]
    assert "Tried to allocate 73.24 MiB" in points[1].error  # the embedding alone
    assert text.count("CPU out of memory") == 1 and "does not fit" in text
    for point in (points[0], points[2]):
        assert point.ooms > 0 and point.parts.startswith("<= ")
        assert point.same == 1.0
        assert point.fixed[16] is not None


def test_without_oomkit_it_dies(example):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        example.sweep(small(example), Console(file=io.StringIO()), plain=True)
    names = [entry.name for entry in caught.traceback]
    assert "generate" in names[names.index("evaluate_samples") + 1 :][:3]
