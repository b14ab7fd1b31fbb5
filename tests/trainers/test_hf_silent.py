"""Losses that prove nothing, as they are 0 in every row, and metrics that no table knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import trl
from hf_models import bert, labelled, trainer
from hf_runs import plain, run
from runs import SINGLE, differences, timeless
from test_trl_sweep import online, sft

import oomkit
from oomkit.transformers import protect, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Hinge(hf.Trainer):
    """A mean over rows; in the first updates no row has a loss."""

    zero = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        labels = inputs.pop("labels")
        scores = model(**inputs).logits
        losses = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
        return (losses - (100 if self.state.global_step < self.zero else 0)).relu().mean()


class Contrast(Hinge):
    """Each row's loss is one of all rows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        inputs.pop("labels")
        pooled = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        return loss * (0.0 if self.state.global_step < self.zero else 1.0)


def _made(kind: Any, zero: int) -> Any:
    made = trainer(
        lambda: bert("SequenceClassification"), labelled("class", 32), kind, eval_strategy="no"
    )
    made.zero = zero
    return made


INEXACT = ["error", "warn"]


@pytest.mark.parametrize("inexact", INEXACT)
@pytest.mark.parametrize("zero", [1, 3, 8])
def test_a_loss_of_0_in_every_row_is_split_as_any_other(zero: int, inexact: Any) -> None:
    reference, _, _ = run(lambda: _made(Hinge, zero), plain)
    outcome, arm, made = run(
        lambda: _made(Hinge, zero),
        lambda it: protect(it, inexact=inexact),
        number=1,
        fault={"nth": 40},
    )
    assert arm.fired and {record.accumulation_steps for record in records(made)} == {2}
    assert not differences(reference, outcome, SINGLE)
    assert not [line for line in outcome.said if "exact" in line], outcome.said


@pytest.mark.parametrize("kind", [Hinge, Contrast])
@pytest.mark.parametrize("inexact", INEXACT)
def test_a_loss_of_0_is_nothing_to_decide_before_a_split_is_due(kind: Any, inexact: Any) -> None:
    reference, _, _ = run(lambda: _made(kind, 3), plain)
    outcome, _, made = run(lambda: _made(kind, 3), lambda it: protect(it, inexact=inexact))
    assert {record.accumulation_steps for record in records(made)} == {1}
    assert not differences(reference, outcome, 0.0) and not outcome.said


@pytest.mark.parametrize("inexact", INEXACT)
@pytest.mark.parametrize("zero", [1, 2, 3, 5])
@pytest.mark.refusals
def test_coupled_rows_are_found_in_their_first_loss_that_is_not_0(zero: int, inexact: Any) -> None:
    begun, _, _ = run(lambda: _made(Contrast, zero), plain, train=lambda it: None)
    outcome, arm, made = run(
        lambda: _made(Contrast, zero),
        lambda it: protect(it, inexact=inexact),
        number=1,
        fault={"nth": 40},
    )
    assert arm.fired
    if inexact == "warn":
        assert outcome.error is None and len(records(made)) == 8
        assert any("but not exactly" in line for line in outcome.said), outcome.said
        return
    assert isinstance(outcome.error, oomkit.SplitError), outcome.error
    assert "couples the samples" in str(outcome.error)
    assert outcome.rest["global_step"] == zero
    for name, parameter in begun.parameters.items():
        assert torch.equal(parameter, outcome.parameters[name]), name


# --- losses that cancel ---


