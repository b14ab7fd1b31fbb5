"""What the random programs of tests/properties found, as plain tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.seen import Seen

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

PAIRS = {
    "token ids and labels": (torch.ones(1, 6, dtype=torch.long), torch.ones(1, 6).long()),
    "two views": (torch.ones(1, 4), torch.ones(1, 4)),
    "inputs and targets": (torch.ones(1, 4), torch.ones(1, 1)),
}


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_pair_of_one_row_is_one_row(name: str, container: Callable[[Any], Any]) -> None:
    """Not two samples: each slice would have had one of the two."""
    lengths: Seen[Any] = Seen()

    @oomkit.auto_batch(ladder=())
    def step(batch: Any) -> None:
        lengths.append(len(batch))
        batch[0] + 1

    with inject_oom(nth=1), pytest.raises(oomkit.OutOfMemory, match="1 of 1 rows"):
        step(container(PAIRS[name]))
    assert lengths == [2]


def test_images_of_one_channel_are_samples_still() -> None:
    lengths: Seen[Any] = Seen()

    @oomkit.auto_batch
    def step(images: list[torch.Tensor]) -> None:
        lengths.append(len(images))
        images[0] + 1

    batch = [torch.ones(1, 5, 5) for _ in range(4)]
    with inject_oom(nth=1):
        step(batch)
    assert lengths == [4, 2, 2]
