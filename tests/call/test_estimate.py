"""estimate(): what a step needs, before it runs, against what it then takes."""

import gc
import itertools

import pytest
import torch
from helpers.sample import sampled, with_rest
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
STEPS = list(itertools.product(ZOO, OPTIMIZERS))


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


@pytest.mark.parametrize(("name", "kind"), with_rest(sampled(STEPS, 3, "steps"), STEPS))
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
    ("module", "x", "said"),
    [
        (nn.Conv1d(3, 4, 3), torch.randn(4, 3, 9), "convolutions"),
        (nn.LSTM(3, 4, batch_first=True), torch.randn(4, 5, 3), "recurrent layers"),
        (nn.EmbeddingBag(9, 4), torch.randint(9, (4, 5)), "EmbeddingBag"),
        (nn.Linear(3, 4, dtype=torch.complex64), torch.randn(4, 3).cfloat(), "complex"),
        (lambda x: torch.linalg.solve(x @ x.mT, x).sum(), torch.randn(4, 3, 3), "linear algebra"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_know_is_said(module, x, said):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module if isinstance(module, nn.Module) else nn.Identity()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            made = self.inner(x) if isinstance(module, nn.Module) else module(x)
            made = made[0] if isinstance(made, tuple) else made
            return made.abs() * self.weight

    unknown = oomkit.estimate(Loss(), x).unknown
    assert len(unknown) == 1 and said in unknown[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_copies_of_the_random_state_count(reentrant, counted):
    body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))

    def step(x):
        for _ in range(20):
            x = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=reentrant)
        x.sum().backward()

    found = oomkit.estimate(step, torch.randn(4, 8, requires_grad=True))
    assert found.least > 20 * torch.get_rng_state().numel()
    assert torch.get_rng_state.__name__ == "get_rng_state"


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "RAdam"])
def test_an_optimizer_that_has_stepped_already(kind, counted):
    model, x = ZOO["mlp"]()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    step = make(model, optimizer)
    step(x)
    count = [state["step"].item() for state in optimizer.state.values()]
    found = oomkit.estimate(step, x)
    assert found.optimizer_state >= found.parameters
    assert [state["step"].item() for state in optimizer.state.values()] == count


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


def test_a_model_that_is_called_twice(counted):
    model, x = ZOO["mlp"]()

    def step(x):
        (model(x) - model(x.flip(0))).square().mean().backward()

    once = oomkit.estimate(model, x)
    assert oomkit.estimate(step, x).per_row > 1.5 * once.per_row


def test_peaks_that_do_not_grow_evenly_are_said(counted):
    model, x = ZOO["mlp"]()

    def step(x):
        y = model(x)
        (y @ y.T).logsumexp(1).mean().backward()

    assert "do not grow evenly" in oomkit.estimate(step, x).unknown[0]
