"""A part of evaluation_faults.py: some allocations of each model; `make prove` fails every one."""

import itertools
import logging

import pytest
from helpers.sample import sampled, stride

import oomkit
from evaluation.evaluation_faults import FORMS, TIMES, Found, World, one_fault, sweep


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


CASES = list(itertools.product(FORMS, TIMES))


@pytest.mark.parametrize(("name", "kind"), sampled(CASES, 5, "forms", kind=lambda case: case[0]))
def test_each_allocation_of_an_evaluation(name, kind):
    first, every = stride(113 if "generate" in name else 4)
    found = sweep(name, kind, every, first)
    assert found.failures == []
    assert found.faults >= 2
    assert found.leaked == 0
    if TIMES[kind] is None:
        assert found.refused > 0
    else:  # when the results cannot be put together twice, auto_batch says so
        assert found.recovered >= found.faults - (found.refused if "4 parts" in name else 0)
        assert found.refused <= 3


def test_the_verdict_sees_what_is_wrong(monkeypatch):
    """Other outputs, rows computed twice, something that stays."""
    kept = []

    def spoilt(world, fault):
        with fault:
            result = oomkit.map(world, world.batch)
        kept.append(result["logits"] + 1e-3)
        return {**result, "logits": kept[-1]}

    def twice(world, fault):
        oomkit.map(world, world.batch)
        with fault:
            return oomkit.map(world, world.batch)

    for form, texts in ((spoilt, ("other outputs", "bytes stay")), (twice, ("parts [",))):
        monkeypatch.setitem(FORMS, "wrong", (World, form))
        found = Found()
        assert one_fault("wrong", 3, 1, found)
        for text in texts:
            assert any(text in line for line in found.failures), (text, found.failures)
