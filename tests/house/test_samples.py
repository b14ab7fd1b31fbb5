"""What `make test` takes of a sweep is fair: spread, repeated by its seed, and printed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from helpers import sample

places, sampled, stride = sample.places, sample.sampled, sample.stride


@pytest.fixture(autouse=True)
def _a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "WHOLE", False)


def test_one_of_each_stretch_and_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    found = sampled(range(100), 10)
    assert [case // 10 for case in found] == list(range(10))
    assert found == sampled(range(100), 10)
    assert f"seed {sample.SEED} (OOMKIT_TEST_SEED), 10 of 100 cases" in capsys.readouterr().out
    assert sampled("abc", 3) == list("abc")


def test_others_meet_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of enough tests every case is met."""
    assert set().union(*(sampled(range(20), 4, f"test {n}") for n in range(60))) == {*range(20)}
    first = sampled(range(1000), 4)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a/test_a.py::test_b[a/b c] (call)")
    second = sampled(range(1000), 4)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "a/test_a.py::test_b[a/b c] (call)")
    assert first != second == sampled(range(1000), 4)
    monkeypatch.setattr(sample, "SEED", 1)
    assert second != sampled(range(1000), 4)


def test_each_kind_and_what_is_always_wanted() -> None:
    found = sampled(range(100), 2, kind=lambda case: case % 7, always=lambda case: case == 5)
    assert {case % 7 for case in found} == {*range(7)} and 5 in found and len(found) <= 9


def test_a_sweep_without_a_known_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, every = stride(8)
    assert 1 <= first <= every == 8
    assert [*itertools.islice(places(8), 3)] == [first, first + 8, first + 16]
    assert {stride(8, f"test {n}")[0] for n in range(60)} == {*range(1, 9)}
    monkeypatch.setattr(sample, "WHOLE", True)
    assert stride(8) == (1, 1) and sampled(range(100), 10) == [*range(100)]


def test_the_rest_is_there_by_its_name() -> None:
    first, second, third = sample.with_rest([("a", 1)], [("a", 1), ("b", 2), "c"])
    assert first == ("a", 1)
    assert (second.values, third.values) == (("b", 2), ("c",))
    assert [mark.name for one in (second, third) for mark in one.marks] == ["whole", "whole"]


def test_a_fair_part_has_all_values_where_it_can() -> None:
    cases = [{"a": a, "b": b} for a in range(6) for b in range(5)]
    for n in range(20):
        part = sample.fair_part(cases, 12, f"test {n}")
        assert len(part) == 12 and part == sample.fair_part(cases, 12, f"test {n}")
        assert {cases[i]["a"] for i in part} == {*range(6)}
        assert {cases[i]["b"] for i in part} == {*range(5)}
    assert len(sample.fair_part(cases, 3, "")) == 3
    assert sample.fair_part(cases, 99, "") == {*range(30)}
    assert set().union(*(sample.fair_part(cases, 12, f"{n}") for n in range(60))) == {*range(30)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", range(12))
def test_three_of_these_are_drawn(n: int, request: pytest.FixtureRequest) -> None:
    """Of the others `make test` knows the names."""
    of = request.node.nodeid.partition("[")[0] + "["
    here = [item for item in request.session.items if item.nodeid.startswith(of)]
    rest = {item.nodeid for item in here if item.get_closest_marker("whole")}
    rest.update(n for n in request.config.stash.get(sample.LEFT_OUT, []) if n.startswith(of))
    names = rest.union(item.nodeid for item in here)
    if len(names) == 12:  # not where some are named
        assert len(rest) == (0 if os.environ.get("OOMKIT_TEST_WHOLE") == "1" else 9)


def test_what_is_left_out_is_proven() -> None:
    """`make prove` runs each file that has the mark."""
    from prove.suite import sampling
    from prove.suites import SUITES

    proven = {unit for suite in SUITES for unit in suite.units()}
    for file in sampling():
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        if any(sign in text for sign in ("with_rest", "mark.whole", "mark.sample(")):
            assert file in proven, file
