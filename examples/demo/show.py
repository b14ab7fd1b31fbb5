"""What the demo shows at the end: a table and one line of truth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

LOSS_BOUND = 1e-3  # relative, every step
GRADIENT_BOUND = 1e-5  # of the gradients' norm, first step
MIB = 1024 * 1024


@dataclass(frozen=True)
class Truth:
    """How far the run with oomkit is from the reference."""

    loss: float
    gradient: float
    parameter: float
    seen: int
    expected: int
    ooms: int
    lost: float

    @property
    def agrees(self) -> bool:
        return (
            self.loss <= LOSS_BOUND
            and self.gradient <= GRADIENT_BOUND
            and self.seen == self.expected
        )

    def line(self) -> str:
        verdict = "run 3 agrees with run 1" if self.agrees else "RUN 3 DISAGREES"
        return (
            f"{verdict}: largest loss difference {self.loss:.1e} relative "
            f"(allowed {LOSS_BOUND:.0e}), first gradients {self.gradient:.1e} of their "
            f"norm (allowed {GRADIENT_BOUND:.0e}), largest parameter difference "
            f"{self.parameter:.1e} (not judged); {self.seen} of {self.expected} samples "
            f"seen, OOMs: {self.ooms}, time lost to them: {self.lost:.2f} s"
        )


def compare(folder: Path, reference: dict[str, Any], run: dict[str, Any]) -> Truth:
    """Measures run 3 against run 1. Anything that is not a number disagrees."""
    with np.load(folder / "reference.npz") as one, np.load(folder / "oomkit.npz") as three:
        gradient = np.linalg.norm(three["gradients"] - one["gradients"])
        gradient = gradient / np.linalg.norm(one["gradients"])
        parameter = np.max(np.abs(three["parameters"] - one["parameters"]))
    whole = np.array(reference["losses"])
    losses = np.array(run["losses"])
    if losses.shape != whole.shape:
        raise RuntimeError(f"run 3 made {len(losses)} steps, run 1 {len(whole)}")
    records = run["records"]
    finished = [r for r in records if r["outcome"] == "finished"]
    return Truth(
        loss=float(np.max(np.abs(losses - whole) / np.abs(whole))),
        gradient=float(gradient),
        parameter=float(parameter),
        seen=sum(r["batch_size"] for r in finished),
        expected=len(whole) * run["batch_size"],
        ooms=sum(r["ooms"] for r in records),
        lost=sum(r["time_lost"] for r in records),
    )


def mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f}"


def table(records: list[dict[str, Any]], budget: int) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "step",
        "batch",
        "micro-\nbatch",
        "accumulation\nsteps",
        "peak allocated\nMiB",
        "budget\nMiB",
        "OOMs",
        "time\ns",
    ):
        result.add_column(name, justify="right")
    for record in records:
        result.add_row(
            str(record["step"]),
            str(record["batch_size"]),
            str(record["micro_batch_size"]),
            str(record["accumulation_steps"]),
            mib(record["peak_allocated"]),
            mib(budget),
            str(record["ooms"]),
            f"{record['time']:.2f}",
        )
    return result


def write_table(path: Path, records: list[dict[str, Any]], budget: int, truth: Truth) -> None:
    with path.open("w", encoding="utf-8") as stream:
        console = Console(file=stream, width=80)
        console.print(table(records, budget))
        console.print(truth.line(), highlight=False)
