"""Evaluations that couple the rows of a batch: what is said of them, and by which name."""

import dataclasses
import logging

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

import oomkit
from oomkit.testing import force_slices

ROWS = 16


@pytest.fixture
def batch():
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))


def evaluated(function, batch, **options):
    with force_slices([ROWS // 2, ROWS // 2]):
        return oomkit.auto_batch(function, verify=True, **options)(batch)


@dataclasses.dataclass
class Scores:
    values: torch.Tensor


COUPLED = {
    "normalised": (lambda x: {"z": x - x.mean(0)}, r"result\['z'\] depends on the other rows"),
    "over the batch": (lambda x: (x, x.softmax(0)), r"result\[1\] depends on the other rows"),
    "contrastive": (lambda x: Scores(x @ x.T), r"result.values has the rows in two dimensions"),
    "nearest": (
        lambda x: CausalLMOutput(logits=torch.cdist(x, x).fill_diagonal_(9).argmin(1).float()),
        r"result\['logits'\] depends on the other rows",
    ),
    "ranks": (lambda x: x[:, 0].argsort().argsort(), "result depends on the other rows"),
    "numpy": (lambda x: (x - x.mean(0)).numpy(), "result depends on the other rows"),
    "texts": (
        lambda x: [f"{value:.3f}" for value in (x[:, 0] - x[:, 0].max()).tolist()],
        "result depends on the other rows",
    ),
    "median": (
        lambda x: {"n": len(x), "median": x[:, 0].median()},
        r"result\['median'\] is not its parts' averaged over the rows: give join=",
    ),
    "maximum": (lambda x: (x, float(x.max())), r"result\[1\] is not its parts' averaged"),
    "distinct": (lambda x: {"n": len({int(v) for v in x[:, 0]})}, r"is not its parts' added"),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_what_depends_on_other_rows_is_named(kind, batch):
    function, text = COUPLED[kind]
    with pytest.warns(oomkit.OomkitWarning, match=text):
        evaluated(function, batch)


def test_batch_statistics_in_an_evaluation_are_said_without_asking(batch):
    norm = torch.nn.BatchNorm1d(6)

    @torch.no_grad()
    def step(x):
        return norm(x)

    with (
        oomkit.testing.inject_oom(nth=1, min_bytes=batch.nbytes) as fault,
        pytest.warns(oomkit.OomkitWarning, match="BatchNorm1d is in training mode.*eval mode"),
    ):
        oomkit.auto_batch(step)(batch)
    assert fault.fired == 1


INDEPENDENT = {
    "rows": lambda x: {"y": x * 2, "best": x.argmax(1), "names": ["a"] * len(x)},
    "half": lambda x: x.to(torch.bfloat16) @ torch.ones(6, 3, dtype=torch.bfloat16),
    "mean and counts": lambda x: {"mean": x.mean(), "n": len(x), "hits": (x > 0).sum()},
    "constants": lambda x: (x, torch.ones(3), 10),
    "ragged": lambda x: [row[: 1 + int(row[0] > 0)] for row in x],
    "infinite": lambda x: torch.where(x > 0, torch.inf, x),
    "nothing": lambda x: None,
    "complex": lambda x: torch.view_as_complex(x.reshape(-1, 3, 2)),
}


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_nothing_is_wrong_with_independent_rows(kind, batch):
    evaluated(INDEPENDENT[kind], batch)  # an OomkitWarning would be an error


def test_random_numbers_leave_only_a_coarse_comparison(batch):
    def step(x):
        return x + 1e-3 * torch.randn_like(x)

    with pytest.warns(oomkit.OomkitWarning, match="compared coarsely, since random numbers"):
        evaluated(step, batch)


def test_an_average_of_an_evaluation_is_said_with_its_name(batch, caplog):
    with caplog.at_level(logging.WARNING, "oomkit"), force_slices([8, 8]):
        oomkit.auto_batch(lambda x: {"y": x, "worst": x.max()})(batch)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "result['worst'] averaged over the rows: right for a mean over them" in text
    assert "join=" in text and "verify=True" in text


def test_what_has_no_rows_is_refused_by_name(batch):
    with force_slices([8, 8]), pytest.raises(oomkit.SplitError) as caught:
        oomkit.auto_batch(lambda x: {"covariance": x.T @ x})(batch)
    assert "result['covariance'] has shapes [6, 6] and [6, 6]" in str(caught.value)
    assert "join=" in str(caught.value)
