"""Outputs of transformers' own models, whole against split: types, values, caches."""

from __future__ import annotations

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import transformers

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

EXTRAS = {"output_hidden_states": True, "output_attentions": True}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config), {"use_cache": True}


def bert():
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return transformers.BertForSequenceClassification(config), {}


def t5():
    config = transformers.T5Config(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    return transformers.T5ForConditionalGeneration(config), {"use_cache": True}


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5}
LOSS = {"gpt2": 1e-6}  # transformers computes the loss of its causal models in float32


def batch_of(name, rows=6):
    ids = torch.randint(1, 32, (rows, 7))
    labels = torch.randint(0, 2, (rows,)) if name == "bert" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def leaves(value, place="result"):
    """Every tensor of a result with its place; caches left out."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{place}[{i}]")


def run(name, kind, injected):
    torch.manual_seed(7)
    model, extra = MODELS[name]()
    model = model.double()
    model.train(kind == "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batch_of(name)

    @oomkit.auto_batch(label=f"{name}_step")
    def step(batch):
        if kind == "eval":
            with torch.no_grad():
                return model(**batch, **EXTRAS, **extra)
        optimizer.zero_grad()
        out = model(**batch, **EXTRAS, **extra)
        out.loss.backward()
        optimizer.step()
        return out

    if injected:
        with inject_oom(nth=20, times=1) as fault:
            out = step(batch)
        assert fault.fired == 1
    else:
        out = step(batch)
    return out, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_models_output_is_the_whole_one(name, kind, caplog):
    caplog.set_level(logging.INFO, "oomkit")
    whole, parameters = run(name, kind, injected=False)
    got, updated = run(name, kind, injected=True)

    assert type(got) is type(whole)
    kept = [key for key in whole if key != "past_key_values"]
    assert list(got) == kept
    expected, joined = dict(leaves(dict(whole))), dict(leaves(dict(got)))
    assert list(joined) == list(expected) and len(joined) > 6
    for place, tensor in expected.items():
        atol = LOSS.get(name, 1e-12) if "loss" in place else 1e-12
        torch.testing.assert_close(joined[place].detach(), tensor.detach(), rtol=0, atol=atol)
        assert joined[place].requires_grad == tensor.requires_grad, place
    for a, b in zip(updated, parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=LOSS.get(name, 1e-12))
    # Attributes, indices and tuples show the same values.
    assert got.logits is got["logits"] and got.to_tuple()[0] is got.loss
    said = [r.getMessage() for r in caplog.records if "cache" in r.getMessage()]
    if name == "bert":
        assert said == []
    else:
        assert whole.past_key_values is not None and got.past_key_values is None
        assert said == [
            f"results of the micro-batches of {name}_step: "
            "result['past_key_values'] dropped: a cache cannot be joined"
        ]


def test_a_tuple_from_a_model(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    model, _ = gpt2()
    model = model.double().eval()

    def step(batch):
        with torch.no_grad():
            return model(**batch, use_cache=True, return_dict=False)

    batch = batch_of("gpt2")
    whole = step(batch)
    got = oomkit.auto_batch(step, accumulation_steps=2)(batch)
    assert type(got) is tuple and len(got) == len(whole) == 3 and got[2] is None
    for a, b in zip(got[:2], whole[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert any("result[2] dropped: a cache" in r.getMessage() for r in caplog.records)


def test_the_cache_goes_with_its_micro_batch():
    """It holds the keys and values of the micro-batch, and their graphs."""
    import weakref

    model, _ = gpt2()
    caches = []

    @oomkit.auto_batch(accumulation_steps=3)
    def step(batch):
        assert all(cache() is None for cache in caches)
        out = model(**batch, use_cache=True)
        out.loss.backward()
        caches.append(weakref.ref(out.past_key_values))
        return out

    assert step(batch_of("gpt2")).past_key_values is None
    assert len(caches) == 3


def test_join_gets_the_models_outputs_with_their_caches():
    model, _ = gpt2()
    seen = []

    def join(results, rows):
        seen.extend(results)
        return torch.cat([r.logits for r in results])

    @oomkit.auto_batch(accumulation_steps=2, join=join)
    def step(batch):
        out = model(**batch, use_cache=True)
        out.loss.backward()
        return out

    got = step(batch_of("gpt2"))
    assert not got.requires_grad and got.shape[0] == 6
    assert [type(r) for r in seen] == [type(seen[0])] * 2
    assert all(not r.logits.requires_grad and r.past_key_values is not None for r in seen)


def test_generated_tokens_of_different_lengths_are_refused_by_name():
    model, _ = gpt2()
    model.eval()
    lengths = iter([9, 12])

    @oomkit.auto_batch(accumulation_steps=2)
    def step(ids):
        return {
            "tokens": model.generate(
                ids, max_length=next(lengths), min_length=9, do_sample=False, pad_token_id=0
            )
        }

    ids = batch_of("gpt2")["input_ids"]
    model.generation_config.eos_token_id = None
    with pytest.raises(oomkit.SplitError, match=r"result\['tokens'\] has shapes") as caught:
        step(ids)
    assert "[3, 9] and [3, 12]" in str(caught.value) and "pad to a fixed length" in str(
        caught.value
    )
