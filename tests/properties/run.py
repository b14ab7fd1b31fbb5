"""Running many random programs, each set from a seed."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import Programs

STEPS = 10


def explore(
    from_seed: int, programs: int, *, shrink: bool, machine: type[Programs] = Programs
) -> Counter[str]:
    """What came out how often. An AssertionError has the shortest program that fails."""
    logger = logging.getLogger("oomkit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    machine.counts = Counter()
    try:
        run_state_machine_as_test(
            seed(from_seed)(machine),
            settings=settings(
                max_examples=programs,
                stateful_step_count=STEPS,
                phases=phases,
                deadline=None,
                database=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logger.setLevel(level)
    return machine.counts
