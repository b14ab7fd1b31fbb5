"""A mean over the items of all ranks, in a step that is whole or split on any of them."""

from __future__ import annotations

import pytest
from helpers.sample import with_rest

import oomkit

from .launch import results_of


@pytest.mark.parametrize("way", with_rest(["shared memory"], ["shared memory", "gloo"]))
def test_gradients_are_those_of_one_process_with_all_items(way: str) -> None:
    gloo = way == "gloo"
    kinds = ["ddp"] if gloo else ["ddp", "fsdp"]
    first, second = results_of("weighed:weighed", 2, kinds=kinds, gloo=gloo)

    for found in (first, second):
        assert max(far for far, _ in found.values()) < 1e-12
    for kind in kinds:
        assert [first[f"{kind}, {how}"][1] for how in ("whole", "forward", "backward")] == [1] * 3
        assert second[f"{kind}, whole"][1] == 1
        assert second[f"{kind}, forward"][1] == second[f"{kind}, backward"][1] == 2


def test_a_batch_of_a_single_row() -> None:
    assert max(results_of("weighed:one_row", 2)) < 1e-12


def test_what_cannot_be_weighed_is_an_error_on_all_ranks() -> None:
    first, second = results_of("weighed:refused", 2)

    for found in (first, second):
        assert (
            "no model of its is in DistributedDataParallel or fully_shard()"
            in (found["no model of several ranks"])
        )
        assert "call backward() inside the step" in found["returned"]
        assert "weight= counts nothing in the batch of rank 1" in found["nothing counts"]
        assert found["moved"] == "False"
    assert "RankError: rank 1 cannot continue: ZeroDivisionError" in first["raises"]
    assert second["raises"].startswith("ZeroDivisionError")


def test_it_needs_what_counts_the_items() -> None:
    with pytest.raises(ValueError, match="global_weight=True"):
        oomkit.auto_batch(lambda x: x, global_weight=True)
