"""What units of `make prove` have found, and the table of it; both are committed."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from pathlib import Path

from .suite import Result

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "prove.txt"
KEPT = TABLE.with_suffix(".json")

Results = dict[tuple[str, str], Result]


def _kept(failure: str) -> str:
    """The end of what a unit has told, without the folders of this machine."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/", "", failure)[-2000:]


def save(path: Path, results: Results) -> None:
    """A line for each unit."""
    rows = [
        json.dumps([*key, found.as_dict() | {"failures": list(map(_kept, found.failures))}])
        for key, found in results.items()
    ]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def read(path: Path) -> Results:
    rows = json.loads(path.read_text()) if path.exists() else []
    return {(suite, unit): Result(**found) for suite, unit, found in rows}


def _line(cells: tuple[str, ...], width: int) -> str:
    return f"{cells[0]:{width}s} {cells[1]:>8s} {cells[2]:>9s} {cells[3]:>8s}  {cells[4]}".rstrip()


def summary(results: Results) -> str:
    """Suite, cases, failures, time, commits: a line for each suite, and one for all."""
    names = list(dict.fromkeys(suite for suite, _ in results))
    width = max([len(name) for name in names] + [12])
    lines = [_line(("suite", "cases", "failures", "time", "commit"), width)]
    for name in names:
        found = [result for (suite, _), result in results.items() if suite == name]
        lines.append(_line((name, *_sums(found), _commits(found)), width))
    lines.append(_line(("all suites", *_sums(list(results.values())), ""), width))
    return "\n".join(lines)


def _commits(found: list[Result]) -> str:
    """Of most units first."""
    counts = Counter(result.commit for result in found).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{commit} ({units})" for commit, units in counts)


def _sums(found: list[Result]) -> tuple[str, str, str]:
    return (
        str(sum(r.cases for r in found)),
        str(sum(len(r.failures) for r in found)),
        f"{sum(r.seconds for r in found):.0f} s",
    )


def table(results: Results, seed: str, units_in_all: int) -> str:
    import torch

    head = (
        f"make prove: every case is a fault (in suites of tests: a test)\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, seed {seed}\n"
    )
    head += "commit: on which they ran last, with how many units of a suite where that differs\n"
    if len(results) < units_in_all:
        head += f"{units_in_all - len(results)} of {units_in_all} units have not run yet\n"
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
    return head + "\n" + summary(results) + "\n" + "\n".join(detail) + "\n"
