"""estimate(): what a step needs, before it runs, against what it then takes."""

import gc

import pytest
import torch
from torch import nn

import oomkit

MIB = 2**20


class Net(nn.Module):
    """An embedding, an attention layer, and logits."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, x):
        return self.head(self.layer(self.tokens(x)))


ZOO = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        torch.randn(256, 512),
    ),
    "norms": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.LayerNorm(256)),
        torch.randn(512, 64),
    ),
    "tokens": lambda: (Net(), torch.randint(50, (16, 32))),
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


@pytest.fixture
def counted():
    """Tensors of the CPU are counted from here on, and garbage of other tests is gone."""
    gc.collect()
    with oomkit.limit_memory(2**40, device="cpu"):
        yield


def make(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ZOO)
def test_within_a_tenth_of_what_is_measured(name, kind, counted):
    torch.manual_seed(0)
    before = oomkit.memory("cpu").allocated
    model, x = ZOO[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = make(model, optimizer)
    allocated = oomkit.memory("cpu").allocated
    found = oomkit.estimate(step, x)
    gc.collect()
    assert oomkit.memory("cpu").allocated <= allocated  # nothing is left
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    guard = oomkit.guard()
    step(x)
    with guard:
        step(x)
    measured = guard.records[0].peak_allocated - before
    assert found.peak(len(x)) == pytest.approx(measured, rel=0.1)
    more = torch.cat([x] * 8)
    with guard:
        step(more)
    measured = guard.records[1].peak_allocated - before - x.numel() * x.element_size()
    assert found.peak(len(more)) == pytest.approx(measured, rel=0.1)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found.parameters == found.gradients == size
    copies = {"AdamW": 2, "SGD": 0, "momentum": 1}[kind]
    assert found.optimizer_state == pytest.approx(copies * size, rel=0.01)
    assert found.unknown == ()


def test_the_largest_micro_batch(counted):
    model, x = ZOO["mlp"]()
    found = oomkit.estimate(make(model, torch.optim.AdamW(model.parameters())), x)
    for rows in (1000, 5000):
        assert found.largest(found.peak(rows)) == rows
    assert found.largest(found.least - 1) == 0 < found.largest(found.least)
    assert "each row" in str(found) and "peak with 256 rows" in repr(found)


def test_of_a_module(counted):
    model, x = ZOO["mlp"]()
    plain = oomkit.estimate(model, x)
    trained = oomkit.estimate(model, x, optimizer=torch.optim.AdamW(model.parameters()))
    assert plain.optimizer_state == 0 and trained.optimizer_state >= 2 * plain.parameters
    assert trained.least > plain.least and trained.per_row == plain.per_row > 0


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Conv1d(3, 4, 3), torch.randn(4, 3, 9)),
        (nn.GRU(3, 4, batch_first=True), torch.randn(4, 5, 3)),
    ],
)
def test_what_it_cannot_know_is_said(module, x):
    assert "workspaces" in oomkit.estimate(module, x).unknown[0]


def test_a_step_that_reads_values():
    model, x = ZOO["mlp"]()

    def step(x):
        model(x).sum().item()

    with pytest.raises(ValueError, match=r"estimate\(\) cannot run the step on fake tensors"):
        oomkit.estimate(step, x)
    with pytest.raises(ValueError, match="at least two rows"):
        oomkit.estimate(step, x[:1])


def test_frozen_parameters(counted):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    found = oomkit.estimate(
        model, torch.randn(16, 64), optimizer=torch.optim.SGD(model[2].parameters())
    )
    assert found.gradients == 4 * (64 * 8 + 8) and found.parameters > found.gradients


def test_what_the_tracker_cannot_follow_is_said_in_one_sentence(counted):
    table = nn.EmbeddingBag(50, 8, sparse=True)
    with pytest.raises(ValueError, match=r"cannot know: the step does not run on fake tensors"):
        oomkit.estimate(table, torch.randint(50, (16, 4)))
