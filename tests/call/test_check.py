"""check(): a dry run that leaves everything as it was."""

import copy

import pytest
import torch
from torch import nn

import oomkit


def make(loss_of, dropout=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []

    def forward(x):
        return model(x)

    def step(x, y):
        seen.append(len(x))
        optimizer.zero_grad()
        loss = loss_of(forward(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return model, optimizer, scheduler, seen, step


def batch(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 6), torch.randint(3, (rows,))


CROSS = nn.functional.cross_entropy


@pytest.mark.parametrize("decorated", [False, True])
def test_a_step_that_can_be_split(decorated):
    model, optimizer, scheduler, seen, step = make(CROSS)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    given = batch()
    generator = torch.get_rng_state()
    found = oomkit.check(oomkit.auto_batch(step) if decorated else step, *given)
    assert found.ok and found.status == 0
    assert "8 rows, split by 4 and 4" in str(found) and "agree" in str(found)
    assert str(found).splitlines()[-1].endswith("can be split")
    after = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    assert repr(after) == repr(before)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator) and seen == []


def test_a_sum_is_found_and_its_option_named():
    *_, step = make(lambda out, y: CROSS(out, y, reduction="sum"))
    found = oomkit.check(step, *batch())
    assert not found.ok and found.status == 1
    assert 'reduction="sum"' in str(found)
    again = oomkit.check(oomkit.auto_batch(step, reduction="sum"), *batch())
    assert again.ok


def test_rows_that_depend_on_each_other():
    def in_batch(out, y):
        return CROSS(out @ out.T, torch.arange(len(out)))

    *_, step = make(in_batch)
    found = oomkit.check(step, *batch())
    assert not found.ok and "differs" in str(found)


def test_a_step_that_is_refused():
    *_, step = make(CROSS)

    def two_updates(x, y):
        step(x, y)
        step(x, y)

    found = oomkit.check(two_updates, *batch())
    assert not found.ok and "refused" in str(found)


def test_no_batch():
    found = oomkit.check(lambda: 3.0)
    assert not found.ok and "none with two rows" in str(found)


def test_a_method_of_a_trainer():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(6, 3)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            self.steps = 0

        @oomkit.auto_batch
        def step(self, x, y):
            self.optimizer.zero_grad()
            loss = CROSS(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

    trainer = Trainer()
    weight = trainer.model.weight.clone()
    assert oomkit.check(trainer.step, *batch()).ok
    assert torch.equal(trainer.model.weight, weight)


def test_errors_of_the_step_pass():
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        oomkit.check(step, torch.ones(4, 2))


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batch_norm_is_what_differs_or_not(tracked, reduction):
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=tracked), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @oomkit.auto_batch
    def step(x, y):
        model.train()
        optimizer.zero_grad()
        loss = CROSS(model(x), y, reduction=reduction)
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = copy.deepcopy(model.state_dict())
    found = oomkit.check(step, *batch())
    assert found.ok == (reduction == "mean") and found.status == (reduction != "mean")
    assert ("statistics" in str(found)) == found.ok
    assert repr(model.state_dict()) == repr(before) and model[1](torch.randn(4, 8)).std() > 0.5


def test_its_runs_are_not_counted_as_calls_of_the_step():
    oomkit.reset_report()
    *_, step = make(CROSS)
    step = oomkit.auto_batch(step, label="mine")
    assert "(check)" not in str(oomkit.check(step, *batch()))
    lines = {line.split("  ")[0] for line in oomkit.report().splitlines()}
    assert "mine (check)" in lines and len(step.records) == 0
    oomkit.reset_report()
