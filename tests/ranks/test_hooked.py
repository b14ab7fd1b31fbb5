"""Hooks on parameters of models that are spread over ranks."""

from __future__ import annotations

import pytest
from helpers.sample import with_rest

from .launch import results_of
from .programs.hooked import WHERE


@pytest.mark.parametrize("where", with_rest(["tensor"], [*WHERE, "accumulated"]))
def test_hooks_run_as_often_and_in_the_order_as_with_torch_alone(where: str) -> None:
    for found in results_of("hooked:whole", 2, where=[where]):
        for same, ours, expected in found.values():
            assert same
            assert ours == expected
            assert len(ours[1]) in (4, 8) and ours[3] == []


@pytest.mark.whole
def test_a_hook_that_is_not_linear_is_no_exact_split() -> None:
    first, second = results_of("hooked:split", 2)

    assert first[0][:2] == second[0][:2] == ["nothing", True]
    error = "SplitError: auto_batch cannot split step exactly: the gradient of module.0.weight"
    assert second[1][0].startswith(error)
    assert first[1][0].startswith(f"RankError: rank 1 cannot continue: {error}")
    for _, _, told in second:
        assert "runs once per micro-batch" in told[0]
