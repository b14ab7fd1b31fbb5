"""A few random programs; `make prove` runs many (tests/prove/suites.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis (requirements/dev.txt) is not installed")

from .compare import difference  # noqa: E402
from .machine import Programs  # noqa: E402
from .run import explore  # noqa: E402

PROGRAMS = 40


def test_random_programs_agree_with_their_twins() -> None:
    counts = explore(1, PROGRAMS, shrink=False)
    # What the programs are made of has to lead to what is to be tested.
    assert counts["calls"] > 2 * PROGRAMS
    assert counts["split"] > PROGRAMS / 2
    assert counts["calls with faults"] > PROGRAMS / 4
    assert counts["out of memory"] < counts["calls"] / 3


class Misled(Programs):
    """Sums are declared as means and the other way round. No proof refuses that first."""

    def _decorate(self, options: dict[str, Any]) -> None:
        wrong = {"mean": "sum", "sum": "mean"}[options.get("reduction", "sum")]
        super()._decorate({**options, "reduction": wrong, "weight": None, "verify": False})


def test_a_wrong_gradient_is_found() -> None:
    with pytest.raises(AssertionError, match="state\\['(gradients|parameters)|returned"):
        explore(1, PROGRAMS, shrink=False, machine=Misled)


def test_what_is_not_equal_is_named() -> None:
    one = {"loss": torch.ones(2, dtype=torch.float64), "more": [None, 3, 0.5]}
    two = {"loss": torch.ones(2, dtype=torch.float64), "more": [None, 3, 0.5]}
    assert difference(one, two, exact=True) is None
    two["loss"] = two["loss"] + 1e-12
    assert difference(one, two, exact=False) is None
    assert "['loss']" in str(difference(one, two, exact=True))
    two["loss"] = two["loss"] + 1e-9
    assert "['loss']: 1.0e-09 apart" in str(difference(one, two, exact=False))
    assert "nan apart" in str(
        difference({"loss": one["loss"] * torch.nan}, {"loss": one["loss"]}, False)
    )
    two["loss"], two["more"] = one["loss"], [None, 3]
    assert "['more']: 3 elements instead of 2" in str(difference(one, two, exact=False))
    two["more"] = [0, 3, 0.5]
    assert "NoneType instead of int" in str(difference(one, two, exact=False))
