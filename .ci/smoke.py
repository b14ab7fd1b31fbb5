"""Is an installed oomkit whole? `.ci/wheel.py` asks it of each environment. Prints one line."""

from __future__ import annotations

import platform
import warnings
from contextlib import nullcontext

import torch

warnings.simplefilter("error")
import oomkit  # noqa: E402  (a bridge that is missing or does not fit is an error here)
from oomkit import _bridge  # noqa: E402

MINOR = ".".join(torch.__version__.split(".")[:2])


def train(limit: bool) -> tuple[torch.Tensor, int]:
    """The weights after three steps, and how many out-of-memory errors were met."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4096, 64).double(), torch.randn(4096, 1).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    with oomkit.limit_memory("24MiB", device="cpu") if limit else nullcontext():
        for _ in range(3):
            step(x, y)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, sum(record.ooms for record in step.records)


assert _bridge.torch_version == MINOR, (_bridge.torch_version, MINOR)
whole, none = train(limit=False)
parts, met = train(limit=True)
assert none == 0 and met > 0, (none, met)
torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
print(
    f"oomkit {oomkit.__version__}, Python {platform.python_version()}, torch {torch.__version__}: "
    f"bridge {_bridge.torch_version}, {met} out-of-memory errors survived, the same weights"
)
