"""A step that ran out of memory on a device equals the undisturbed one over the same slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from gpu import (
    DEVICE,
    DRY,
    UNIT,
    block,
    farthest,
    on_a_device,
    random_state,
    room,
    same_bits,
    settle,
    state_of,
)
from oomkit.testing import force_slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

ROWS = 16
STEPS = 3


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(256)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x.flatten(1))))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.reshape(-1, 1, 8, 8)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.reshape(-1, 8, 8)).mean(1))


class Recurrent(nn.Module):
    """Layers of cuDNN, with dropout after them: its own between layers cannot be drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.layers(x.reshape(-1, 8, 8))
        return self.head(self.dropout(out).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "images": Images,
    "attention": Attention,
    "recurrent": Recurrent,
}


class Run:
    """STEPS steps of one model; each call holds a block for each row besides."""

    def __init__(self, make: Callable[[], nn.Module], form: str, precision: str) -> None:
        torch.manual_seed(7)
        self.model = make().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.form, self.precision = form, precision
        enabled = precision == "fp16"
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=enabled)
        self.x = torch.randn(ROWS, 64, device=DEVICE)
        self.y = torch.randint(0, 10, (ROWS,), device=DEVICE)
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        held = block(8 * len(x))
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        with torch.autocast(DEVICE, dtype, enabled=self.precision != "fp32"):
            loss = F.cross_entropy(self.model(x).float(), y)
        held.zero_()
        return loss

    def decorated(self) -> Any:
        model, optimizer, scaler = self.model, self.optimizer, self.scaler

        def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        def returned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(x, y)

        parts = {"model": model, "optimizer": optimizer}
        if self.form == "whole":
            return oomkit.auto_batch(whole, **parts, participants=[scaler])
        return oomkit.auto_batch(returned, **parts, verify=False)

    def call(self, step: Any) -> None:
        if self.form == "whole":
            self.losses.append(float(step(self.x, self.y)))
            return
        self.optimizer.zero_grad()
        loss = step(self.x, self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(float(loss.detach()))

    def under(self, units: float) -> list[list[int]]:
        """The slices of each call that ran through."""
        step = self.decorated()
        plans = []
        for _ in range(STEPS):
            with room(units):
                self.call(step)
            plans.append(self.sizes[-step.records[-1].accumulation_steps :])
        assert sum(record.ooms for record in step.records) >= 1, "no error was provoked"
        return plans

    def in_slices(self, plans: list[list[int]]) -> None:
        step = self.decorated()
        for plan in plans:
            with force_slices(plan):
                self.call(step)

    def outcome(self) -> dict[str, torch.Tensor]:
        return {
            **state_of(self.model),
            "losses": torch.tensor(self.losses),
            "random": random_state(),
        }


def both(make: Callable[[], nn.Module], form: str, precision: str) -> tuple[Any, Any]:
    """8 units for each of 16 rows and room for 100: at most 12 rows at a time."""
    ran = Run(make, form, precision)
    plans = ran.under(100)
    again = Run(make, form, precision)
    again.in_slices(plans)
    return again.outcome(), ran.outcome()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["whole", "returned"])
def test_a_real_error_is_recovered_bit_for_bit(model: str, form: str) -> None:
    expected, got = both(MODELS[model], form, "fp32")
    assert same_bits(expected, got) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_in_mixed_precision(model: str, precision: str) -> None:
    if DRY and precision == "fp16":
        pytest.skip("fp16 autocast of the CPU has no scaler")
    if DRY and model == "recurrent":
        pytest.skip("not every CPU has an LSTM in bf16")
    expected, got = both(MODELS[model], "whole", precision)
    assert same_bits(expected, got) == []


