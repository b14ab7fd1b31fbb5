"""Steps with two forwards of a model whose buffers are broadcast before each of them."""

from __future__ import annotations

import importlib.util

import pytest
from helpers.sample import with_rest

from .launch import results_of

AS_ALONE = [
    "constant",
    "frozen norm",
    "moved by the step",
    "without gradients first",
    "evaluated",
    "evaluated first",
]
CHANGED = "that broadcasts its buffers, some of which have changed: pass broadcast_buffers=False"


@pytest.mark.parametrize("kind", with_rest(AS_ALONE[:1], AS_ALONE))
def test_buffers_that_have_not_changed_are_sent_once(kind: str) -> None:
    for found in results_of("buffered:twice", 2, kinds=[kind]):
        for said, far in found[kind]:
            assert said == ["nothing"] * 4
            assert max(far) < 1e-12


@pytest.mark.whole
def test_a_normalisation_in_training_is_sent_as_with_torch_alone() -> None:
    """In whole calls; its step cannot be split, which all ranks are told of."""
    first, second = (found["norm"] for found in results_of("buffered:twice", 2, kinds=["norm"]))

    for (said, far), _ in (first, second):
        assert said == ["nothing"] * 4
        assert max(far) < 1e-12
    for _, (said, far) in (first, second):
        assert said[:2] == ["nothing"] * 2
        assert max(far[:2]) < 1e-12
        assert all(CHANGED in one for one in said[2:])


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["counts", "counts on one rank"])
def test_other_buffers_that_change_are_an_error_on_all_ranks(kind: str) -> None:
    first, second = (found[kind] for found in results_of("buffered:twice", 2, kinds=[kind]))

    for said, _ in second:
        assert all(CHANGED in one for one in said)
    for said, _ in first:
        assert all("Error: " in one for one in said)


@pytest.mark.whole
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="a model of transformers"
)
def test_a_model_with_rotary_embeddings_runs_twice_in_a_step() -> None:
    for found in results_of("buffered:llama", 2):
        assert [said for said, _ in found] == ["nothing"] * 3
        assert max(far for _, far in found) < 1e-12
