"""What `torchrun --max-restarts 1` starts: the last rank ends in a step of the first start."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks import world as worlds
from oomkit.testing import inject_oom


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    turns = 0

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        nonlocal turns
        turns += 1
        model.zero_grad()
        loss = F.mse_loss(model(x), torch.ones(len(x), 2))
        if start == 0 and rank == last and turns == 3:
            sys.exit(3)
        loss.backward()

    x = torch.randn(8, 4)
    for turn in range(4):
        if turn == 1 and rank == 0:
            with inject_oom(nth=1):
                step(x)
        else:
            step(x)
    shared = worlds.meet().shared
    print(f"start {start}, rank {rank}: {len(step.records)} steps, shared {shared}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
