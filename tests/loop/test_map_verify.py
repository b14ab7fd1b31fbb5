"""oomkit.map(verify=True): a few rows alone beside the same rows among others."""

import logging

import pytest
import torch

import oomkit


@pytest.fixture
def batch():
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda x: {"z": x - x.mean(0)}, r"result\['z'\] depends on the other rows"),
        (lambda x: (x, x @ x.T), r"result\[1\] has the rows in two dimensions"),
        (lambda x: {"worst": x.max(), "x": x}, r"result\['worst'\] is not the mean"),
        (torch.nn.BatchNorm1d(6, affine=False, track_running_stats=False), "result depends on"),
        (lambda x: x.argsort(0), "result depends on the other rows"),
    ],
)
def test_what_depends_on_other_rows_is_named(function, text, batch):
    with pytest.warns(oomkit.OomkitWarning, match=text) as said:
        oomkit.map(function, batch, verify=True)
    assert "8 rows and their two halves" in str(said[0].message)
    assert said[0].filename == __file__


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_independent_rows_and_who_is_called(rows, batch, caplog):
    seen = []

    def function(x, scale, *, shift):
        seen.append(len(x))
        return {"y": x * scale + shift, "best": x.argmax(1), "n": len(x), "mean": x.mean()}

    with caplog.at_level(logging.INFO, "oomkit"):
        result = oomkit.map(function, batch[:rows], 2.0, shift=1.0, verify=True)
    assert torch.equal(result["y"], batch[:rows] * 2 + 1)
    few = min(rows, 8)
    assert seen == ([few, (few + 1) // 2, few // 2, rows] if rows > 1 else [1, 1, 1])
    assert sum("verified" in record.getMessage() for record in caplog.records) == (rows > 1)


def test_random_numbers_and_metrics_are_put_back(batch):
    class Metric:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    metric, generator = Metric(), torch.Generator().manual_seed(1)

    def function(x, generator=None):
        metric.count += len(x)
        return x + torch.rand(x.shape, generator=generator) + torch.rand(x.shape)

    torch.manual_seed(2)
    want = oomkit.map(function, batch, generator=generator)
    metric.count = 0
    generator.manual_seed(1)
    torch.manual_seed(2)
    with pytest.warns(oomkit.OomkitWarning, match="random numbers are drawn"):
        got = oomkit.map(function, batch, generator=generator, verify=True, participants=metric)
    assert torch.equal(got, want)
    assert metric.count == 16


def test_of_a_stream_the_first_batch_is_looked_at(batch):
    with pytest.warns(oomkit.OomkitWarning, match="depends on the other rows") as said:
        oomkit.map(lambda x: x / x.sum(0), iter([batch, batch]), verify=True)
    assert len(said) == 1


@pytest.mark.parametrize("nth", range(1, 12))
def test_no_memory_for_the_probe_is_no_error(nth, batch):
    before = torch.get_rng_state()
    with oomkit.testing.inject_oom(nth=nth) as fault:
        result = oomkit.map(lambda x: torch.relu(x), batch, verify=True)
    assert fault.fired == 1
    assert torch.equal(result, batch.relu())
    assert torch.equal(torch.get_rng_state(), before)
