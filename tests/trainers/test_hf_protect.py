"""`oomkit.transformers.protect`: what it puts where, what it refuses, what is left after it."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, lm, tokens, trainer
from hf_runs import plain, run
from runs import SINGLE, differences

import oomkit
from oomkit.testing import inject_oom
from oomkit.transformers import protect, records, unprotect

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _made(**more: Any) -> Any:
    made = trainer(lm, tokens(), **more)
    made.remove_callback(hf.PrinterCallback)
    return made


class OddStep(hf.Trainer):
    def training_step(self, model, inputs):
        return super().training_step(model, inputs)


class OwnStep(hf.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


class OwnInputs(hf.Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


# --- bad input ---


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda: hf.TrainingArguments(report_to=[]), "'TrainingArguments'"),
        (lm, "'GPT2LMHeadModel'"),
        (lambda: hf.Trainer, "the class Trainer"),
        (lambda: None, "'NoneType'"),
    ],
)
@pytest.mark.parametrize("function", [protect, unprotect, records])
def test_what_is_no_trainer(function: Any, given: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"expected a Trainer of transformers, got {got}"):
        function(given())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"at": "forward"}, ValueError, r"\('training_step', 'compute_loss'\) or None"),
        ({"inexact": "maybe"}, ValueError, "'error' or 'warn', got 'maybe'"),
        *[
            ({name: 1}, TypeError, f"got {name}=, expected at, .* auto_batch: .*gradient_safety")
            for name in ("batch static split join weight global_weight reduction backward".split())
        ],
        ({"weights": 1}, TypeError, "got weights=, expected at"),
    ],
)
def test_options_that_there_are_not(options: Any, error: Any, text: str) -> None:
    made = _made()
    before = dict(vars(made))
    with pytest.raises(error, match=text):
        protect(made, **options)
    assert vars(made) == before


def test_options_that_say_what_the_batch_is_are_not_offered() -> None:
    with pytest.raises(TypeError) as caught:
        protect(_made(), batch="inputs")
    offered = str(caught.value).partition("auto_batch: ")[2].partition("\n")[0].split(", ")
    assert "rng" in offered and not {"batch", "static", "split", "join"} & set(offered)


def test_options_of_auto_batch_are_checked_by_it() -> None:
    made = _made()
    with pytest.raises(ValueError, match="rng"):
        protect(made, rng="dice")
    assert "training_step" not in vars(made)


def test_a_step_of_another_signature() -> None:
    made = trainer(lm, tokens(), OddStep)
    with pytest.raises(TypeError, match=r"OddStep.training_step to take .*\(self, model, inputs\)"):
        protect(made, at="training_step")


def test_a_trainer_that_restarts_with_smaller_batches() -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size=True: it begins the training again"):
        protect(_made(auto_find_batch_size=True))


def test_kinds_that_are_refused_by_name() -> None:
    def mixtral() -> torch.nn.Module:
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_local_experts=2,
                output_router_logits=True,
            )
        )

    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        protect(trainer(mixtral, tokens()))
    several = _made()
    several.args._n_gpu = 2
    with pytest.raises(ValueError, match="n_gpu=2"):
        protect(several)


def test_while_it_trains() -> None:
    class Late(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            protect(made)

    made = _made(callbacks=[Late()])
    with pytest.raises(RuntimeError, match="call it before train"):
        made.train()


# --- where ---


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (hf.Trainer, {"training_step", "prediction_step"}),
        (OwnStep, {"compute_loss", "prediction_step"}),
        (OwnInputs, {"compute_loss", "training_step"}),  # around it: the calls of an update
    ],
)
def test_the_place_is_found(kind: Any, names: set[str]) -> None:
    made = protect(trainer(lm, tokens(), kind))
    methods = {"training_step", "compute_loss", "prediction_step"}
    assert methods & vars(made).keys() == names


def test_evaluation_may_be_left_alone() -> None:
    made = protect(_made(), evaluation=False)
    assert "prediction_step" not in vars(made)
    with inject_oom(nth=5, times=None), pytest.raises(torch.OutOfMemoryError) as caught:
        made.evaluate()
    assert not isinstance(caught.value, oomkit.OutOfMemory)


def test_protected_twice_has_the_new_options() -> None:
    made = _made()
    assert protect(protect(made), label="second") is made
    made.train()
    assert {record.label for record in records(made)} == {"second"}
    assert len([c for c in made.callback_handler.callbacks if "Oomkit" in type(c).__name__]) == 1
    unprotect(made)
    assert "training_step" not in vars(made)


def test_a_method_that_was_replaced_before_is_called_and_comes_back() -> None:
    made = _made()
    own, calls = made.training_step, []

    def replaced(*args: Any) -> Any:
        calls.append(1)
        return own(*args)

    made.training_step = replaced
    protect(made).train()
    assert len(calls) == 4
    assert unprotect(made).training_step is replaced


# --- what it leaves ---


def test_nothing_is_left_after_unprotect() -> None:
    made = _made()
    before, callbacks = dict(vars(made)), list(made.callback_handler.callbacks)
    assert unprotect(made) is made
    unprotect(protect(made, log=True))
    assert vars(made) == before
    assert made.callback_handler.callbacks == callbacks


def test_nothing_keeps_trainer_or_model_alive(no_gc: None) -> None:
    made = protect(_made(), log=True)
    model, kept = weakref.ref(made.model), weakref.ref(made)
    with inject_oom(nth=600):
        made.train()
    del made
    assert kept() is None and model() is None


def test_pickles_of_the_model_hold_nothing_of_ours() -> None:
    made = protect(_made())
    with inject_oom(nth=600):
        made.train()
    assert b"oomkit" not in pickle.dumps(made.model)


@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
def test_a_shallow_copy_of_a_trainer_is_one_without_oomkit(place: Any) -> None:
    """It shares what the trainer has, but not the methods that are protected."""

    class Numbered(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return super().compute_loss(model, inputs, *args, **more)

    made = trainer(lm, tokens(), Numbered)
    before = vars(made).keys() - {"calls"}
    copied = copy.copy(protect(made, log=True, at=place, accumulation_steps=2))
    assert records(copied) == () and vars(copied).keys() == before
    copied.remove_callback(hf.PrinterCallback)
    copied.train()
    assert copied.calls == 6 and not hasattr(made, "calls") and records(made) == ()
    protect(copied).train()
    assert len(records(copied)) == 6 and records(made) == ()
    assert unprotect(made).model is copied.model and records(copied)
    assert vars(made).keys() == before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_copy_of_a_trainer_is_one_without_oomkit(replaced: bool) -> None:
    """Its methods are its own: not those of the trainer that it was made of."""
    made, plain_one = _made(), _made()
    if replaced:
        made.log = functools.partial(hf.Trainer.log, made)
    copied = copy.deepcopy(protect(made, log=True))
    assert records(copied) == () and "oomkit" not in repr(copied.training_step)
    for again in (copied, plain_one):
        torch.manual_seed(1)
        again.train()
    assert records(made) == () and made.state.global_step == 0
    for one, two in zip(plain_one.model.parameters(), copied.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not any(line.keys() & {"oomkit/ooms"} for line in copied.state.log_history)
    protect(copied).train()
    assert len(records(copied)) == 6
    kinds = [type(each).__name__ for each in unprotect(copied).callback_handler.callbacks]
    assert "OomkitSizes" not in kinds


class Ends(hf.Trainer):
    """Its first step ends in an error: KeyError, or what oomkit raises."""

    by = "step"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        if self.by == "step":
            raise KeyError("broken")
        if self.by == "split":
            inputs.pop("labels")
            pooled = model(**inputs).logits.mean(1)
            return torch.nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        return super().compute_loss(model, inputs, return_outputs, **more)


ERRORS = {"step": KeyError, "split": oomkit.SplitError, "memory": oomkit.OutOfMemory}


@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
@pytest.mark.parametrize("by", ERRORS)
def test_an_error_leaves_what_it_leaves_without_oomkit(by: str, place: Any) -> None:
    """The trainer stays protected; after `unprotect` its attributes are those of a plain one."""

    def ended(by: str, protected: bool) -> tuple[Any, set[str]]:
        made = trainer(lm, tokens(), Ends)
        made.remove_callback(hf.PrinterCallback)
        made.by = by
        before = dict(vars(made))
        if protected:
            protect(made, at=place, log=True, accumulation_steps=2 if by == "split" else 1)
        nth = 40 if by == "memory" else 2**40
        with inject_oom(nth=nth, times=None), pytest.raises(ERRORS[by]):
            made.train()
        if protected:
            assert place in vars(made) and len(records(made)) == 1
            unprotect(made)
        now = vars(made)
        return made, {name for name in now if now[name] is not before.get(name)}

    (plain_one, its), (made, mine) = ended("step", False), ended(by, True)
    assert mine == its
    for name, value in vars(plain_one).items():
        assert type(vars(made)[name]) is type(value), name
    kinds = [[type(c) for c in it.callback_handler.callbacks] for it in (made, plain_one)]
    assert kinds[0] == kinds[1]


# --- logs, records, checkpoints ---


def test_figures_in_the_log() -> None:
    def protected(made: Any) -> Any:
        return protect(made, log=True)

    reference, _, _ = run(_made, plain)
    outcome, _, _ = run(_made, protected, number=2, fault={"nth": 30})
    lines = [line for line in outcome.log if "loss" in line]
    assert [line["oomkit/ooms"] for line in lines] == [0, 1, 0, 0]
    assert [line["oomkit/micro_batch"] for line in lines] == [4, 2, 2, 2]
    assert all(line["oomkit/peak_gib"] > 0 for line in lines)
    for line in outcome.log:
        for name in [name for name in line if name.startswith("oomkit/")]:
            del line[name]
    assert not differences(reference, outcome, SINGLE)


def test_records_are_those_of_training_and_of_evaluation() -> None:
    made = protect(_made())
    made.train()
    labels = [record.label for record in records(made)]
    assert labels == ["Trainer.training_step"] * 4 + ["Trainer.prediction_step"] * 2


def test_sizes_are_in_checkpoints_and_used_again(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    first = protect(_made(folder=tmp_path, **options))
    step = first.training_step

    def failing(*args: Any) -> Any:
        with inject_oom(nth=30 if first.state.global_step == 0 else 2**40):
            return step(*args)

    first.training_step = failing
    first.train()
    kept = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert "OomkitSizes" in kept["stateful_callbacks"]
    for again in ({}, {"restore_callback_states_from_checkpoint": True}):
        second = protect(_made(folder=tmp_path, **options, **again))
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        mine = [r for r in records(second) if r.label == "Trainer.training_step"]
        assert [r.accumulation_steps for r in mine] == [2, 2]
        for name, value in first.model.named_parameters():
            torch.testing.assert_close(dict(second.model.named_parameters())[name], value)


def test_once_per_step_as_before() -> None:
    """Callbacks, schedule and clipping see as many steps as without an error."""

    class Counts(hf.TrainerCallback):
        seen: dict[str, int]

        def __init__(self) -> None:
            self.seen = {}

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                self.seen[name] = self.seen.get(name, 0) + 1
            return object.__getattribute__(self, name)

    counts = []

    def make() -> Any:
        counts.append(Counts())
        return _made(callbacks=[counts[-1]], gradient_accumulation_steps=2)

    run(make, plain)
    outcome, _, _ = run(make, number=3, fault={"nth": 30})
    assert outcome.error is None
    assert counts[0].seen == counts[1].seen


def test_the_best_model_is_loaded_as_before(tmp_path: Path) -> None:
    def make() -> Any:
        return _made(
            folder=tmp_path / str(len(list(tmp_path.iterdir()))),
            num_train_epochs=3,
            save_strategy="epoch",
            load_best_model_at_end=True,
            learning_rate=0.5,
            callbacks=[hf.EarlyStoppingCallback(1)],
        )

    reference, _, _ = run(make, plain)
    outcome, _, _ = run(make, number=6, fault={"nth": 30})
    assert not differences(reference, outcome, 10 * SINGLE)


class Contrast(hf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels")
        pooled = model(**inputs).logits
        scores = pooled @ pooled.T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def _contrasting() -> Any:
    return trainer(
        lambda: bert("SequenceClassification"), labelled("class"), Contrast, eval_strategy="no"
    )


def test_coupled_samples_run_whole() -> None:
    reference, _, _ = run(_contrasting, plain)
    for nth in (1, 40):
        outcome, armed, _ = run(_contrasting, number=1, fault={"nth": nth})
        assert armed.fired and outcome.error is None
        assert any("runs with whole batches" in line for line in outcome.said)
        assert not differences(reference, outcome, 0.0)


@pytest.mark.refusals
def test_coupled_samples_are_refused_or_said() -> None:
    make = _contrasting
    failed, _, _ = run(make, number=1, fault={"nth": 40})
    assert isinstance(failed.error, oomkit.SplitError)
    assert "couples the samples" in str(failed.error)
    said, _, _ = run(make, lambda t: protect(t, inexact="warn"), number=1, fault={"nth": 40})
    assert said.error is None
    assert any("but not exactly" in line for line in said.said)


def test_a_batch_without_a_common_number_of_rows_is_kept_whole() -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        made = hf.default_data_collator(rows)
        return {**made, "attention_mask": made["attention_mask"][:3]}

    class Ignoring(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs.pop("attention_mask")
            return model(**inputs, num_items_in_batch=num_items_in_batch).loss

    def make() -> Any:
        return trainer(lm, tokens(), Ignoring, data_collator=collate, eval_strategy="no")

    def ladderless(made: Any) -> Any:
        return protect(made, ladder=())

    failed, _, _ = run(make, ladderless, number=1, fault={"nth": 30, "times": None})
    assert isinstance(failed.error, oomkit.OutOfMemory)
    assert "no number of rows in common" in str(failed.error)
    assert "attention_mask [3, 12], " in str(failed.error)


def _until(silent: int, value: float, scale: float, **more: Any) -> Any:
    """A trainer whose losses are multiplied in the first steps."""

    class Late(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = loss * value if self.state.global_step < silent else loss
            return (loss, outputs) if return_outputs else loss

    made = trainer(
        lambda: bert("SequenceClassification"),
        labelled("class", 32),
        Late,
        eval_strategy="no",
        logging_nan_inf_filter=False,
        **more,
    )
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return made


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("silent", [1, 2])
def test_losses_that_are_not_finite_prove_nothing(silent: int, value: float) -> None:
    """The kind of the loss is found in the first step that tells it; a scaler skips the others."""

    def make() -> Any:
        return _until(silent, value, 64.0)

    reference, _, _ = run(make, plain)
    outcome, arm, made = run(make, number=1, fault={"nth": 40})
    assert arm.fired and {r.accumulation_steps for r in records(made)} == {2}
    assert not differences(reference, outcome, SINGLE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_three_losses_that_are_not_finite_are_refused_or_said(value: float) -> None:
    def make() -> Any:
        return _until(8, value, 64.0)

    begun, _, _ = run(make, train=lambda t: None)
    failed, _, made = run(make, number=1, fault={"nth": 40})
    assert isinstance(failed.error, oomkit.SplitError)
    assert f"its loss was {value} in 3 split calls in a row" in str(failed.error)
    assert len(records(made)) == 3
    for name, parameter in begun.parameters.items():
        assert torch.equal(parameter, failed.parameters[name])
    for options in {"inexact": "warn"}, {"verify": False}:
        said, _, made = run(make, lambda t: protect(t, **options), number=1, fault={"nth": 40})  # noqa: B023
        assert said.error is None and len(records(made)) == 8
        found = [line for line in said.said if "nothing could be proven" in line]
        assert len(found) == (2 if "inexact" in options else 0)


def test_losses_that_stop_being_finite_are_the_runs_own() -> None:
    """A split was proven before: the run goes on as it does without oomkit."""

    class Late(hf.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, **more)
            loss = loss * (float("nan") if 3 <= self.state.global_step < 6 else 1.0)
            return (loss, outputs) if return_outputs else loss

    def make() -> Any:
        made = trainer(
            lambda: bert("SequenceClassification"),
            labelled("class", 64),
            Late,
            eval_strategy="no",
            logging_nan_inf_filter=False,
        )
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return made

    reference, _, _ = run(make, plain)
    outcome, arm, made = run(make, number=1, fault={"nth": 40})
    assert arm.fired and outcome.error is None
    assert {r.accumulation_steps for r in records(made)} == {2}
    assert not differences(reference, outcome, SINGLE)


def test_a_scaler_that_begins_too_high_is_no_such_loss() -> None:
    """As in half precision: gradients overflow in the first steps, which it skips."""

    def make() -> Any:
        return _until(0, 1.0, 2.0**127, max_grad_norm=0.0)

    reference, _, made = run(make, plain)
    skipped = 127 - int(torch.tensor(made.accelerator.scaler.get_scale()).log2())
    assert skipped >= 4
    outcome, arm, made = run(make, number=1, fault={"nth": 40})
    assert arm.fired and {r.accumulation_steps for r in records(made)} == {2}
    assert not differences(reference, outcome, SINGLE)


def test_tokens_seen_are_counted_once() -> None:
    def make() -> Any:
        return _made(include_num_input_tokens_seen="non_padding")

    reference, _, _ = run(make, plain)
    outcome, arm, _ = run(make, number=2, fault={"nth": 30})
    assert arm.fired and reference.rest["tokens"] > 0
    assert not differences(reference, outcome, SINGLE)


def test_statistics_of_a_batch_are_said() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16)
            self.last = torch.nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask=None, labels=None):
            logits = self.last(self.norm(self.first(input_ids / 64)))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    def make() -> Any:
        return trainer(Normed, labelled("class"), eval_strategy="no")

    outcome, arm, _ = run(make, number=2, fault={"nth": 10})
    assert arm.fired and outcome.error is None
    assert [line for line in outcome.said if "BatchNorm1d is in training mode" in line]