@on_a_device
def test_without_deterministic_algorithms_it_is_rounding() -> None:
    """cuDNN may take another algorithm each time: 1e-4 of the largest value, in fp32."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # it is one of those
    try:
        expected, got = both(Images, "whole", "fp32")
    finally:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True
    del expected["random"], got["random"]
    assert farthest(expected, got) < 1e-4


@on_a_device
@pytest.mark.parametrize("tf32", [False, True], ids=["single", "tf32"])
def test_a_loss_that_couples_rows_weakly_is_refused(tf32: bool) -> None:
    """By a thousandth of the gradient, which TF32 would hide: the proof is made without it."""
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(64, 256, 3), nn.GELU(), nn.Flatten(), nn.Linear(3584, 10))
    model = model.to(DEVICE)
    x, y = torch.randn(64, 64, 16, device=DEVICE), torch.randint(0, 10, (64,), device=DEVICE)
    coupled = 0.0

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        found = model(x)
        mean = found.softmax(-1).mean(0)
        loss = F.cross_entropy(found, y)
        (loss + coupled * (mean * mean.log()).sum() if coupled else loss).backward()

    torch.optim.AdamW(model.parameters(), lr=0.0).step()  # which imports what compiles
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        oomkit.auto_batch(step, model=model, accumulation_steps=2)(x, y)
        coupled = 0.5
        with pytest.raises(oomkit.SplitError, match="differs by"):
            oomkit.auto_batch(step, model=model, accumulation_steps=2)(x, y)
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@on_a_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_what_autocast_would_hide_is_refused(dtype: torch.dtype) -> None:
    """An entropy of the batch's mean, a hundredth of the gradient off in parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
    x, y = torch.randn(256, 32, device=DEVICE), torch.randint(0, 10, (256,), device=DEVICE)
    coupled = 0.0

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cuda", dtype):
            found = model(x)
            mean = found.softmax(-1).mean(0)
            loss = F.cross_entropy(found, y) + coupled * (mean * mean.log()).sum()
        loss.backward()

    oomkit.auto_batch(step, model=model, accumulation_steps=4)(x, y)
    coupled = 1.0
    with pytest.raises(oomkit.SplitError, match=r"differs by 0\.0"):
        oomkit.auto_batch(step, model=model, accumulation_steps=4)(x, y)


def test_dropout_draws_what_the_undisturbed_run_draws() -> None:
    """The device's own stream is put back to where the failed attempt began."""
    masks: list[torch.Tensor] = []
    sizes: list[int] = []
    fails = True

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        mask = F.dropout(torch.ones_like(x), 0.5)
        if fails:
            held = block(8 * len(x))
            held.zero_()
        sizes.append(len(x))
        masks.append(mask.cpu())

    x = torch.zeros(ROWS, 4, device=DEVICE)
    torch.manual_seed(3)
    with torch.no_grad(), room(100):
        step(x)
    assert step.records[0].ooms >= 1
    k = step.records[0].accumulation_steps
    drawn, plan = masks[-k:], sizes[-k:]
    fails = False
    torch.manual_seed(3)
    del masks[:]
    with torch.no_grad(), force_slices(plan):
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(drawn, masks, strict=True))


def test_figures_of_a_healthy_step() -> None:
    run = Run(Dense, "whole", "fp32")
    step = run.decorated()
    for _ in range(2):
        run.call(step)
    for record in step.records:
        assert record.ooms == 0
        assert record.baseline is not None and record.baseline > 0
        assert record.peak_allocated >= 8 * ROWS * UNIT  # gradients at entry are dropped in it
        if not DRY:
            assert record.peak_reserved >= record.peak_allocated
    settle()


def test_gradients_that_a_step_begins_to_change_by_its_loss_are_refused() -> None:
    """In each call before they were multiplied by 1: only their values tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(ROWS, 8, device=DEVICE), torch.arange(ROWS, device=DEVICE) % 4
    late = False

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:  # set aside until the last micro-batch
                parameter.grad.mul_(0.5 * loss.item() if late else 1.0)
        optimizer.step()

    for _ in range(4):
        step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    late = True
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        step(x, y)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_learning_rate_on_the_device_is_compared_with_its_copy() -> None:
    """The copies of an optimizer's values lie on the host."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(DEVICE)
    rate = torch.tensor(0.1, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, capturable=not DRY)
    x, y = torch.randn(ROWS, 8, device=DEVICE), torch.arange(ROWS, device=DEVICE) % 4
    decays = False

    @oomkit.auto_batch(accumulation_steps=4)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if decays:
            rate.copy_(loss.detach())
        optimizer.step()

    for _ in range(3):
        step(x, y)
    assert float(rate) == pytest.approx(0.1)
    decays = True
    with pytest.raises(oomkit.SplitError, match="'lr' in the param_groups of AdamW"):
        step(x, y)
    assert float(rate) == pytest.approx(0.1)
