"""An error at many places of a call of transformers' Trainer leaves the run as it is without."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, images, labelled, lm, segmenter, t5, tokens, trainer, vit_segmenter
from hf_runs import plain, run, sweep
from runs import HALF, SINGLE, at_most, differences, peak_of
from test_trl_sweep import dpo, kto, online, reward, sft

import oomkit
from oomkit.testing import inject_oom
from oomkit.transformers import protect, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class OwnMean(hf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Weighted(hf.Trainer):
    by_hand = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 5.0])
        if self.by_hand:
            each = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
            loss = (each * weight[labels]).sum() / weight[labels].sum()
        else:
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


def _mean_func(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def _sum_func(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return loss / (num_items_in_batch or len(labels))


def _figures(given: Any) -> dict[str, float]:
    """Metrics that differ where one prediction does."""
    values = given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions
    return {"sum": float(values.astype("float64").sum()), "labels": float(given.label_ids.sum())}


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(lm(), LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0))


def _scaled() -> Any:
    made = trainer(lm, tokens())
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return made


def _itemless() -> torch.nn.Module:
    """A model that says that its loss is a mean, whatever the trainer has counted."""
    model = lm()
    model.accepts_loss_kwargs, model.loss_type = False, "ForCausalLM"
    return model


class Shifts(hf.GPT2LMHeadModel):  # type: ignore[misc]
    """Takes nothing but its inputs; its loss is a mean over tokens, which it shifts itself."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        shown, expected = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": torch.nn.functional.cross_entropy(shown, expected), "logits": logits}


def _shifts() -> torch.nn.Module:
    model = Shifts(lm().config)
    model.loss_type = "ForCausalLM"  # by which the trainer knows
    return model


def _generating() -> Any:
    return trainer(
        t5,
        tokens(),
        hf.Seq2SeqTrainer,
        arguments_kind=hf.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=6,
        compute_metrics=_figures,
        data_collator=hf.default_data_collator,
    )


@dataclasses.dataclass
class Setting:
    make: Callable[[], Any]
    calls: tuple[int, ...] = (1, 4)  # of training
    exact: bool = True
    limit: float = SINGLE


SETTINGS = {
    "lm": Setting(lambda: trainer(lm, tokens())),
    "lm_4": Setting(lambda: trainer(lm, tokens(), gradient_accumulation_steps=4)),
    "lm_last_window_shorter": Setting(
        lambda: trainer(lm, tokens(), gradient_accumulation_steps=3), (3, 4)
    ),
    "lm_without_items": Setting(lambda: trainer(_itemless, tokens())),
    "lm_without_items_2": Setting(
        lambda: trainer(_itemless, tokens(), gradient_accumulation_steps=2)
    ),
    "own_forward": Setting(lambda: trainer(_shifts, tokens())),
    "lm_smoothed": Setting(lambda: trainer(lm, tokens(), label_smoothing_factor=0.1)),
    "lm_bf16": Setting(lambda: trainer(lm, tokens(), bf16=True), limit=HALF),
    "lm_scaler": Setting(_scaled),
    "lm_checkpointing": Setting(lambda: trainer(lm, tokens(), gradient_checkpointing=True)),
    "lm_lora": Setting(lambda: trainer(_lora, tokens())),
    "lm_adamw": Setting(lambda: trainer(lm, tokens(), optim="adamw_torch", adam_epsilon=1e-2)),
    "classes": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification"), labelled("class"), compute_metrics=_figures
        )
    ),
    "classes_4": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification"),
            labelled("class"),
            gradient_accumulation_steps=4,
        )
    ),
    "classes_dropout": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification", 0.2), labelled("class"), eval_strategy="no"
        ),
        exact=False,
    ),
    "classes_dropout_4": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification", 0.2),
            labelled("class"),
            gradient_accumulation_steps=4,
            eval_strategy="no",
        ),
        exact=False,
    ),
    "masked_lm": Setting(lambda: trainer(lambda: bert("MaskedLM"), labelled("masked"))),
    "tags": Setting(lambda: trainer(lambda: bert("TokenClassification"), labelled("tags"))),
    "regression": Setting(
        lambda: trainer(lambda: bert("SequenceClassification", num_labels=1), labelled("float"))
    ),
    "t5_generates": Setting(_generating),
    "segmentation": Setting(lambda: trainer(segmenter, images())),
    "segmentation_vit": Setting(lambda: trainer(vit_segmenter, images(size=16))),
    "own_mean": Setting(
        lambda: trainer(lambda: bert("SequenceClassification"), labelled("class"), OwnMean)
    ),
    "func_mean": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification"), labelled("class"), compute_loss_func=_mean_func
        )
    ),
    "func_sum": Setting(
        lambda: trainer(
            lambda: bert("SequenceClassification"), labelled("class"), compute_loss_func=_sum_func
        )
    ),
}
_EVALUATED = [name for name in SETTINGS if name != "lm_scaler" and "dropout" not in name]


