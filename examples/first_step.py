"""A small program that runs out of memory, and the line that keeps it running.

python examples/first_step.py             # under a memory budget, with @oomkit.auto_batch
python examples/first_step.py --plain     # under the budget, without: it dies
python examples/first_step.py --no-limit  # without a budget: the losses to compare with
"""

import sys

import torch
from torch import nn

import oomkit

if "--no-limit" not in sys.argv:
    oomkit.limit_memory("48MiB", device="cpu")  # before the model is made: it counts, too

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
model.append(nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


if "--plain" not in sys.argv:
    train_step = oomkit.auto_batch(train_step)  # the same as @oomkit.auto_batch above it

for number in range(1, 9):
    x = torch.randn(2048, 64)
    y = x[:, :10].argmax(dim=1)
    print(f"step {number}: loss {train_step(x, y):.4f}")
