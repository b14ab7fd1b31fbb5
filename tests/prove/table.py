"""The table that `make prove` prints and commits."""

from __future__ import annotations

import platform
from pathlib import Path

from .suite import Result

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "prove.txt"

Results = dict[tuple[str, str], Result]


def _line(cells: tuple[str, str, str, str], width: int) -> str:
    return f"{cells[0]:{width}s} {cells[1]:>8s} {cells[2]:>9s} {cells[3]:>8s}"


def summary(results: Results, seconds: float) -> str:
    """Suite, cases, failures, time: a line for each suite, and one for all."""
    names = list(dict.fromkeys(suite for suite, _ in results))
    width = max([len(name) for name in names] + [12])
    lines = [_line(("suite", "cases", "failures", "time"), width)]
    for name in names:
        found = [result for (suite, _), result in results.items() if suite == name]
        lines.append(_line((name, *_sums(found)), width))
    cases, failures, spent = _sums(list(results.values()))
    lines.append(_line(("all suites", cases, failures, spent), width))
    lines.append(f"from beginning to end: {seconds:.0f} s")
    return "\n".join(lines)


def _sums(found: list[Result]) -> tuple[str, str, str]:
    return (
        str(sum(r.cases for r in found)),
        str(sum(len(r.failures) for r in found)),
        f"{sum(r.seconds for r in found):.0f} s",
    )


def table(results: Results, seconds: float, seed: str, repeated: list[str]) -> str:
    import torch

    head = (
        f"make prove: every case is a fault (in suites of tests: a test)\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, seed {seed}\n"
    )
    if repeated:  # their time is in the sums, and not in "from beginning to end"
        head += f"run again by themselves after a mend: {'; '.join(repeated)}\n"
    units = sorted(results.items(), key=lambda item: item[0])
    width = max(len(unit) for (_, unit), _ in units)
    detail: list[str] = []
    for suite in dict.fromkeys(suite for (suite, _), _ in units):
        detail.append(f"\n{suite}")
        for (of, unit), r in units:
            if of == suite:
                told = f"  {r.told}" if r.told else ""
                line = (
                    f"  {unit:{width}s} {r.cases:7d} {len(r.failures):5d} {r.seconds:6.0f} s{told}"
                )
                detail += [line.rstrip(), *(f"    {more}" for more in r.lines)]
    return head + "\n" + summary(results, seconds) + "\n" + "\n".join(detail) + "\n"
