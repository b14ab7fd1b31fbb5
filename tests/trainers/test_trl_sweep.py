"""An error at many places of a call of TRL's trainers leaves the run as it is without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from hf_models import arguments, llama, tokenizer
from hf_runs import run, sweep

import oomkit
from oomkit.transformers import protect

datasets.disable_progress_bars()
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _text(chance: random.Random, least: int, most: int) -> str:
    return " ".join(f"w{chance.randrange(61)}" for _ in range(chance.randint(least, most)))


def _data(kind: str, rows: int = 16, margin: bool = False) -> datasets.Dataset:
    chance = random.Random(5)

    def row() -> dict[str, Any]:
        if kind == "text":
            return {"text": _text(chance, 3, 12)}
        found: dict[str, Any] = {"prompt": _text(chance, 2, 4)}
        if kind in ("completion", "label"):
            found["completion"] = " " + _text(chance, 2, 8)
        if kind == "label":
            found["label"] = chance.random() < 0.5
        if kind in ("pair", "answers"):
            found["chosen"] = " " + _text(chance, 2, 8)
            found["rejected"] = " " + _text(chance, 2, 8)
        if kind == "answers":
            del found["prompt"]
        if margin:
            found["margin"] = chance.random()
        return found

    return datasets.Dataset.from_list([row() for _ in range(rows)])


def _made(kind: Any, model: Any, config: Any, data: Any, evaluated: int, **more: Any) -> Any:
    options = {"bf16": False, "gradient_checkpointing": False}
    own = ("ref_model", "peft_config", "reward_funcs")
    given = {name: more.pop(name) for name in own if name in more}
    return kind(
        model,
        args=arguments(config, **{**options, **more}),
        train_dataset=data,
        eval_dataset=data.select(range(evaluated)),
        processing_class=tokenizer(),
        **given,
    )


def sft(kind: str = "text", lora: bool = False, **more: Any) -> Any:
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0)
    torch.manual_seed(0)
    return _made(trl.SFTTrainer, llama(), trl.SFTConfig, _data(kind), 8, **more)


def dpo(**more: Any) -> Any:
    torch.manual_seed(0)
    model, reference = llama(), llama()
    more = {"ref_model": reference, **more}
    return _made(trl.DPOTrainer, model, trl.DPOConfig, _data("pair"), 8, **more)


def reward(margin: bool = False, **more: Any) -> Any:
    torch.manual_seed(0)
    data = _data("answers", margin=margin)
    return _made(trl.RewardTrainer, llama(one_label=True), trl.RewardConfig, data, 8, **more)


def kto(**more: Any) -> Any:
    torch.manual_seed(0)
    model, reference = llama(), llama()
    more = {"ref_model": reference, "loss_type": "apo_zero_unpaired", **more}
    return _made(trl.KTOTrainer, model, trl.KTOConfig, _data("label"), 8, **more)


def _worth(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) + 0.1 * (sum(map(ord, text)) % 7) for text in completions]


def online(kind: str = "GRPO", **more: Any) -> Any:
    torch.manual_seed(0)
    options = {
        "num_generations": 2,
        "max_completion_length": 16,
        "reward_funcs": _worth,
        "beta": 0.0,
        **more,
    }
    trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    saved = more.get("output_dir") if options["beta"] else None
    return _made(trainer, llama(saved=saved), config, _data("prompt", 8), 4, **options)


OFFLINE = {
    "sft": sft,
    "sft_dft": lambda: sft(loss_type="dft"),
    "sft_completion": lambda: sft("completion"),
    "sft_lora": lambda: sft(lora=True),
    "sft_2": lambda: sft(gradient_accumulation_steps=2),
    "dpo": dpo,
    "dpo_ipo": lambda: dpo(loss_type=["ipo"]),
    "dpo_precomputed": lambda: dpo(precompute_ref_log_probs=True),
    "reward": reward,
    "reward_margin": lambda: reward(margin=True),
    "kto_apo": kto,
}
ONLINE = {
    **{
        f"grpo_{kind}": lambda kind=kind: online(loss_type=kind)
        for kind in ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
    },
    "grpo_sequence": lambda: online(importance_sampling_level="sequence", loss_type="grpo"),
    "grpo_entropy": lambda: online(entropy_coef=0.1, loss_type="bnpo"),
    "grpo_2": lambda: online(gradient_accumulation_steps=2),
    "rloo": lambda: online("RLOO"),
    "rloo_2": lambda: online("RLOO", gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", OFFLINE)
def test_training_survives(name: str) -> None:
    assert sweep(OFFLINE[name], "training_step", 2)["split"]


def test_the_first_call_of_a_window_survives() -> None:
    assert sweep(OFFLINE["sft_2"], "training_step", 3)["split"]
    assert sweep(ONLINE["grpo_2"], "compute_loss", 3)["split"]


@pytest.mark.parametrize("name", OFFLINE)
def test_evaluation_survives(name: str) -> None:
    assert sweep(OFFLINE[name], "prediction_step", 1)["split"]


@pytest.mark.parametrize("name", ONLINE)
def test_losses_of_generated_text_survive(name: str) -> None:
    """Generation is not protected: the loss is, and what the caller's backward needs."""
    assert sweep(ONLINE[name], "compute_loss", 2)["split"]


