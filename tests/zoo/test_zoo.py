"""Every model of the zoo at a few places; `make prove` fails every one of them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from helpers.sample import sampled, with_rest

from .base import SEED
from .case import Case, cases_of
from .catalogue import MODELS
from .dense import classify, mlp, rows
from .model import ROWS, Expected, Model
from .sweep import Outcome, sweep

CASES, PLACES = 1, 1

QUICK = [name for name, model in MODELS.items() if not model.compiled]


@pytest.mark.parametrize("name", with_rest(sampled(QUICK, 10, "models"), QUICK))
def test_model(name: str) -> None:
    model = MODELS[name]
    first, *others = cases_of(model)
    drawn = random.Random(f"{SEED} {name}").sample(others, CASES)
    plain, others_found = sweep(model, [first], 2 * PLACES), sweep(model, drawn, PLACES)
    told = [f"{outcome.faults} faults: {dict(outcome.kinds)}" for outcome in (plain, others_found)]
    print(f"seed {SEED}; {'; '.join(told)}; {[str(case) for case in drawn]}")
    failures = plain.failures + others_found.failures
    assert not failures, "\n".join(failures)
    assert plain.faults == 4 * PLACES and others_found.faults == 2 * PLACES * CASES
    if MODELS[name].expected(first, "forward") is None:
        assert plain.kinds["recovered"] == plain.faults


def test_every_model_has_what_its_cases_need() -> None:
    for model in MODELS.values():
        cases = cases_of(model)
        assert {case.form for case in cases} == set(model.forms), model.name
        assert len(set(cases)) == len(cases)
        if not model.compiled:
            assert cases[0].gradients == "absent" and cases[0].k == 1
            for reason in model.without.values():
                assert reason
        torch.manual_seed(SEED)
        assert model.make(torch.float32).training


def _swept(model: Model, *cases: Case, places: int = 3) -> Outcome:
    return sweep(model, list(cases), places)


PLAIN = Model("tried", mlp, rows, classify)


def _with(**changed: object) -> Model:
    return dataclasses.replace(PLAIN, **changed)


def test_a_difference_of_any_kind_is_found() -> None:
    """Python's own random numbers, which nobody rolls back."""

    def drawn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return classify(model, batch) * (1 + scale.random())

    scale = random.Random(SEED)
    found = _swept(_with(loss=drawn), Case())
    assert found.failures and all("after call 0: " in failure for failure in found.failures)


@pytest.mark.refusals
def test_a_refusal_that_is_not_stated_is_found_and_one_that_is_stated_but_does_not_come() -> None:
    def odd(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        batch = rows(dtype)
        return {**batch, "y": torch.cat([batch["y"], batch["y"][:1]])}

    def first_rows(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return classify(model, {**batch, "y": batch["y"][: len(batch["x"])]})

    found = _swept(_with(batch=odd, loss=first_rows), Case())
    assert len(found.failures) == 6 and "SplitError: auto_batch" in found.failures[0]
    stated = Expected("SplitError", "nothing", "there is none")
    found = _swept(_with(expected=lambda case, phase: stated), Case())
    assert len(found.failures) == 6 and "recovered where" in found.failures[0]


def test_something_that_a_refusal_leaves_behind_is_found() -> None:
    """The step itself counts in a buffer that no copy is taken of."""

    class Counts(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.n = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            setattr(self.n, "".join(("da", "ta")), self.n + 1)  # out of the reader's sight
            return super().forward(x)

    model = _with(make=lambda dtype: Counts().to(dtype))
    found = _swept(model, Case(form="backward", times="always"))
    assert found.failures and "changed" in found.failures[0], found.failures


def test_where_every_allocation_fails_the_step_has_not_begun() -> None:
    found = _swept(PLAIN, *[Case(form=form, times="always") for form in PLAIN.forms])
    assert not found.failures, found.failures
    assert found.kinds["exhausted"] == found.faults > ROWS
