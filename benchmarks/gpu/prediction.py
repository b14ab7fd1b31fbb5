"""Peaks that oomkit's planner predicts, against those that are measured.

One decorated step is called with growing batches, which it plans for itself. Afterwards the
planner is asked, by what it knew before the call, what the micro-batches of the call would need
above the baseline (the first, and the later ones, which find its gradients): the larger is the
prediction. The error is a share of what was measured; the planner leaves 6 % free (3 % where
segments grow).
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from support import GIB, Setup, parser, report, setup_of
from support.workloads import Workload, workloads

import oomkit


class Run:
    """One step, whose planner learns from call to call."""

    def __init__(self, setup: Setup, work: Workload) -> None:
        self.setup, self.work = setup, work
        model, optimizer = work.start(setup)
        self.gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)

        @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False, accumulation_steps=2)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            work.loss(model, x, y).backward()
            optimizer.step()

        self.step: Any = step
        self.optimizer = optimizer
        x, y = work.batch(2, setup.device)
        step(x, y)  # the optimizer's state is made

    def call(self, rows: int) -> dict[str, Any] | None:
        """What was predicted and measured, in bytes; None where it does not fit whole or in its
        plan: peaks of an attempt that failed are none."""
        known = self.step.state_dict()["signatures"]
        self.optimizer.zero_grad()  # else gradients that the step drops are in the baseline
        x, y = self.work.batch(rows, self.setup.device)
        try:
            self.step(x, y)
        except torch.OutOfMemoryError:
            return None
        record = self.step.records[-1]
        if record.ooms:
            return None
        roles = (False, True) if record.accumulation_steps > 1 else (False,)
        guesses = [
            oomkit._C._predict_sizes(entry, later, record.micro_batch_size, self.gradients)
            for entry in known
            for later in roles
        ]
        return {
            "micro-batch": record.micro_batch_size,
            "k": record.accumulation_steps,
            "measured": record.peak_allocated - record.baseline,
            "predicted": max((guess for guess in guesses if guess is not None), default=None),
        }


def main() -> int:
    options = parser(__doc__).parse_args()
    setup = setup_of(options)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    table: list[dict[str, Any]] = []
    for work in workloads(setup.dry).values():
        run = Run(setup, work)
        for rows in (4, 6, 8) if setup.dry else (4, 8, 12, 16, 24, 32, 48, 64):
            found = run.call(rows)
            if found is None:
                break
            measured, guess = found.pop("measured"), found.pop("predicted")
            row: dict[str, Any] = {"workload": work.name, "rows": rows, **found}
            row["measured, GiB"] = measured / GIB
            if guess is not None:
                share = 100 * (guess - measured) / measured
                row |= {"predicted, GiB": guess / GIB, "error, %": share}
            table.append(row)
        del run
        oomkit.cleanup()
    report(setup, "prediction", __doc__ or "", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
