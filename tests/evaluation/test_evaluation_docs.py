"""The code of docs/guides/evaluation.md runs, split and with a failure in it."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from oomkit.testing import force_slices, inject_oom

ROOT = Path(__file__).parents[2]
PREAMBLE = (ROOT / "tests" / "docs" / "preambles" / "guides_evaluation.py").read_text()
TEXT = (ROOT / "docs" / "guides" / "evaluation.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)[:3]


@pytest.mark.parametrize("split", ["whole", "slices", "oom"])
def test_blocks_run(split):
    names = {"__name__": "page"}
    exec(PREAMBLE, names)
    inputs, saved = names["inputs"], names["saved"]
    for number, block in enumerate(BLOCKS):
        names["loader"] = DataLoader(TensorDataset(inputs, inputs), batch_size=8)
        names["metric"] = names["Metric"]()
        code = compile(block, f"<evaluation.md {number} {split}>", "exec")
        if split == "oom" and number != 1:
            with inject_oom(nth=1) as fault:
                exec(code, names)
            assert fault.fired == 1
        elif split == "slices":
            with force_slices([3, 5]):
                exec(code, names)
        else:
            exec(code, names)
    whole = names["model"](inputs)
    assert torch.allclose(names["predictions"], whole, atol=1e-6)
    assert torch.allclose(torch.cat(names["outputs"]), whole, atol=1e-6)
    assert names["metric"].rows == 8
    assert names["tokens"].shape == (8, 8) and torch.equal(names["scores"], inputs * 2)
    assert torch.equal(saved[0], inputs * 2)


def test_numbers_that_the_page_names():
    from oomkit._api import map as _map
    from oomkit._api import map_outputs as _map_outputs

    assert (_map_outputs._PINNED_LEAST, _map_outputs._PINNED_MOST) == (2**20, 256 * 2**20)
    for name in ("max_new_tokens", "max_length", "num_beams", "num_return_sequences"):
        assert name in _map._LENGTHS and f"`{name}`" in TEXT
