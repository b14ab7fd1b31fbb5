"""Whole runs of trainers of transformers and TRL with a third of the memory that they take."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, lm, t5, tokens, trainer
from hf_runs import plain, run
from runs import SINGLE, at_most, differences, peak_of
from test_trl_sweep import dpo, kto, online, reward, sft

from oomkit.transformers import protect, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

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
