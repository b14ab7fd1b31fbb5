"""Gradients of the call before, which a step drops at its beginning, are no part of what
lies below its peaks."""

import torch
from torch import nn

import oomkit

ROWS = 512


def program(zero_first):
    """An MLP whose gradients rival its activations: (step, model)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @oomkit.auto_batch(reduction="mean")
    def step(x):
        if zero_first:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()

    return step, model


def plans(zero_first, budget, calls=6):
    x = torch.ones(ROWS, 64)
    base = oomkit.memory("cpu").allocated  # installs nothing: the limit below does
    with oomkit.limit_memory(2**50, device="cpu"):
        step, _ = program(zero_first)
        base = oomkit.memory("cpu").allocated
    with oomkit.limit_memory(base + budget, device="cpu"):
        for _ in range(calls):
            step(x)
    return [(record.accumulation_steps, record.ooms) for record in step.records]


def test_zero_grad_at_the_beginning_plans_as_zero_grad_at_the_end():
    first, last = plans(True, 4 * 2**20), plans(False, 4 * 2**20)
    assert first == last


def test_what_worked_once_is_not_given_up_for_gradients_that_go():
    found = plans(True, 4 * 2**20)
    assert found[0][1] > 0
    assert all(ooms == 0 for _, ooms in found[1:])
    assert all(k <= found[0][0] for k, _ in found[1:])


def test_gradients_that_stay_count():
    """A step that accumulates over calls: what it finds lies below all of its peaks."""
    x = torch.ones(ROWS, 64)
    with oomkit.limit_memory(2**50, device="cpu"):
        model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 4))

        @oomkit.auto_batch
        def step(x):
            model(x).square().mean().backward()

        base = oomkit.memory("cpu").allocated
    with oomkit.limit_memory(base + 4 * 2**20, device="cpu"):
        for _ in range(5):
            step(x)
    ooms = [record.ooms for record in step.records]
    assert ooms[0] > 0 and sum(ooms[2:]) == 0
