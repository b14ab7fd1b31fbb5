"""Calls of torch and of the collector that raise where nobody expects it."""

from __future__ import annotations

import pytest
import torch

import oomkit
from device import MIB, ROWS, Device, out_of_memory


def test_a_share_that_raises(cuda: Device) -> None:
    """A step goes without it, also where its own error is on its way; who asks is told."""

    def share(index: int) -> float:
        raise ValueError("broken")

    cuda.monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share)
    with oomkit.guard() as guard:
        pass
    with pytest.raises(torch.OutOfMemoryError), guard:
        raise out_of_memory()
    assert [record.budget for record in guard.records] == [None, None]
    with pytest.raises(ValueError, match="broken"):
        oomkit.memory("cuda:0")


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_collector_that_fails_ends_the_step_with_its_error(
    cuda: Device, error: BaseException
) -> None:
    kept: list[torch.Tensor] = []

    def collect() -> None:
        raise error

    def body(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(MIB, dtype=torch.uint8))
        raise out_of_memory()

    cuda.look_up("gc_collect", collect)
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and len(kept) == 1 and cuda.empty_calls == 1
