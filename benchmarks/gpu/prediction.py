"""Peaks that the planner's rule predicts, against those that are measured.

Each micro-batch size is run as one of two equal slices; what two sizes have shown predicts the
next ones (a secant through the two largest peaks above the baseline, see docs/design.md; computed
here anew: oomkit's planner is not asked, nor are its doubts about a secant). The
error is a share of what was measured; the planner leaves 6 % free (3 % where segments grow).
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
from oomkit.testing import force_slices


def peak(setup: Setup, work: Workload, rows: int) -> int | None:
    """Bytes above the baseline of a call of two slices; None where it does not fit."""
    model, optimizer = work.start(setup)

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model, x, y).backward()
        optimizer.step()

    x, y = work.batch(2 * rows, setup.device)
    try:
        step(x[:2], y[:2])  # the optimizer's state is made
        with force_slices([rows, rows]):
            step(x, y)
    except torch.OutOfMemoryError:
        return None
    record = step.records[-1]
    return (record.peak_allocated or 0) - (record.baseline or 0)


def predicted(points: list[tuple[int, int]], rows: int) -> float:
    """A ray through one point, a secant through the two largest."""
    (n1, b1) = points[-1]
    if len(points) == 1:
        return b1 * rows / n1
    (n0, b0) = points[-2]
    return b1 + (b1 - b0) * (rows - n1) / (n1 - n0)


def main() -> int:
    options = parser(__doc__).parse_args()
    setup = setup_of(options)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    table: list[dict[str, Any]] = []
    for work in workloads(setup.dry).values():
        points: list[tuple[int, int]] = []
        for rows in (2, 4, 6) if setup.dry else (2, 4, 8, 12, 16, 24, 32):
            found = peak(setup, work, rows)
            oomkit.cleanup()
            if found is None:
                break
            row: dict[str, Any] = {"workload": work.name, "rows": rows}
            row["measured, GiB"] = found / GIB
            if points:
                guess = predicted(points, rows)
                row |= {"predicted, GiB": guess / GIB, "error, %": 100 * (guess - found) / found}
            table.append(row)
            points.append((rows, found))
    report(setup, "prediction", __doc__ or "", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
