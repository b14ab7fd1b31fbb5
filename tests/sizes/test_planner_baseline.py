"""Gradients of the call before, which a step drops at its beginning, are no part of what
lies below its peaks."""

import gc

import torch
from torch import nn

import oomkit

ROWS = 512


def model_of_this_size():
    gc.collect()  # what other tests left would be room that comes while this one runs
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4))


def records(step, base, calls):
    x = torch.ones(ROWS, 64)
    with oomkit.limit_memory(base + 2900 * 2**10, device="cpu"):
        for _ in range(calls):
            step(x)
    return step.records


def test_what_worked_once_is_not_given_up_for_gradients_that_go():
    with oomkit.limit_memory(2**50, device="cpu"):
        model = model_of_this_size()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        base = oomkit.memory("cpu").allocated

    @oomkit.auto_batch
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    first, *others = records(step, base, 6)
    assert first.ooms > 0
    assert [record.ooms for record in others] == [0] * 5
    assert all(record.accumulation_steps <= first.accumulation_steps for record in others)


def test_gradients_that_stay_count():
    """A step that accumulates over calls: what it finds lies below all of its peaks."""
    with oomkit.limit_memory(2**50, device="cpu"):
        model = model_of_this_size()
        base = oomkit.memory("cpu").allocated

    @oomkit.auto_batch
    def step(x):
        model(x).square().mean().backward()

    ooms = [record.ooms for record in records(step, base, 5)]
    assert ooms[0] > 0 and sum(ooms[2:]) == 0
