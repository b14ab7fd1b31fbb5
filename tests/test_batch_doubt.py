"""Batches that can be read in two ways."""

import pytest
import torch

import oomkit
from oomkit import testing


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_samples_that_are_lists_of_two_things(count: int, kind: type) -> None:
    """The first thing of each happens to be as long as a sample has parts."""
    weight = torch.ones((), requires_grad=True)
    samples = [kind([torch.rand(2, 3 + i), torch.rand(1, 2)]) for i in range(count)]

    @oomkit.auto_batch
    def step(samples: list) -> None:
        sum((one * weight).sum() * other.sum() for one, other in samples).backward()

    with testing.inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match=f"may be {count} samples, or columns of 2"):
            step(samples)
    assert weight.grad is None
