"""An error at many places of a call of TRL's trainers leaves the run as it is without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from hf_models import arguments, llama, tokenizer
from hf_runs import SCORES, run, sweep
from runs import HALF, SINGLE, timeless
from transformers import PrinterCallback

import oomkit
from oomkit.transformers import protect, records, unprotect

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


# Two updates for each batch: the second one's ratios are clipped.
CLIPPED = {"num_iterations": 2, "learning_rate": 0.05}
STILL = {"learning_rate": 1e-9}  # so that nothing but the books may differ
METRICS = {
    "SFT": lambda: sft(**STILL),
    "DPO": lambda: dpo(**STILL),
    "Reward": lambda: reward(**STILL),
    "KTO": lambda: kto(per_device_train_batch_size=8, **STILL),
    "GRPO": lambda: online(entropy_coef=0.1, loss_type="bnpo", **STILL),
    "GRPO, clipped": lambda: online(loss_type="grpo", epsilon=1e-4, **CLIPPED),
    "CISPO, clipped": lambda: online(loss_type="cispo", epsilon_high=1e-4, **CLIPPED),
    "VESPO": lambda: online(loss_type="vespo", **STILL),
    "RLOO, clipped": lambda: online("RLOO", epsilon=1e-4, **CLIPPED),
}


def _logged(make: Callable[[], Any], count: int) -> list[dict[str, Any]]:
    """The log of a training in so many parts, of a model whose rows differ."""
    made = make()
    made.remove_callback(PrinterCallback)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if count:
        protect(made, accumulation_steps=count)
    made.train()
    return timeless(made.state.log_history)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_parts_are_those_of_the_batch(name: str, count: int) -> None:
    """Means of tokens, chosen and rejected ones, of rows; the least and the largest."""
    whole, parts = (_logged(METRICS[name], each) for each in (0, count))
    assert len(whole) == len(parts)
    for line, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(line, rel=5e-5, abs=1e-6, nan_ok=True)


OF_PAIRS = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop "
    "sigmoid_norm"
).split()


@pytest.mark.parametrize("kind", OF_PAIRS)
def test_losses_of_pairs_in_parts(kind: str) -> None:
    """The model is far from its reference: losses and norms of gradients, training and not."""
    more = {"label_smoothing": 0.1} if kind in ("exo_pair", "robust") else {}

    def make() -> Any:
        return dpo(loss_type=[kind], **more, **STILL)

    for line, other in zip(_logged(make, 0), _logged(make, 3), strict=True):
        assert other == pytest.approx(line, rel=5e-5, abs=1e-6)


def test_the_predictions_of_pairs_come_in_the_order_of_the_batch() -> None:
    def predicted(protected: bool) -> Any:
        trainer = reward()
        if protected:
            protect(trainer, accumulation_steps=2)
        return trainer.predict(trainer.eval_dataset)

    one, two = predicted(False), predicted(True)
    assert one.predictions.shape == two.predictions.shape
    assert abs(one.predictions - two.predictions).max() < 1e-6


class Odd:
    """A collator that loses the last rejected answer."""

    def __init__(self, made: Any) -> None:
        self.inner = made.data_collator

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return {name: value[:-1] for name, value in self.inner(rows).items()}


@pytest.mark.parametrize("make", [dpo, reward])
def test_an_odd_number_of_rows_is_no_pairs(make: Any) -> None:
    made = make()
    made.data_collator = Odd(made)
    protect(made)
    with pytest.raises(oomkit.SplitError, match="chosen rows before as many rejected ones, got"):
        made.train()
    with pytest.raises(oomkit.SplitError, match="input_ids with 7 rows"):
        made.evaluate()


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


# --- log-probabilities that GRPO and RLOO compute without gradients, beside the loss ---

# The number of the call, and the trainer: RLOO scores each batch twice if it has a reference.
MADE = {
    "rloo": (2, lambda **more: online("RLOO", **more)),
    "rloo_2": (2, lambda **more: online("RLOO", gradient_accumulation_steps=2, **more)),
    "rloo_bf16": (2, lambda **more: online("RLOO", **{**more, "bf16": True})),
    "rloo_evaluation": (5, lambda **more: online("RLOO", **more)),
    "rloo_model": (3, lambda **more: online("RLOO", beta=0.1, **more)),
    "rloo_reference": (4, lambda **more: online("RLOO", beta=0.1, **more)),
    "grpo_reference": (2, lambda **more: online(beta=0.1, **more)),
    "grpo_old": (2, lambda **more: online(num_iterations=2, **more)),
}


@pytest.mark.parametrize("name", MADE)
def test_scores_survive(name: str, tmp_path: Path) -> None:
    number, make = MADE[name]
    limit = HALF if "bf16" in name else SINGLE
    assert sweep(lambda: make(output_dir=tmp_path), SCORES, number, limit=limit)["split"]


def _with_adapters(**more: Any) -> Any:
    from peft import LoraConfig

    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0)
    return online("RLOO", beta=0.1, peft_config=adapters, **more)


@pytest.mark.parametrize("number", [3, 4])  # with the adapters, and without: the reference
def test_scores_with_adapters_survive(number: int) -> None:
    assert sweep(_with_adapters, SCORES, number)["split"]


def _with_dropout() -> Any:
    made = online("RLOO")
    for module in made.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return made


def test_scores_with_dropout_survive() -> None:
    """The very numbers that a run in the same slices draws."""
    assert sweep(_with_dropout, SCORES, 2, exact=False)["split"]


_IDS = torch.arange(3, 51).view(8, 6)
TEXTS = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS), "logits_to_keep": 3}


def _scored(made: Any, **more: Any) -> Any:
    with torch.no_grad():
        return made._get_per_token_logps_and_entropies(**{"model": made.model, **TEXTS, **more})


def _first_fails(made: Any, **more: Any) -> Any:
    with oomkit.testing.inject_oom(nth=1):
        return _scored(made, **more)


def test_rows_are_scored_in_parts() -> None:
    made = online("RLOO")
    expected = _scored(made, compute_entropy=True)
    protect(made)
    healthy = _scored(made, compute_entropy=True)
    split = _first_fails(made, compute_entropy=True)
    assert [record.accumulation_steps for record in records(made)] == [1, 2]
    assert len(expected) == 3 and expected[2] is healthy[2] is split[2] is None
    for one, two, three in zip(expected[:2], healthy[:2], split[:2], strict=True):
        assert torch.equal(one, two) and torch.allclose(one, three, rtol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"num_images": [1] * 8},  # pictures, several for a row
        {"pixel_attention_mask": torch.ones(8, 2, 2)},
        {"compute_aux_loss": True},  # of routers: one of the whole batch
        {"token_type_ids": torch.ones(9, 6, dtype=torch.long)},
    ],
)
def test_what_has_more_than_rows_is_scored_whole(more: dict[str, Any]) -> None:
    made = protect(online("RLOO"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _first_fails(made, **more)
    assert type(caught.value) is torch.OutOfMemoryError and not records(made)


def test_a_call_that_the_method_refuses_is_refused_by_it() -> None:
    made = protect(online("RLOO"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'pages'"):
        _scored(made, pages=3)


class OwnScores(trl.RLOOTrainer):  # type: ignore[misc]
    """Scores of a row that depend on the others."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any) -> Any:
        scores, *rest = super()._get_per_token_logps_and_entropies(*args, **more)
        return scores - scores.mean(), *rest


