"""What `auto_batch` alone does on a trainer's method, and `protect` does right; and whole runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import transformers as hf
from hf_models import bert, labelled, lm, tokens, trainer
from hf_runs import plain, run
from runs import SINGLE, differences
from test_hf_sweep import SETTINGS
from test_trl_sweep import dpo, online, sft

import oomkit
from oomkit.testing import inject_oom
from oomkit.transformers import protect, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _alone(method: str, **options: Any) -> Any:
    def put(made: Any) -> Any:
        step = oomkit.auto_batch(getattr(made, method), **options)
        setattr(made, method, step)
        return made

    return put


CASES = {
    "items that the loss ignores": (
        SETTINGS["classes"].make,
        "training_step",
        {"batch": "inputs", "verify": False},
    ),
    "rows of pairs": (dpo, "training_step", {"verify": False}),
    "numbers of tokens": (sft, "training_step", {"batch": "inputs"}),
    "items as a key": (lambda: online(), "compute_loss", {"verify": False}),
}


@pytest.mark.refusals
@pytest.mark.parametrize("name", CASES)
def test_silent_errors(name: str) -> None:
    """Each differs with `auto_batch` alone, and not with `protect`."""
    make, method, options = CASES[name]
    reference, _, _ = run(make, plain, method)
    fault = {"nth": 60}
    wrong, arm, _ = run(make, _alone(method, **options), method, 2, fault)
    assert arm.fired
    assert wrong.error is not None or differences(reference, wrong, SINGLE)
    right, _, _ = run(make, protect, method, 2, fault)
    assert not differences(reference, right, SINGLE)


def test_auto_find_batch_size_makes_another_training() -> None:
    """The contrast: fewer rows in each update, and updates of a try that is thrown away."""

    def make() -> Any:
        return trainer(
            lm,
            tokens(32),
            per_device_train_batch_size=16,
            auto_find_batch_size=True,
            eval_strategy="no",
        )

    reference, _, _ = run(make, plain)
    outcome, arm, made = run(make, plain, number=2, fault={"nth": 30})
    assert arm.fired and outcome.error is None
    assert outcome.rest["global_step"] != reference.rest["global_step"]


HEADS = [
    (bert, "SequenceClassification", "class", {}),
    (bert, "SequenceClassification", "float", {"num_labels": 1}),
    (bert, "TokenClassification", "tags", {}),
    (bert, "MaskedLM", "masked", {}),
    *[
        (kind, head, data, {})
        for kind in (
            "Albert DistilBert Electra Roberta MPNet Ernie Nystromformer RoFormer MegatronBert "
            "Camembert XLMRoberta ConvBert"
        ).split()
        for head, data in (
            ("SequenceClassification", "class"),
            ("TokenClassification", "tags"),
            ("MaskedLM", "masked"),
        )
    ],
    *[
        (kind, "CausalLM", "text", {})
        for kind in (
            "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Phi StableLm OPT GPTNeoX Bloom Olmo "
            "Persimmon BioGpt XGLM Mpt GPTBigCode "
            "Cohere Starcoder2 Granite"
        ).split()
    ],
]


def _head(kind: Any, head: str, more: dict[str, Any]) -> Any:
    if callable(kind):
        return kind(head, **more)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "embedding_size": 16,
        "dim": 16,
        "word_embed_proj_dim": 16,
        "intermediate_size": 32,
        "hidden_dim": 32,
        "ffn_dim": 32,
        "ffn_hidden_size": 32,
        "num_hidden_layers": 1,
        "n_layer": 1,
        "n_layers": 1,
        "num_attention_heads": 2,
        "n_head": 2,
        "n_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_labels": 3,
        "pad_token_id": 0,
    }
    config = getattr(hf, f"{kind}Config")()
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or name == "p"):
            setattr(config, name, 0.0)
    config.layer_types = ["full_attention"] if getattr(config, "layer_types", None) else None
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 1
    return getattr(hf, f"{kind}For{head}")(config)


@pytest.mark.parametrize(
    ("kind", "head", "data", "more"),
    HEADS,
    ids=[f"{k if isinstance(k, str) else k.__name__}-{h}-{d}" for k, h, d, _ in HEADS],
)
def test_the_loss_of_a_head_is_taken_for_what_it_is(
    kind: Any, head: str, data: str, more: dict[str, Any]
) -> None:
    """Sum or mean, of rows or of tokens: split in two, the update is the whole one's."""

    def make() -> Any:
        rows = tokens(8) if data == "text" else labelled(data, 8)
        return trainer(lambda: _head(kind, head, more), rows, eval_strategy="no", max_steps=1)

    reference, _, _ = run(make, plain)
    assert reference.error is None, reference.error
    outcome, _, made = run(make, lambda t: protect(t, accumulation_steps=2))
    assert [r.accumulation_steps for r in records(made)] == [2]
    assert not differences(reference, outcome, 10 * SINGLE)


def test_a_freed_trainer_frees_its_books() -> None:
    made = protect(sft())
    kept = weakref.ref(made)
    with inject_oom(nth=500):
        made.train()
    del made
    gc.collect()
    assert kept() is None
