"""Where `protect` puts itself in trainers of transformers and TRL, and what it does not touch."""

from __future__ import annotations

import json
import pickle
import re
import sys
import weakref
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import lm, t5, tokens, trainer
from hf_runs import plain, run
from runs import SINGLE, differences, gaps, timeless
from safetensors.torch import load_file
from test_trl_sweep import dpo, kto, online, reward, sft

import oomkit
from oomkit._trainers.calls import Call
from oomkit.transformers import protect, records, unprotect

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _seq2seq() -> Any:
    return trainer(t5, tokens(), hf.Seq2SeqTrainer, arguments_kind=hf.Seq2SeqTrainingArguments)


REAL = {
    "Trainer": lambda: trainer(lm, tokens()),
    "Seq2SeqTrainer": _seq2seq,
    "SFTTrainer": sft,
    "DPOTrainer": dpo,
    "RewardTrainer": reward,
    "KTOTrainer": kto,
    "GRPOTrainer": online,
    "RLOOTrainer": lambda: online("RLOO"),
}
GENERATES = ("GRPOTrainer", "RLOOTrainer")
METHODS = {"training_step", "compute_loss", "prediction_step"}


@pytest.mark.parametrize("name", REAL)
def test_the_place_in_each_trainer(name: str) -> None:
    made = REAL[name]()
    assert type(made).__name__ == name
    place = "compute_loss" if name in GENERATES else "prediction_step"
    assert METHODS & vars(protect(made)).keys() == {"training_step", place}
    loss = isinstance(vars(made).get("compute_loss"), Call)
    assert loss == (name in GENERATES)
    assert isinstance(vars(made)["training_step"], Call) != loss  # around a loss: Around
    assert not METHODS & vars(unprotect(made)).keys()


def _libraries() -> dict[str, Any]:
    """Everything that modules of the libraries have, and their classes."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("transformers", "trl", "accelerate", "peft"):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.startswith(name):
                for own, each in vars(value).items():
                    found[f"{name}.{key}.{own}"] = each
            if isinstance(value, FunctionType) and value.__module__ == name:
                found[f"{name}.{key}.__code__"] = value.__code__
    return found


@pytest.mark.parametrize("name", REAL)
def test_no_class_and_no_module_changes(name: str) -> None:
    run(REAL[name], plain)  # what the libraries load when it is first needed
    before = _libraries()
    assert len(before) > 10_000
    method = "compute_loss" if name in GENERATES else "training_step"
    outcome, arm, made = run(REAL[name], method=method, number=2, fault={"nth": 40})
    assert outcome.error is None and arm.fired, outcome.error
    during = _libraries()
    unprotect(made)
    for after in during, _libraries():
        assert not before.keys() ^ after.keys()
        assert [key for key, value in before.items() if after[key] is not value] == []


@pytest.mark.parametrize("name", REAL)
def test_nothing_is_left_in_each_trainer(name: str) -> None:
    """After a training in parts `unprotect` leaves what a plain training leaves."""
    made, plain_one = REAL[name](), REAL[name]()
    before, callbacks = dict(vars(made)), list(made.callback_handler.callbacks)
    assert vars(unprotect(protect(made, log=True))) == before
    assert made.callback_handler.callbacks == callbacks
    for each in made, plain_one:
        each.remove_callback(hf.PrinterCallback)
    plain_one.train()
    protect(made, log=True, accumulation_steps=2).train()
    assert b"oomkit" not in pickle.dumps(made.model)
    unprotect(made)
    assert vars(made).keys() == vars(plain_one).keys()
    for key, value in vars(plain_one).items():
        assert type(vars(made)[key]) is type(value), key
    kinds = [[type(c) for c in it.callback_handler.callbacks] for it in (made, plain_one)]
    assert kinds[0] == kinds[1]


def _no_memory(model: Any, args: Any) -> None:
    if torch.is_grad_enabled():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _alive(name: str, protected: bool, fails: bool) -> dict[str, bool]:
    """What is still there when a trainer has been let go, and nothing has been collected.

    Args:
        name: of the trainer.
        protected: whether it is.
        fails: whether its training ends in an error.
    """
    made = REAL[name]()
    made.remove_callback(hf.PrinterCallback)
    if protected:
        protect(made, log=True, accumulation_steps=2)
    if fails:
        made.model.register_forward_pre_hook(_no_memory)
        kind = oomkit.OutOfMemory if protected else torch.OutOfMemoryError
        with pytest.raises(kind):
            made.train()
    else:
        made.train()
    if protected:
        assert max(record.accumulation_steps for record in records(made)) > 1
    kept = {"trainer": weakref.ref(made), "model": weakref.ref(made.model)}
    del made
    return {each: ref() is not None for each, ref in kept.items()}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_no_cycle_of_ours_keeps_a_trainer_or_its_model(name: str, fails: bool, no_gc: None) -> None:
    """Some of TRL's models are cycles by themselves."""
    plain_one, mine = (_alive(name, protected, fails) for protected in (False, True))
    assert mine == plain_one and not mine["trainer"]


def _peak(place: Any, count: int, window: int) -> int:
    """Bytes that training needs, above those before its first step.

    Args:
        place: that is protected.
        count: of micro-batches.
        window: calls of an update.
    """
    made = trainer(
        lambda: lm(n_embd=64, n_inner=512),
        tokens(32),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=window,
        eval_strategy="no",
    )
    made.remove_callback(hf.PrinterCallback)
    protect(made, at=place, accumulation_steps=count, verify=False)
    made.training_step = step = oomkit.guard()(made.training_step)
    made.train()
    assert {record.accumulation_steps for record in records(made)} == {count}
    first = step.records[0]
    return int(max(each.peak_allocated for each in step.records) - first.baseline)


