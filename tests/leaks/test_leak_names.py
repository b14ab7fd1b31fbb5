"""Each public name is used many times and leaves nothing; a name without a use fails here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    leak_uses,
    leak_uses_loops,  # noqa: F401  (registers uses)
)
from helpers.leak_uses import (
    COVERED,
    NEEDS_MORE,
    USES,
    grown,
    lacking,
    nothing_else_counted,
    public_names,
)
from helpers.sample import sampled, with_rest

import oomkit
from leaks.leak_slope import FORMS, resident, slope

TESTS = Path(__file__).parents[1]
TIMES = 60


@pytest.fixture(autouse=True, scope="module")
def _nothing_else_is_counted() -> Iterator[None]:
    with nothing_else_counted():
        yield


def test_each_public_name_has_a_use() -> None:
    missing = lacking()
    assert not missing, (
        f"no leak test uses {', '.join(missing)}: add the name to the @covers(...) of a use in "
        "tests/helpers/leak_uses.py, or write one there"
    )


def test_no_use_is_of_a_name_that_is_gone() -> None:
    assert COVERED.keys() | NEEDS_MORE.keys() <= public_names() | {"testing"}


def test_a_new_name_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class New:
        def method(self) -> None:
            pass

    monkeypatch.setattr(oomkit, "New", New, raising=False)
    monkeypatch.setattr(oomkit, "__all__", [*oomkit.__all__, "New"])
    assert lacking() == ["New", "New.method"]


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("name", with_rest(sampled([*USES], 8, "uses"), [*USES]))
def test_a_use_leaves_nothing(name: str) -> None:
    assert grown(USES[name], TIMES) == {}


KEPT: list[Any] = []


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        (lambda: KEPT.append(object()), "blocks of the interpreter"),
        (lambda: KEPT.append([]), "objects of the collector"),
        (lambda: KEPT.append(torch.empty(3)), "bytes of tensors"),
        (lambda: KEPT.append(oomkit.guard()), "references to guard"),
        (lambda: KEPT.append(None), "references to None"),
    ],
)
def test_each_kind_of_leak_is_seen(leak: Any, what: str) -> None:
    try:
        assert what in grown(leak, TIMES)
    finally:
        KEPT.clear()


def test_every_type_is_counted() -> None:
    """Those of state.h's list, but for the exceptions."""
    names = {t.__qualname__ for t in leak_uses.KINDS}
    assert {"Step", "guard", "StepRecord", "OOMReport", "Current", "BoundStep"} <= names
    assert len(names) >= 14, sorted(names)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("form", FORMS)
def test_many_ooms_make_the_process_no_larger(form: str) -> None:
    """A few hundred of them, and room for arenas of the interpreter: 10,000 are in
    `make prove`, where there is none."""
    slope(FORMS[form], 20)  # what torch and the first proof import stays
    before = resident()
    _, wrong = slope(FORMS[form], 400)
    assert [line for line in wrong if "the process grows" not in line] == []
    assert resident() - before < 8 << 20


def test_a_leak_is_in_the_slope() -> None:
    """In a process of its own: what earlier tests freed would hide how much this one grows."""
    program = (
        "import oomkit, torch; from leaks.leak_slope import slope; kept = []; "
        "oomkit.limit_memory(2**50, device='cpu'); "  # tensors are counted from now on
        "print(len(slope(lambda i: kept.append(torch.ones(100_000)), 80)[1]))"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "3", done.stderr
