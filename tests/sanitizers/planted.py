"""A program that gets to both functions in which defects are planted, and ends well without."""

import torch

import oomkit


@oomkit.auto_batch
def step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


if __name__ == "__main__":
    with oomkit.limit_memory("1GiB", device="cpu"):
        step(torch.ones(8))
    print("reached the end")