@pytest.mark.parametrize("name", SETTINGS)
def test_training_survives(name: str) -> None:
    setting = SETTINGS[name]
    for number in setting.calls:
        seen = sweep(
            setting.make, "training_step", number, exact=setting.exact, limit=setting.limit
        )
        assert seen["split"], seen


@pytest.mark.parametrize("name", _EVALUATED)
def test_evaluation_survives(name: str) -> None:
    setting = SETTINGS[name]
    seen = sweep(setting.make, "prediction_step", 1, limit=setting.limit)
    assert seen["split"], seen


def _far(make: Callable[[], Any]) -> Any:
    """A trainer whose model has another loss for each row."""
    made = make()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("name", [n for n in _EVALUATED if n != "lm_bf16"])
def test_an_evaluated_loss_has_the_weights_of_the_whole(name: str) -> None:
    """Labels that count, those of a shifted loss without the first; else rows."""
    found = []
    for count in 1, 2, 3, 4:
        made = protect(_far(SETTINGS[name].make), accumulation_steps=count)
        found.append(made.evaluate()["eval_loss"])
        assert {record.accumulation_steps for record in records(made)} == {count}
    assert found == pytest.approx(found[:1] * 4, rel=1e-6)


def _later_window() -> Any:
    return trainer(
        lambda: bert("SequenceClassification", 0.2),
        labelled("class"),
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        eval_strategy="no",
    )


def test_known_shapes_in_a_later_window_with_dropout() -> None:
    """The error is in the backward of a call that adds to gradients of earlier ones."""
    seen = sweep(_later_window, "training_step", 7, exact=False)
    assert seen["split"] and seen["again"], seen


@pytest.mark.parametrize("make", [SETTINGS["lm_4"].make, _later_window], ids=["lm", "dropout"])
def test_windows_survive_bit_for_bit_with_copies_of_gradients(make: Callable[[], Any]) -> None:
    def protect(made: Any) -> Any:
        return oomkit.transformers.protect(made, gradient_safety="copy")

    exact = make is not _later_window
    seen = sweep(make, "training_step", 4, exact=exact, protect=protect)
    assert seen["split"] and not seen["again"], seen


def test_a_call_that_is_made_again_has_no_copies_of_inputs() -> None:
    """The loop's own tensors are read again."""
    made = oomkit.transformers.protect(_later_window())
    ours, read, fault = [], set(), inject_oom(nth=60, times=2)

    def look(model: Any, args: Any, kwargs: Any) -> None:
        read.add(kwargs["input_ids"].untyped_storage().data_ptr())

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ours.append(inputs["input_ids"])
        if len(ours) != 4:
            return protected(model, inputs, *args, **kwargs)
        with fault:
            return protected(model, inputs, *args, **kwargs)

    protected, made.training_step = made.training_step, training_step
    made.model.register_forward_pre_hook(look, with_kwargs=True)
    made.train()
    assert fault.fired and oomkit.transformers.records(made)[3].accumulation_steps > 1
    assert read == {each.untyped_storage().data_ptr() for each in ours}


