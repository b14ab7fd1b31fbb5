"""Something cannot be taken back and is named: everything else goes back all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

B = 8


class Counted(torch.nn.Module):
    """A layer whose buffer `large` has no copy after the first call, for it did not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("large", torch.zeros(20_000))
        self.moves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.large.add_(1)
        out: torch.Tensor = self.layer(self.drop(self.norm(x)))
        return out


def state(model: Counted, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        "rng": torch.get_rng_state(),
        "rate": torch.tensor(optimizer.param_groups[0]["lr"]),
        **{name: value.clone() for name, value in model.state_dict().items() if name != "large"},
    }


@pytest.mark.parametrize("stuck", ["gradient", "buffer"])
@pytest.mark.parametrize("form", ["step", "backward", "returned"])
def test_the_rest_goes_back(form: str, stuck: str) -> None:
    torch.manual_seed(SEED)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(B, 6), torch.randint(0, 3, (B,))

    def loss_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return F.cross_entropy(model(x), y)

    def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_only(x, y)
        loss.backward()
        return loss.detach()

    options = {"gradient_safety": "off", "backward": form == "backward"}
    if form != "backward":
        del options["backward"]
    step = oomkit.auto_batch(whole if form == "step" else loss_only, **options)

    def backward(loss: torch.Tensor) -> None:
        if form == "returned":
            loss.backward()

    backward(step(x, y))
    if stuck == "buffer":
        model.zero_grad()
        model.moves = True
    before = state(model, optimizer)
    words = "gradients cannot be restored" if stuck == "gradient" else "buffer Counted.large"
    with inject_oom(nth=9, phase="backward") as fault:
        with pytest.raises(oomkit.OutOfMemory, match=words):
            loss = step(x, y)
            before = state(model, optimizer)  # the call itself has returned
            backward(loss)
    assert fault.fired == 1
    after = state(model, optimizer)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("form", ["step", "returned"])
@pytest.mark.refusals
def test_gradients_that_were_set_aside_are_named_by_any_error(form: str) -> None:
    """The batch cannot be cut, which is found when they hold its contribution already."""
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    x, y = torch.randn(B, 6), torch.randint(0, 3, (B + 1,))

    def loss_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y[:B])

    def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_only(x, y)
        loss.backward()
        return loss.detach()

    step = oomkit.auto_batch(
        whole if form == "step" else loss_only, batch=("x", "y"), gradient_safety="off"
    )
    with inject_oom(nth=8, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="disagree") as caught:
            loss = step(x, y)
            loss.backward()
    moved = [not torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters()]
    assert any(moved)
    assert "contain a part of this batch" in "".join(caught.value.__notes__)


class Observer(nn.Module):
    """Makes its buffer in its first forward, as those of torch.ao do for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.detach().abs().amax(0)
        if self.most.numel() == 0:
            self.most.resize_(most.shape).copy_(most)
        else:
            self.most.copy_(torch.maximum(self.most, most))
        return x


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_buffer_that_the_first_forward_resizes(phase: str) -> None:
    torch.manual_seed(3)
    observer = Observer()
    model = nn.Sequential(observer, nn.Linear(4, 3))
    x = torch.randn(8, 4)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    with inject_oom(nth=3 if phase == "forward" else 1, phase=phase):
        step(x)
    assert step.records[-1].accumulation_steps == 2
    assert torch.equal(observer.most, x.abs().amax(0))