@pytest.mark.parametrize("count", [2, 4])
def test_a_training_step_needs_less_memory_than_its_loss(count: int) -> None:
    """In a window, the loss keeps a second set of gradients until the backward of the trainer."""
    gradients = sum(p.numel() * p.element_size() for p in lm(n_embd=64, n_inner=512).parameters())
    step, loss = (_peak(place, count, 2) for place in ("training_step", "compute_loss"))
    assert step + gradients // 2 < loss
    step, loss = (_peak(place, count, 1) for place in ("training_step", "compute_loss"))
    assert step < loss + gradients // 16


def test_sequences_of_which_only_numbers_are_given_are_kept_whole() -> None:
    """The real collator, which packs a batch into one row: `seq_idx`, and no `cu_seq_lens`."""
    collate = hf.DataCollatorWithFlattening(return_seq_idx=True)

    def make() -> Any:
        rows = [{"input_ids": row["input_ids"].tolist()} for row in tokens()]
        return trainer(lm, rows, data_collator=collate, eval_strategy="no")

    assert collate([{"input_ids": [1, 2]}, {"input_ids": [3]}]).keys() >= {"seq_idx"}
    reference, _, _ = run(make, plain)
    outcome, arm, made = run(make, number=2, fault={"nth": 30})
    assert arm.fired and {record.accumulation_steps for record in records(made)} == {1}
    assert not differences(reference, outcome, 0.0)
    failed, _, _ = run(make, number=2, fault={"nth": 30, "times": None})
    assert isinstance(failed.error, oomkit.OutOfMemory)
    said = r"kept whole, for sequences are packed into one row \(seq_idx\): .*seq_idx \[1, 48\]"
    assert re.search(said, str(failed.error)), failed.error


class OfTuples(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        ids, labels = inputs
        loss = model(input_ids=ids, labels=labels).loss
        self.log({"mean": float(labels.float().mean())})
        return loss


def _in_tuples(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))


def test_batches_that_are_no_dictionaries_are_split() -> None:
    """What an own collator and an own loss agree on."""

    def make() -> Any:
        rows = tokens(ragged=False)
        return trainer(lm, rows, OfTuples, data_collator=_in_tuples, eval_strategy="no")

    reference, _, _ = run(make, plain)
    healthy, _, _ = run(make)
    assert not differences(reference, healthy, 0.0)
    outcome, arm, made = run(make, number=2, fault={"nth": 30})
    assert arm.fired and max(record.accumulation_steps for record in records(made)) > 1
    assert not differences(reference, outcome, SINGLE)


class Settings(hf.Trainer):
    """Its collator gives what has no rows: numbers, a text, tensors without dimensions."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        scale, names = inputs.pop("scale"), inputs.pop("names")
        power, kind = inputs.pop("power"), inputs.pop("kind")
        assert (scale.shape, names, power, kind) == ((), {"a": 1}, 0.5, "mean")
        return super().compute_loss(model, inputs, *args, **more) * scale**power


def _with_settings(rows: list[Any]) -> dict[str, Any]:
    more = {"scale": torch.tensor(4.0), "names": {"a": 1}, "power": 0.5, "kind": "mean"}
    return {**hf.default_data_collator(rows), **more}


@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
def test_what_has_no_rows_stays_whole(place: Any) -> None:
    def make() -> Any:
        return trainer(lm, tokens(), Settings, data_collator=_with_settings, eval_strategy="no")

    reference, _, _ = run(make, plain)
    assert reference.error is None, reference.error
    outcome, arm, made = run(make, lambda it: protect(it, at=place), place, 2, {"nth": 30})
    assert arm.fired and max(record.accumulation_steps for record in records(made)) > 1
    assert not differences(reference, outcome, SINGLE)


def _saved(folder: Path) -> dict[str, Any]:
    """What a checkpoint has, by file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix in (".pt", ".pth"):
            found[path.name] = torch.load(path, weights_only=False)
        elif path.name != "training_args.bin":  # it names its folder
            found[path.name] = json.loads(path.read_text())
    return found


def test_checkpoints_are_those_of_a_run_without_an_error(tmp_path: Path) -> None:
    """But for the sizes in the trainer's state; the random numbers that follow are the same."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}

    def make() -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return trainer(
            lm, tokens(32), folder=folder, optim="adamw_torch", adam_epsilon=1e-2, **options
        )

    run(make, plain)
    outcome, arm, _ = run(make, number=3, fault={"nth": 30})
    assert arm.fired and outcome.error is None
    for step in "checkpoint-2", "checkpoint-4":
        one, two = (_saved(tmp_path / run / step) for run in ("0", "1"))
        assert one.keys() == two.keys() >= {"model.safetensors", "optimizer.pt", "rng_state.pth"}
        states = [each.pop("trainer_state.json") for each in (one, two)]
        assert states[1]["stateful_callbacks"].pop("OomkitSizes")["attributes"]["sizes"]
        logs = [timeless(state.pop("log_history")) for state in states]
        assert states[0] == states[1] and len(logs[0]) == len(logs[1])
        for line, other in zip(*logs, strict=True):
            assert other == pytest.approx(line, rel=1e-4)
        for name, value in one.items():
            limit = 0.0 if name == "rng_state.pth" else 1e-3
            assert not gaps(name, {"": value}, {"": two[name]}, limit), name
