"""The table that `make mutants` prints and commits."""

from __future__ import annotations

import platform
from pathlib import Path

from .mutant import ROOT
from .verdict import Verdict

FOLDER = ROOT / "benchmarks" / "results"


def path_of(catalogue: str) -> Path:
    """Where the table of a catalogue is."""
    return FOLDER / ("mutants.txt" if catalogue == "engine" else f"mutants-{catalogue}.txt")


def summary(verdicts: list[Verdict], seconds: float) -> str:
    caught = sum(v.caught for v in verdicts)
    crashes = sum(v.caught and "(crash: " in v.told for v in verdicts)
    return (
        f"{len(verdicts)} mutants, {caught} caught ({crashes} by a crash), "
        f"{len(verdicts) - caught} not; {seconds:.0f} s"
    )


def entry(verdict: Verdict) -> str:
    by = f"caught by {verdict.told}" if verdict.caught else f"NOT CAUGHT: {verdict.told}"
    return (
        f"{verdict.mutant.name} ({verdict.mutant.file}, {verdict.seconds:.0f} s)\n"
        f"    broken: {verdict.mutant.breaks}\n"
        f"    {by}"
    )


def table(verdicts: list[Verdict], seconds: float) -> str:
    import torch

    head = (
        "make mutants: the sources with one invariant broken at a time, and the test that tells\n"
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
    )
    entries = "\n".join(entry(v) for v in verdicts)
    return f"{head}\n{summary(verdicts, seconds)}\n\n{entries}\n"
