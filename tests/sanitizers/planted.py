"""A program that gets to both functions in which defects are planted, and ends well without.

What it says first tells a defect that was not found from a program that did not run.
"""

import torch

import oomkit

BEGUN = "all is imported"


@oomkit.auto_batch
def step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


if __name__ == "__main__":
    print(BEGUN, flush=True)
    with oomkit.limit_memory("1GiB", device="cpu"):
        step(torch.ones(8))
    print("reached the end")