class Coupled(trl.GRPOTrainer):
    """A loss of its own, in which rows are coupled."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **more)
        return loss if model.training else loss + 1 / len(inputs["completion_ids"])


def test_an_evaluated_loss_whose_advantages_cancel_is_no_coupled_one() -> None:
    """Rounding is all that is left of it, and there are no gradients to compare."""

    def make() -> Any:
        sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        return online(loss_type="grpo", num_generations=4, num_train_epochs=2, **sizes)

    reference, _, _ = run(make, plain)
    evaluated = [line["eval_loss"] for line in reference.log if "eval_loss" in line]
    assert evaluated and max(map(abs, evaluated)) < 1e-5
    for inexact in INEXACT:
        outcome, arm, _ = run(
            make,
            lambda it: protect(it, inexact=inexact),  # noqa: B023
            method="compute_loss",
            number=5,
            fault={"nth": 1},
        )
        assert arm.fired and not differences(reference, outcome, SINGLE)
        assert not [line for line in outcome.said if "exact" in line], outcome.said


KINDS = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")


@pytest.mark.parametrize("kind", [*KINDS, "RLOO"])
def test_evaluated_losses_of_generated_text_in_parts(kind: str) -> None:
    """What is a mean over what is known, whatever a part has of it."""
    found = []
    for count in 1, 2, 3, 8:
        sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        more = {} if kind == "RLOO" else {"loss_type": kind}
        family = "RLOO" if kind == "RLOO" else "GRPO"
        made = protect(online(family, num_generations=4, **sizes, **more), accumulation_steps=count)
        found.append(made.evaluate()["eval_loss"])
        assert {record.accumulation_steps for record in records(made)} == {count}
    assert found == pytest.approx(found[:1] * 4, rel=1e-5, abs=1e-6)
    assert kind in ("grpo", "RLOO") or abs(found[0]) > 0.01


class CoupledInside(trl.GRPOTrainer):  # type: ignore[misc]
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return super()._compute_loss(model, inputs) + model(**_shown(inputs)).logits.var()


def _shown(inputs: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": inputs["completion_ids"], "attention_mask": inputs["completion_mask"]}


@pytest.mark.parametrize("kind", [Coupled, CoupledInside])
@pytest.mark.refusals
def test_other_evaluated_losses_are_proven(kind: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", kind)
        sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        made = online(loss_type="grpo", num_generations=4, num_train_epochs=2, **sizes)
    outcome, arm, _ = run(
        lambda: made,
        method="compute_loss",
        number=5,
        fault={"nth": 1},
    )
    assert arm.fired and isinstance(outcome.error, oomkit.SplitError), outcome.error


def test_an_evaluated_loss_of_an_experimental_trainer_is_proven(tmp_path: Path) -> None:
    """Its loss is a mean over sequences, whatever `loss_type` says."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", GMPOTrainer)
        patch.setattr(trl, "GRPOConfig", GMPOConfig)
        made = online(beta=1.0, output_dir=tmp_path, per_device_eval_batch_size=8)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1.5)  # far from its reference
    whole = made.evaluate()["eval_loss"]
    assert abs(whole) > 0.01
    protect(made, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="GMPOTrainer.compute_loss exactly"):
        made.evaluate()


# --- metrics ---


class Lengths(trl.SFTTrainer):
    """Notes two means over rows beside TRL's own metrics, which no table of oomkit has."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        lengths = (inputs["labels"] != -100).sum(1).float()
        result = super().compute_loss(model, inputs, *args, **more)
        mode = "train" if model.training else "eval"
        self._metrics[mode]["length"].append(lengths.mean().item())
        self._metrics[mode]["square"].append(lengths.square().mean().item())
        return result


def _lengths() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "SFTTrainer", Lengths)
        return sft()


def test_a_metric_that_no_table_knows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is a mean over rows, in training and in evaluation."""
    logs = []
    with caplog.at_level("DEBUG", "oomkit"):
        for count in 1, 2:
            made = protect(_lengths(), accumulation_steps=count)
            made.remove_callback(hf.PrinterCallback)
            made.train()
            logs.append(timeless(made.state.log_history))
    assert {record.accumulation_steps for record in records(made)} == {2}
    for line, other in zip(*logs, strict=True):
        assert other == pytest.approx(line, rel=1e-4)
    assert all(line.keys() >= {"length", "square"} for line in logs[0] if "loss" in line)
    said = [(r.levelname, r.message) for r in caplog.records if "the metric" in r.message]
    text = "the metric {} of a split call is a mean over its rows"
    assert said == [("INFO", text.format(name)) for name in ("length", "square")]
