"""The batch in another dimension, for all arguments or for some."""

from __future__ import annotations

import pytest
import torch
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import force_slices, inject_oom

T, B, V = 5, 6, 11


def probe(args, names=("a", "b", "c"), start=0, length=-1, **options):
    return _C._batch_probe(tuple(args), {}, names[: len(args)], options, start, length)


def refusal(args, **options) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        probe(args, **options)
    return message_of(caught.value)


class WordModel(nn.Module):
    """An RNN over [T, B], as in the word-level language model of PyTorch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 4, dtype=torch.float64)
        self.rnn = nn.LSTM(4, 4, num_layers=2, dtype=torch.float64)
        self.decoder = nn.Linear(4, V, dtype=torch.float64)

    def forward(self, words, hidden):
        out, hidden = self.rnn(self.embedding(words), hidden)
        return self.decoder(out), hidden


def words():
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(V, (T + 1, B), generator=generator)
    hidden = tuple(torch.rand(2, B, 4, generator=generator, dtype=torch.float64) for _ in "hc")
    return data[:-1], data[1:], hidden


def word_step(model):
    def step(data, targets, hidden):
        logits, hidden = model(data, hidden)
        loss = nn.functional.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))
        loss.backward()
        return loss.detach(), tuple(state.detach() for state in hidden)

    return step


@pytest.mark.parametrize("injected", [True, False])
def test_a_word_model_with_the_batch_in_dimension_one(injected):
    torch.manual_seed(0)
    model = WordModel()
    loss, hidden = word_step(model)(*words())
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step = oomkit.auto_batch(word_step(model), dim=1, reduction="mean")

    if injected:
        with inject_oom(nth=20, times=1) as fault:
            split_loss, split_hidden = step(*words())
        assert fault.fired == 1
    else:
        with force_slices((3, 2, 1)):
            split_loss, split_hidden = step(*words())

    assert abs(loss - split_loss) <= 1e-12
    for one, other in zip(whole, model.parameters(), strict=True):
        assert (one - other.grad).abs().max() <= 1e-12
    for one, other in zip(hidden, split_hidden, strict=True):
        assert one.shape == other.shape == (2, B, 4)
        assert (one - other).abs().max() <= 1e-12


def test_slices_of_dimension_one_are_views():
    data, targets, hidden = words()
    got = probe([data, targets, hidden], dim=1, start=2, length=3)
    assert got["split"] == ["a", "b", "c[0]", "c[1]"]
    assert got["args"][0].data_ptr() == data[:, 2:].data_ptr()
    assert got["args"][2][0].shape == (2, 3, 4)


def test_flattened_targets_are_refused_and_not_passed_whole():
    data, targets, _ = words()
    assert refusal([data, targets.reshape(-1)], dim=1) == (
        "auto_batch cannot split argument 'b': b has shape [30] next to a batch of 6 rows, which "
        "looks like its rows flattened with another dimension; pass it unflattened and flatten it "
        "in the step, or pass it whole with static=..."
    )
    message = refusal([(data, targets.reshape(-1))], dim=1)
    assert "tensors disagree in dimension 1: a[1] has shape [30]" in message
    assert probe([data, targets.reshape(-1)], dim=1, static=("b",))["split"] == ["a"]


def test_flattened_targets_in_dimension_zero_too():
    tokens = torch.zeros(B, T)
    assert "looks like its rows flattened" in refusal([tokens, torch.zeros(B * T)])


def test_labels_of_the_rows_in_dimension_zero_need_a_dimension_of_their_own():
    data, labels = torch.rand(T, B, 3), torch.arange(B)
    assert refusal([data, labels], dim=1) == (
        "auto_batch cannot split argument 'b': b has shape [6] next to a batch of 6 rows, but not "
        "in the dimension of dim=; give each argument its own, dim={'x': 1, 'y': 0}, or pass it "
        "whole with static=..."
    )
    got = probe([data, labels], dim={"a": 1}, start=4, length=2)
    assert got["rows"] == B and got["args"][0].shape == (T, 2, 3)
    assert got["args"][1].tolist() == [4, 5]


def test_class_weights_beside_dimension_one_are_whole():
    data, weights = torch.rand(T, B, 3), torch.rand(V)
    assert probe([data, weights], dim=1)["args"][1] is weights


def test_a_hidden_state_beside_rows_in_front():
    tokens, hidden = torch.rand(B, T, 3), (torch.rand(2, B, 4), torch.rand(2, B, 4))
    got = probe([tokens, hidden], dim={"b": 1}, start=1, length=2)
    assert got["args"][0].shape == (2, T, 3) and got["args"][1][1].shape == (2, 2, 4)


def test_a_hidden_state_without_its_dimension_is_refused_with_what_to_write():
    tokens, hidden = torch.rand(B, T, 3), (torch.rand(2, B, 4), torch.rand(2, B, 4))
    assert refusal([tokens, hidden]) == (
        "auto_batch cannot split argument 'b': b[0] has shape [2, 6, 4] next to a batch of 6 rows, "
        "which it has in dimension 1 like a hidden state; give dim={'b': 1}, or pass it whole "
        "with static=..."
    )
    assert probe([tokens, hidden], static=("b",))["split"] == ["a"]


@pytest.mark.parametrize("rows", [2, B])
def test_a_step_with_dimensions_of_its_own_is_exact(rows):
    torch.manual_seed(0)
    model = nn.GRU(3, 4, num_layers=2, batch_first=True, dtype=torch.float64)
    x = torch.rand(rows, T, 3, dtype=torch.float64)
    h = torch.rand(2, rows, 4, dtype=torch.float64)

    def function(x, *, h):
        out, last = model(x, h)
        loss = (out.square().mean((1, 2)) + last.sum((0, 2))).mean()
        loss.backward()
        return loss.detach()

    loss = function(x, h=h)
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step = oomkit.auto_batch(function, dim={"h": 1}, reduction="mean")
    with force_slices((1, rows - 1)):
        split = step(x, h=h)

    assert abs(loss - split) <= 1e-12
    for one, other in zip(whole, model.parameters(), strict=True):
        assert (one - other.grad).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "dim, error, message",
    [
        ("0", TypeError, r"dim=...\) expected an int, or a dict of argument names and ints, got s"),
        (True, TypeError, "got bool"),
        (-1, ValueError, "expected 0 or more, got -1"),
        ({"x": -1}, ValueError, "expected 0 or more, got -1"),
        ({"x": 1.0}, TypeError, "got float"),
        ({0: 1}, TypeError, r"auto_batch\(dim={0: ...}\) expected names of arguments"),
    ],
)
def test_what_dim_takes(dim, error, message):
    with pytest.raises(error, match=message):
        oomkit.auto_batch(lambda x: x, dim=dim)


def test_a_name_in_dim_that_is_no_parameter_is_refused():
    assert refusal([torch.rand(4)], dim={"hidden": 1}) == (
        "auto_batch got dim='hidden', expected a parameter of the function: a"
    )


def test_the_dimension_of_the_results_has_the_name_return():
    step = oomkit.auto_batch(lambda x, y: x * 2, dim={"x": 1, "return": 1})
    x = torch.rand(3, 4)
    with force_slices((2, 2)):
        assert torch.equal(step(x, torch.rand(4)), x * 2)
