"""One rank of a step on a device: `python -m gpu.ranks_program RANK WORLD BACKEND KIND STORE`.

The last rank gets too little memory for its batch. Prints how far gradients are from those that
torch alone gives, as a share of the largest, and how often each rank ran out of memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from gpu import DEVICE, UNIT, allocated, room, settle

WIDTH = max(64, UNIT // 2**15)
ROWS = 16


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    net = nn.Sequential(*layers).to(DEVICE)
    if kind == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net)


def _gradients(model: Any) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found.append(gradient.detach().clone())
    return found


def main() -> None:
    rank, world, (backend, kind, store) = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    model = _model(kind)
    torch.manual_seed(rank + 1)
    x = torch.randn(ROWS, 4 * WIDTH, WIDTH, device=DEVICE)

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        F.mse_loss(model(x), torch.zeros_like(x)).backward()

    step(x)
    expected = _gradients(model)
    decorated = oomkit.auto_batch(step)
    decorated(x)
    record = decorated.records[-1]
    needs = (record.peak_allocated or 0) - allocated()
    settle()
    if rank == world - 1:
        with room(0.7 * needs / UNIT):
            decorated(x)
    else:
        decorated(x)
    errors = torch.zeros(world, device=DEVICE)
    errors[rank] = decorated.records[-1].ooms
    dist.all_reduce(errors)
    pairs = zip(_gradients(model), expected, strict=True)
    far = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    print(json.dumps({"far": far, "errors": errors.tolist()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
