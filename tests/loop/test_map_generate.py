"""generate() of transformers through oomkit.map: greedy decoding is exact however it is split."""

import pytest
import torch

import oomkit
from oomkit._api.map import _lengths
from oomkit.testing import force_slices, inject_oom

transformers = pytest.importorskip("transformers")  # an extra of the tests

PAD = 0
TOKENS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=PAD, eos_token_id=2, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.fixture(params=["gpt2", "t5"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 40, (7, 5), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in ((0, 3), (4, 1)):  # on the left
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("slices", [[3, 4], [1] * 7, [7]])
def test_greedy_decoding_is_exact(model, batch, slices):
    whole = model.generate(**batch, **TOKENS)
    with force_slices(slices):
        assert torch.equal(oomkit.map(model.generate, **batch, pad=PAD, **TOKENS), whole)
        result = oomkit.map(model.generate, batch, unpack=True, pad=PAD, **TOKENS)
    assert torch.equal(result, whole)


@pytest.mark.parametrize("nth", [1, 40, 400])
def test_memory_that_runs_out_as_the_cache_grows(model, batch, nth):
    whole = model.generate(**batch, **TOKENS)
    with inject_oom(nth=nth) as fault:
        result = oomkit.map(model.generate, **batch, pad=PAD, label=f"cache {nth}", **TOKENS)
    assert fault.fired == 1 and torch.equal(result, whole)


def test_outputs_with_scores_and_without_the_cache(gpt2, batch, caplog):
    caplog.set_level("INFO", logger="oomkit")
    options = {"return_dict_in_generate": True, "output_scores": True, **TOKENS}
    whole = gpt2.generate(**batch, **options)
    with force_slices([3, 4]):
        result = oomkit.map(gpt2.generate, **batch, pad=PAD, label="scores", **options)
    assert type(result) is type(whole) and result.past_key_values is None
    assert torch.equal(result.sequences, whole.sequences)
    assert torch.allclose(torch.stack(result.scores), torch.stack(whole.scores), atol=1e-6)
    (line,) = [r for r in caplog.records if "past_key_values" in r.getMessage()]
    assert "cache" in line.getMessage()


@pytest.mark.parametrize("slices", [[7], [3, 4]])
def test_the_cache_of_a_forward_is_left_out_alike(gpt2, batch, slices):
    with force_slices(slices):
        result = oomkit.map(gpt2, **batch)
    assert result.past_key_values is None
    with torch.no_grad():
        assert torch.allclose(result.logits, gpt2(**batch).logits, atol=1e-6)


def test_several_sequences_for_each_row(gpt2, batch):
    options = {"num_beams": 3, "num_return_sequences": 2, **TOKENS}
    whole = gpt2.generate(**batch, **options)
    with force_slices([3, 4]):
        assert torch.equal(oomkit.map(gpt2.generate, **batch, pad=PAD, **options), whole)
    items = ({k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4))
    with inject_oom(nth=50):
        result = oomkit.map(gpt2.generate, items, unpack=True, pad=PAD, **options)
    assert torch.equal(result, whole)


def test_sizes_are_remembered_for_each_number_of_tokens(gpt2, batch):
    tried = []

    def hook(module, args, kwargs):
        tried.append(len(kwargs["input_ids"]))

    def run(tokens, times=0):
        tried.clear()
        with inject_oom(times=max(times, 1), nth=1 if times else 10**9):
            oomkit.map(
                gpt2.generate, **batch, pad=PAD, label="lengths", do_sample=False,
                max_new_tokens=tokens,
            )  # fmt: skip
        return sorted(set(tried), reverse=True)

    handle = gpt2.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        assert run(8, times=1)[0] < 7
        assert run(8)[0] < 7
        assert run(2) == [7]
    finally:
        handle.remove()


def test_where_the_length_is_known_from(gpt2):
    generation = transformers.GenerationConfig(max_length=9, num_beams=4)
    assert _lengths(gpt2.generate, {"max_new_tokens": 3})["max_new_tokens"] == 3
    assert _lengths(gpt2.generate, {"generation_config": generation})["max_length"] == 9
    assert _lengths(gpt2.forward, {}) == {}


def test_sampling_goes_on_as_an_undisturbed_run_of_the_same_parts(gpt2, batch):
    def run(context):
        torch.manual_seed(2)
        with context:
            return oomkit.map(
                gpt2.generate, **batch, pad=PAD, do_sample=True, max_new_tokens=6, label="sampling"
            )

    assert torch.equal(run(force_slices([4, 3])), run(inject_oom(nth=30)))


def test_beams_are_counted_from_the_first_row_of_the_batch(gpt2, batch):
    asked = {
        "max_new_tokens": 3,
        "num_beams": 2,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "pad_token_id": 0,
    }
    whole = gpt2.generate(**batch, **asked)
    result = oomkit.map(gpt2.generate, **batch, **asked, micro_batch=2, pad=0)
    assert torch.equal(result["sequences"], whole["sequences"])
    assert torch.equal(result["beam_indices"], whole["beam_indices"])
