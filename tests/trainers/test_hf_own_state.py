"""What a trainer's own step notes and logs: rolled back with an attempt, one line for a batch."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, lm, tokens, trainer
from hf_runs import plain, run, sweep
from runs import differences
from test_trl_sweep import sft

import oomkit
from oomkit._trainers.plain_state import PlainState
from oomkit.transformers import protect, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Logs(hf.Trainer):
    """Writes to the log in the step, as is done for the terms of a loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **more)
        if model.training:
            self.log({"term": loss.item(), "max_logit": outputs["logits"].max().item()})
            self.log({"name": "second", "rows": float(len(self.args.label_names or "four"))})
        return (loss, outputs) if return_outputs else loss


LOGGED = {
    "a mean of rows": lambda: trainer(
        lambda: bert("SequenceClassification"), labelled("class"), Logs
    ),
    "a sum over items": lambda: trainer(lm, tokens(), Logs, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", LOGGED)
def test_a_line_that_the_step_logs_is_the_whole_batchs(name: str) -> None:
    assert sweep(LOGGED[name], "training_step", 2)["split"]


def test_a_line_of_a_step_has_the_figures_of_oomkit_too() -> None:
    outcome, arm, made = run(
        LOGGED["a mean of rows"], lambda t: protect(t, log=True), number=2, fault={"nth": 40}
    )
    assert arm.fired
    assert len([line for line in outcome.log if "term" in line]) == 4
    assert [line["oomkit/ooms"] for line in outcome.log if "loss" in line] == [0, 1, 0, 0]
    oomkit.transformers.unprotect(made)
    assert "log" not in vars(made)


class Counts(hf.Trainer):
    """Keeps numbers, containers and a tensor of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls, self.sum, self.seen = 0, 0.0, []
        self.named: dict[str, Any] = {"calls": 0, "lists": defaultdict(list)}
        self.last: deque[int] = deque(maxlen=100)
        self.known: set[int] = set()
        self.total = torch.zeros(())

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **more)
        self.calls += 1
        self.sum += 1.0
        self.seen.append(1)
        self.named["calls"] += 1
        self.named["lists"]["calls"].append(1)
        self.last.append(1)
        self.known.add(self.calls)
        self.total += 1
        self.made = getattr(self, "made", 0) + 1
        return (loss, outputs) if return_outputs else loss

    def counts(self) -> set[float]:
        lists = self.named["lists"]["calls"]
        containers = self.seen, lists, self.last, self.known
        numbers = self.calls, self.sum, self.named["calls"], float(self.total), self.made
        return {float(len(each)) for each in containers} | {float(each) for each in numbers}


@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
def test_what_failed_and_what_was_proven_counts_for_nothing(place: Any) -> None:
    """Each micro-batch counts, and a warning says so; attempts and proofs do not."""

    def make() -> Any:
        return trainer(
            lambda: bert("SequenceClassification"), labelled("class"), Counts, eval_strategy="no"
        )

    for nth in (10, 25, 40):
        outcome, arm, made = run(make, lambda t: protect(t, at=place), place, 2, {"nth": nth})
        assert arm.fired and outcome.error is None
        run_once = sum(record.accumulation_steps for record in records(made))
        assert run_once > 4
        assert made.counts() == {float(run_once)}
        (said,) = [line for line in outcome.said if "so this code runs once per" in line]
        assert "trainer.calls" in said


def test_an_error_leaves_what_a_step_counts() -> None:
    def make() -> Any:
        return trainer(
            lambda: bert("SequenceClassification"), labelled("class"), Counts, eval_strategy="no"
        )

    failed, _, made = run(make, number=2, fault={"nth": 60, "times": None})
    assert isinstance(failed.error, oomkit.OutOfMemory)
    assert made.counts() == {1.0}


def test_batches_that_are_packed_into_one_row_are_counted_and_let_go() -> None:
    alive: list[Any] = []

    def make() -> Any:
        made = sft(packing=True, max_length=16, per_device_train_batch_size=2)
        inner = made.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            alive.append(weakref.ref(inputs["input_ids"]))
            return inner(model, inputs, *args, **kwargs)

        made.compute_loss = compute_loss
        return made

    reference, _, _ = run(make, plain)
    alive.clear()
    outcome, _, made = run(make)
    assert outcome.log[1]["num_tokens"] > outcome.log[0]["num_tokens"] > 0
    assert not differences(reference, outcome, 0.0)
    assert len(alive) > 4 and made.state.global_step > 1
    assert not [ref for ref in alive if ref() is not None]


def test_rows_whose_label_is_ignored_are_no_part_of_an_evaluated_mean() -> None:
    def make() -> Any:
        data = labelled("class")
        for at in (0, 2, 5):
            data[at]["labels"] = torch.tensor(-100)
        return trainer(lambda: bert("SequenceClassification"), data)

    assert sweep(make, "prediction_step", 1, times=(1,))["split"]


def test_small_tensors_go_back_where_the_budget_is_used_up() -> None:
    kept = torch.arange(4.0)
    owner = SimpleNamespace(kept=kept)
    with oomkit.limit_memory(1, device="cpu"):
        state = PlainState(owner)
        kept.zero_()
        state.restore(owner)
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]