@pytest.mark.refusals
def test_a_mean_over_weights_that_the_loss_makes_itself_is_refused() -> None:
    def make() -> Any:
        return trainer(
            lambda: bert("SequenceClassification"),
            labelled("class"),
            Weighted,
            eval_strategy="no",
            seed=2,  # the first batch has more than one class in each half
        )

    begun, _, _ = run(make, train=lambda t: None)
    failed, _, _ = run(make, number=1, fault={"nth": 20})
    assert isinstance(failed.error, oomkit.SplitError)
    assert "cannot split Weighted.training_step exactly" in str(failed.error)
    for name, value in begun.parameters.items():
        assert torch.equal(value, failed.parameters[name])
    said, _, made = run(make, lambda it: protect(it, inexact="warn"), number=1, fault={"nth": 20})
    assert said.error is None and len(records(made)) == 4
    assert any("but not exactly" in line for line in said.said), said.said


class WeightedByTorch(Weighted):
    by_hand = False


def test_a_mean_over_class_weights_that_the_loss_makes_itself_is_exact() -> None:
    """The weights are read from the graph of the loss."""

    def make() -> Any:
        kind = WeightedByTorch
        return trainer(lambda: bert("SequenceClassification"), labelled("class"), kind, seed=2)

    seen = sweep(make, "training_step", 1)
    assert seen["split"], seen


@pytest.mark.parametrize("method", ["training_step", "compute_loss"])
def test_either_place_gives_the_same(method: str) -> None:
    make = SETTINGS["lm_4"].make

    def protect(trainer: Any) -> Any:
        return oomkit.transformers.protect(trainer, at=method)

    reference, _, _ = run(make, lambda trainer: trainer, method)
    outcome, arm, _ = run(make, protect, method, 3, {"nth": 30})
    assert arm.fired
    assert not differences(reference, outcome, 1e-4)


# Whole runs with a third of the memory that they take.

MORE = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 8, "num_train_epochs": 4}


def _with_reference(kind: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return online(kind, beta=0.1, output_dir=folder, **MORE)


RUNS = {
    "language model": lambda: trainer(
        lm, tokens(64), **{**MORE, "per_device_train_batch_size": 32}
    ),
    "accumulation": lambda: trainer(lm, tokens(64), gradient_accumulation_steps=2, **MORE),
    "BERT": lambda: trainer(
        lambda: bert("SequenceClassification"),
        labelled("class", 128),
        optim_args="momentum=0.9",
        **{**MORE, "per_device_train_batch_size": 64},
    ),
    "Seq2Seq": lambda: trainer(
        t5,
        tokens(32),
        hf.Seq2SeqTrainer,
        arguments_kind=hf.Seq2SeqTrainingArguments,
        **MORE,
    ),
    "SFT": lambda: sft(**MORE),
    "DPO": lambda: dpo(**MORE),
    "Reward": lambda: reward(**MORE),
    "KTO": lambda: kto(**MORE),
    "GRPO": lambda: online(**MORE),
    "GRPO with a reference": lambda: _with_reference("GRPO"),
    "RLOO": lambda: online("RLOO", **MORE),
    "RLOO with a reference": lambda: _with_reference("RLOO"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_a_third_of_the_memory(name: str) -> None:
    """The plain program dies; the protected one ends, and what it has learnt is the same."""
    make = RUNS[name]
    run(make, plain)  # what is kept from the first use on
    reference, third = peak_of(lambda: run(make, plain)[0], 3)
    assert reference.error is None
    with at_most(third):
        died, _, _ = run(make, plain)
    assert isinstance(died.error, torch.OutOfMemoryError)
    del died
    with at_most(third):
        outcome, _, made = run(make, protect)
    assert outcome.error is None, outcome.error
    assert max(record.accumulation_steps for record in records(made)) > 1
    assert not differences(reference, outcome, 10 * SINGLE)
