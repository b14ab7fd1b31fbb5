"""An evaluation accumulates no gradients, however many its model wants, and its outputs
pile up: the last micro-batch needs more than the second."""

import gc
import itertools

import pytest
import torch
from helpers.sample import sampled, with_rest
from torch import nn

import oomkit

ROWS, CALLS = 2000, 6
PER_ROW = 2 * 1024 * 4  # bytes: a layer's result, and its ReLU
OUTPUT = 64 * 4  # bytes of a row


def needed(k: int) -> int:
    """Bytes above the input: a micro-batch, and the outputs of those before."""
    rows = -(-ROWS // k)
    return rows * PER_ROW + (ROWS - rows) * OUTPUT


CASES = list(itertools.product([3, 5, 6, 7], [False, True]))


@pytest.mark.parametrize(("k", "frozen"), with_rest(sampled(CASES, 4, "k"), CASES))
def test_the_fewest_micro_batches_that_fit_are_found(k: int, frozen: bool) -> None:
    gc.collect()  # what other tests left would be room that comes while this one runs
    with oomkit.limit_memory(2**50, device="cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)
        ).requires_grad_(not frozen)
        x = torch.randn(ROWS, 256)
        with torch.no_grad():
            expected = model(x)
        base = oomkit.memory("cpu").allocated
        assert base is not None

    @oomkit.auto_batch
    def predict(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    room = (needed(k) + needed(k - 1)) // 2
    with oomkit.limit_memory(base + room, device="cpu"):
        for _ in range(CALLS):
            torch.testing.assert_close(predict(x), expected)
    found = [(record.accumulation_steps, record.ooms) for record in predict.records]
    assert found[-1][0] == k, found
    assert sum(ooms for _, ooms in found) <= 4, found
    assert [ooms for _, ooms in found[3:]] == [0] * (CALLS - 3), found
