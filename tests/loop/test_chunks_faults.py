"""Every allocation of a loop over chunks, and of oomkit.map, failed in turn: the joined
outputs are the same, bit for bit, and nothing is left behind.
"""

import gc

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

SAMPLES = 50
DIM = 6


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().eval()
    return model, torch.randn(SAMPLES, DIM, dtype=torch.float64)


def by_rows(model, batch):
    """Row by row, so that the size of a part changes no rounding."""
    return torch.stack([model(row) for row in batch])


class Mean:
    def __init__(self):
        self.total = torch.zeros(3, dtype=torch.float64)
        self.rows = 0

    def update(self, outputs):
        for row in outputs:
            self.total += row * 1.0
            self.rows += 1

    def save(self):
        return self.total.clone(), self.rows

    def restore(self, saved):
        self.total.copy_(saved[0])
        self.rows = saved[1]


def loop(world, label, metric):
    model, batch = world
    outputs = []
    with torch.no_grad():
        for part in oomkit.chunks(batch, label=label, participants=[metric], micro_batch=25):
            with oomkit.guard():
                result = by_rows(model, part)
                metric.update(result)
                outputs.append(result)
    return outputs


def by_rows_of(model):
    return lambda part: by_rows(model, part)


def failing(run, step=1, phase=None):
    """run(nth) with allocation number nth failed, until there is none left. How often."""
    for count, nth in enumerate(range(1, 10_000, step)):
        with inject_oom(nth=nth, phase=phase) as fault:
            run(nth)
        if not fault.fired:
            return count
    raise AssertionError("the faults have no end")


def test_each_allocation_of_a_loop(world):
    expected = torch.cat(loop(world, "faults", Mean()))
    total = Mean()
    total.update(expected)
    metrics = [Mean() for _ in range(400)]

    runs = []

    def run(nth):
        metric = metrics.pop()
        runs.append((metric, loop(world, f"faults {nth}", metric)))

    assert failing(run, step=11) > 10  # the rest is no different
    for metric, outputs in runs:
        assert torch.equal(torch.cat(outputs), expected)
        assert metric.rows == SAMPLES and torch.equal(metric.total, total.total)


def test_each_allocation_of_map(world):
    model, batch = world
    expected = oomkit.map(by_rows_of(model), batch, label="map faults")
    results = []

    def run(nth):
        results.append(oomkit.map(by_rows_of(model), batch, label=f"map {nth}", micro_batch=25))

    assert failing(run, step=7) > 10
    assert all(torch.equal(result, expected) for result in results)


def test_memory_that_oomkit_needs_for_itself_fails(world):
    model, batch = world
    metrics = [Mean() for _ in range(100)]
    expected = torch.cat(loop((model, batch[:4]), "own", Mean()))
    results = []

    def run(nth):
        results.append(loop((model, batch[:4]), f"own {nth}", metrics.pop()))

    assert failing(run, phase="recovery") > 0
    assert all(torch.equal(torch.cat(result), expected) for result in results)


def test_nothing_is_left_behind(world):
    def run(times):
        for nth in range(1, times + 1):
            metric = Mean()
            with inject_oom(nth=nth):
                loop(world, "leaks", metric)
            with inject_oom(nth=nth):
                oomkit.map(by_rows_of(world[0]), world[1], label="leaks")

    run(4)
    gc.collect()
    before, objects = oomkit.memory("cpu").allocated, len(gc.get_objects())
    run(12)
    gc.collect()
    assert oomkit.memory("cpu").allocated == before
    assert len(gc.get_objects()) - objects < 40