@pytest.mark.parametrize("name", ["grpo_dapo", "rloo"])
def test_the_backward_of_a_loss_of_generated_text_survives(name: str) -> None:
    assert sweep(ONLINE[name], "training_step", 2, phase="backward")["split"]


@pytest.mark.parametrize("name", ONLINE)
def test_evaluated_losses_of_generated_text_survive(name: str) -> None:
    assert sweep(ONLINE[name], "compute_loss", 5)["split"]  # after four calls of training


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("number", [2, 5])  # of training, and of evaluation
def test_losses_with_a_reference_survive(kind: str, number: int, tmp_path: Path) -> None:
    def make() -> Any:
        return online(kind, beta=0.1, output_dir=tmp_path)

    assert make().ref_model is not None
    assert sweep(make, "compute_loss", number)["split"]


def test_the_predictions_of_pairs_come_in_the_order_of_the_batch() -> None:
    def predicted(protected: bool) -> Any:
        trainer = reward()
        if protected:
            protect(trainer, accumulation_steps=2)
        return trainer.predict(trainer.eval_dataset)

    one, two = predicted(False), predicted(True)
    assert one.predictions.shape == two.predictions.shape
    assert abs(one.predictions - two.predictions).max() < 1e-6


def test_an_odd_number_of_rows_is_no_pairs() -> None:
    trainer = protect(dpo())
    inputs = {"input_ids": torch.ones(5, 3, dtype=torch.long)}
    with pytest.raises(oomkit.SplitError, match="chosen rows before as many rejected ones"):
        trainer.training_step(trainer.model, inputs, None)


PACKED = {
    "packing": {"packing": True, "max_length": 16, "per_device_train_batch_size": 2},
    "padding_free": {"padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("method", ["training_step", "prediction_step"])
def test_sequences_packed_into_one_row_survive_in_one(name: str, method: str) -> None:
    """They are never cut: the ladder is what is left, and its result is the very same."""

    def make() -> Any:
        return sft(**PACKED[name])

    seen = sweep(make, method, 2, limit=0.0, times=(1, None))
    assert not seen["split"] and seen["repeated"], seen


@pytest.mark.parametrize("name", PACKED)
def test_sequences_packed_into_one_row_are_kept_whole(name: str) -> None:
    def make() -> Any:
        return sft(**PACKED[name])

    for options in {}, {"ladder": ()}:
        failed, arm, _ = run(
            make,
            lambda trainer: protect(trainer, **options),  # noqa: B023
            number=2,
            fault={"nth": 40, "times": None},
        )
        assert arm.fired and not arm.changed
        assert isinstance(failed.error, oomkit.OutOfMemory), failed.error
        assert "The batch was kept whole, for sequences are packed into" in str(failed.error)


@pytest.mark.parametrize("make", [lambda: kto(loss_type="kto")])
def test_losses_of_the_whole_batch_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="one KL term for the whole batch"):
        protect(make())
