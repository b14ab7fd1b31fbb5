"""Seeds torch's streams, as `torch.manual_seed()` does, where that takes a millisecond.

For each kind of device that has not begun, torch.manual_seed() keeps the call and a text of the
whole stack, for good: a fifth of the time of tests that begin many runs.
"""

from __future__ import annotations

import torch


def seed_all(number: int) -> None:
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
