"""A program that gets to both functions in which defects are planted, and ends well without."""

import oomkit


def main() -> None:
    import torch

    with oomkit.limit_memory("1GiB", device="cpu"), oomkit.guard():
        torch.ones(8) + 1
    print("reached the end")


if __name__ == "__main__":
    main()
