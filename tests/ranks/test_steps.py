"""Steps of other shapes, and what is refused with a reason."""

from __future__ import annotations

import pytest

from .launch import ranks_of, results_of


def test_each_rank_may_split_as_it_needs() -> None:
    assert results_of("programs_steps:split_from_the_start", 2) == [[True, 2], [True, 4]]


def test_a_loss_that_is_returned_is_torchs_affair() -> None:
    for one in ranks_of("programs_steps:returned_loss", 2):
        right, said = one.result
        assert right == [True] * 3
        assert "call backward() inside the step" in said


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize(("phase", "nth"), [("forward", 1), ("backward", 2)])
def test_a_collective_of_the_steps_own_is_made_once(fails: int, phase: str, nth: int) -> None:
    ended = ranks_of("programs_steps:own_collective", 2, fails=fails, phase=phase, nth=nth)
    assert not any(one.hung for one in ended)
    for one in ended:
        right, said = one.result
        assert right
        assert "RankError" in said and f"rank {fails} cannot go on" in said
        assert "all_reduce() of the step's own" in said or "torch.distributed.all_reduce" in said


def test_a_collective_after_the_update_is_nobodys_affair() -> None:
    assert results_of("programs_steps:after_the_update", 2) == [[2], [1]]


def test_an_optimizer_that_was_not_found_waits_too() -> None:
    """The rank that failed cannot split the step, which steps an unknown optimizer: nobody has
    updated."""
    for said, moved in results_of("programs_steps:hidden_optimizer", 2):
        assert "not found in the arguments" in said
        assert not moved


def test_a_rank_without_any_memory_is_an_error_on_all() -> None:
    first, second = results_of("programs_steps:out_of_ways", 2)
    assert "RankError: rank 1 cannot go on: OutOfMemory" in first[0] and first[1]
    assert second[0].startswith("OutOfMemory") and second[1]


def test_what_is_not_agreed_on_is_said_at_the_first_call() -> None:
    how = ["sparse", "static", "fsdp, parts", "fsdp, kept"]
    for found in results_of("programs_steps:refused", 2, how=how):
        assert "EmbeddingBag(sparse=True) has sparse gradients" in found[0]
        assert "static_graph" in found[1]
        assert "set_requires_gradient_sync(False)" in found[2]
        assert "set_reshard_after_backward(False)" in found[3]


def test_uneven_inputs_under_join_are_torchs_affair() -> None:
    assert results_of("programs_steps:joined", 2) == [True, True]
