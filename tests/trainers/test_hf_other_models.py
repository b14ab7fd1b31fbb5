"""What was proven of one trainer, or of one trial's model, is not believed of another."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, trainer
from hf_runs import plain, run
from runs import SINGLE, differences

import oomkit
from oomkit.transformers import protect, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

FAULT = {"nth": 30}


def _classifier(normal: bool = False) -> torch.nn.Module:
    model = bert("SequenceClassification")
    if normal:  # couples the rows in the backward alone: losses of parts are the whole one's
        model.classifier.weight.register_hook(lambda g: g / g.norm())
    return model


def _made(normal: bool = False, **more: Any) -> Any:
    return trainer(lambda: _classifier(normal), labelled("class"), eval_strategy="no", **more)


def _halved(made: Any) -> Any:
    return protect(made, accumulation_steps=2)


def test_the_proof_of_a_trainer_that_is_gone_is_not_of_the_next() -> None:
    """Under a limit sizes of steps that are gone are used again, and their proofs."""
    budget = (oomkit.memory("cpu").allocated or 0) + 2**30
    with oomkit.limit_memory(budget, device="cpu"):
        reference, _, _ = run(_made, plain)
        first, arm, made = run(_made, number=1, fault=FAULT)
        assert not differences(reference, first, SINGLE)
        assert {record.accumulation_steps for record in records(made)} == {2}
        del arm, made
        gc.collect()
        second, _, _ = run(lambda: _made(True), number=1, fault=FAULT)
    assert isinstance(second.error, oomkit.SplitError), second.error
    assert second.rest["global_step"] == 0


def test_the_proof_of_a_model_is_not_of_the_next_one() -> None:
    """`model_init` makes one for each training."""
    kinds = iter([False, False, True])
    made = trainer(
        None,
        labelled("class"),
        eval_strategy="no",
        model_init=lambda: _classifier(next(kinds)),
    )
    made.remove_callback(hf.PrinterCallback)
    _halved(made).train()
    assert [record.accumulation_steps for record in records(made)] == [2] * 4
    with pytest.raises(oomkit.SplitError):
        made.train()
    assert made.state.global_step == 0  # later on, losses alone would show it
    assert len(records(made)) >= 4  # those of the first training are kept


def test_losses_of_a_model_are_not_those_of_the_next_one() -> None:
    """Split losses of the first are finite; of those of the next, nothing can be proven."""

    class Lost(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = _classifier(), factor

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
            found = self.inner(input_ids, attention_mask, labels=labels)
            return {"loss": found.loss * self.factor, "logits": found.logits}

    factors = iter([1.0, 1.0, float("nan")])
    made = trainer(
        None, labelled("class"), eval_strategy="no", model_init=lambda: Lost(next(factors))
    )
    made.remove_callback(hf.PrinterCallback)
    _halved(made).train()
    assert [record.accumulation_steps for record in records(made)] == [2] * 4
    with pytest.raises(oomkit.SplitError, match="its loss was nan in 3 split calls in a row"):
        made.train()


def test_the_proof_of_a_model_is_not_of_one_that_is_protected_after_it() -> None:
    made = _halved(_made())
    made.remove_callback(hf.PrinterCallback)
    made.train()
    torch.manual_seed(0)
    made.model = made.model_wrapped = _classifier(normal=True)
    made.optimizer = made.lr_scheduler = None
    _halved(made)
    with pytest.raises(oomkit.SplitError):
        made.train()
    assert made.state.global_step == 0
