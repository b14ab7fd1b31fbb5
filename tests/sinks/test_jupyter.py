"""In a real kernel: after a cell has run out of memory it is free, and reports are tables."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELLS = [
    """
import torch, oomkit
oomkit.limit_memory("64MiB", device="cpu")
weight = torch.nn.Parameter(torch.ones(256))
@oomkit.auto_batch
def step(x):
    (weight * x).mean().backward()
step(torch.ones(4, 256))
""",
    "oomkit.report()",
    """
def cell():
    held = []
    for _ in range(100):
        held.append(torch.ones(2**20))
cell()
""",
    "before = oomkit.memory('cpu').allocated\nprint(before)",
    "oomkit.cleanup()",
    "print(oomkit.memory('cpu').allocated)",
]


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True)
    try:
        client.execute()
    except CellExecutionError:  # allowed
        pass
    return [cell.outputs for cell in notebook.cells]


def test_a_report_is_a_table(outputs: list[Any]) -> None:
    (shown,) = outputs[1]
    assert shown.data["text/html"].startswith("<div><table>")
    assert "label" in shown.data["text/plain"]


def test_after_the_clean_up_the_memory_is_free(outputs: list[Any]) -> None:
    assert outputs[2][-1].ename == "OutOfMemoryError"
    before, after = (int(outputs[number][0].text) for number in (3, 5))
    assert before > 2**24 > after
    assert outputs[4][0].data["text/plain"].endswith("MiB freed>")