def test_scores_of_a_users_own_are_left_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "RLOOTrainer", OwnScores)
        by_class = online("RLOO")
    by_object = online("RLOO")
    method = by_object._get_per_token_logps_and_entropies
    by_object._get_per_token_logps_and_entropies = lambda *args, **more: method(*args, **more)
    for made in by_class, by_object:
        before = vars(made).get(SCORES)
        assert vars(protect(made)).get(SCORES) is before
        with pytest.raises(torch.OutOfMemoryError) as caught:
            _first_fails(made)
        assert type(caught.value) is torch.OutOfMemoryError


class MeanOfRows(torch.nn.Module):
    """What each row gets depends on all of them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


@pytest.mark.refusals
@pytest.mark.parametrize("inexact", ["error", "warn"])
def test_scores_of_a_model_that_couples_rows_are_not_split(inexact: Any) -> None:
    made = online("RLOO")
    made.model.model.norm = torch.nn.Sequential(made.model.model.norm, MeanOfRows())
    protect(made, inexact=inexact)
    if inexact == "error":
        with pytest.raises(oomkit.SplitError, match="_get_per_token_logps_and_entropies exactly"):
            _first_fails(made)
    else:
        with pytest.warns(oomkit.OomkitWarning, match="but not exactly: result.0. of the joined"):
            _first_fails(made)


@pytest.mark.refusals
def test_what_is_proven_of_a_model_is_not_of_its_reference(tmp_path: Path) -> None:
    made = online("RLOO", beta=0.1, output_dir=tmp_path)
    made.ref_model.model.norm = torch.nn.Sequential(made.ref_model.model.norm, MeanOfRows())
    expected = _scored(made, model=made.ref_model)
    protect(made)
    _first_fails(made)
    _scored(made)  # in the third call of a step nothing would be compared
    torch.testing.assert_close(_scored(made, model=made.ref_model)[0], expected[0])
    with pytest.raises(oomkit.SplitError):
        _first_fails(made, model=made.ref_model)
    assert [record.outcome for record in records(made)][2:] == ["finished", "error"]


@pytest.mark.parametrize("evaluation", [True, False])
def test_scores_in_evaluation(evaluation: bool) -> None:
    made = protect(online("RLOO"), evaluation=evaluation)
    made.train()
    labels = [record.label.rpartition(".")[-1] for record in records(made)]
    assert labels.count(SCORES) == (6 if evaluation else 4)


def test_nothing_of_scores_is_left_after_unprotect() -> None:
    made = online("RLOO")
    before = dict(vars(made))
    protect(made)
    assert vars(made).keys() - before.keys() >= {SCORES, "compute_loss"}
    assert vars(unprotect(made)) == before


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trl_without_the_method(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = online(kind)
    monkeypatch.delattr(getattr(trl, f"{kind}Trainer"), SCORES)
    with pytest.raises(ImportError, match=rf"uses {kind}Trainer\.{SCORES}, which trl 1\."):
        protect(made)


def test_trl_with_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    made = online("RLOO")

    def other(self: Any, model: Any, tokens: Any) -> Any: ...

    other.__module__ = trl.RLOOTrainer.__module__
    monkeypatch.setattr(trl.RLOOTrainer, SCORES, other)
    with pytest.raises(
        ImportError, match=rf"uses RLOOTrainer\.{SCORES}\(input_ids\), which trl 1\."
    ):
        protect(made)
    assert "compute_loss" not in vars(made)
