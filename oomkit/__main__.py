"""python -m oomkit report FILE...: a table, and a picture, of records written by sinks.JSONL.

python -m oomkit run SCRIPT: an unmodified script with records, and a report at its end.
python -m oomkit check FILE:NAME: a dry run of a step with a batch, for CI.
python -m oomkit estimate FILE:NAME: what a step needs, on fake tensors.
python -m oomkit sizes: what steps with remember=True have found.
python -m oomkit explain KIND: cause and fix of the error or warning whose message names KIND.
python -m oomkit env: what a bug report needs.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from . import __version__, sizes
from ._api.check import check
from ._api.estimate import estimate
from ._reports import page
from ._reports.environment import environment
from ._reports.explain import entries, explain
from ._reports.script import run_script
from .report import report

_NEEDED = frozenset(
    """step label batch_size micro_batch_size accumulation_steps peak_allocated budget ooms
    time time_lost""".split()
)
_MIB = 1024 * 1024


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; ValueError names the line that is none."""
    rows = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict) or not row.keys() >= _NEEDED:
                raise ValueError(f"{path}, line {number}: not a step record")
            rows.append(row)
    return rows


def read_all(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of all files; of several each label has its file's name in front."""
    if len(paths) == 1:
        return read(paths[0])
    return [
        {**row, "label": f"{path.stem}: {row['label']}"} for path in paths for row in read(path)
    ]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per label: the peak of every step against the budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, panels = plt.subplots(len(labels), figsize=(9, 3.5 * len(labels)), squeeze=False)
    for label, axes in zip(labels, panels[:, 0], strict=True):
        mine = [row for row in rows if row["label"] == label]
        steps = range(1, len(mine) + 1)
        peaks = [(row["peak_allocated"] or 0) / _MIB for row in mine]
        colours = ["#d1642a" if row["ooms"] else "#3b6ea5" for row in mine]
        axes.bar(steps, peaks, color=colours, width=0.8)
        budgets = [row["budget"] for row in mine]
        if any(budget is not None for budget in budgets):
            limits = [float("nan") if budget is None else budget / _MIB for budget in budgets]
            axes.step(steps, limits, where="mid", color="#b00020", label="budget")
            axes.legend(loc="lower right")
        axes.set_title(f"{label} (orange: ran out of memory)", loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("peak allocated, MiB")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def remembered(function: str | None, clear: bool) -> int:
    """Shows or removes sizes."""
    if not clear:
        print(sizes.list(function))
        return 0
    try:
        count = sizes.clear(function)
    except OSError as error:
        print(f"oomkit: {error}", file=sys.stderr)
        return 1
    print(f"{count} {'entry' if count == 1 else 'entries'} removed")
    return 0


def made_by(target: str) -> tuple[Any, ...] | None:
    """What NAME in FILE gives: (step, argument, ...). None where there is no such function."""
    path, _, name = target.rpartition(":")
    if not path:
        print("oomkit: expected FILE:NAME, a function of a Python file", file=sys.stderr)
        return None
    if not Path(path).is_file():
        print(f"oomkit: there is no file {path}", file=sys.stderr)
        return None
    try:
        made = runpy.run_path(path, run_name="__oomkit_check__").get(name)
    except Exception as error:
        print(f"oomkit: {path} does not run: {_told(error, path)}", file=sys.stderr)
        return None
    if not callable(made):
        print(f"oomkit: {path} has no function {name!r}", file=sys.stderr)
        return None
    wanted = f"oomkit: expected {name}() of {path} to return (step, argument, ...)"
    try:
        found = made()
    except Exception as error:
        print(f"{wanted}, but it raised {_told(error, path)}", file=sys.stderr)
        return None
    if not isinstance(found, (tuple, list)) or not found or not callable(found[0]):
        print(f"{wanted}, but it returned {_described(found)}", file=sys.stderr)
        return None
    return tuple(found)


def _told(error: Exception, path: str) -> str:
    """An error of the user's file in one line, with the last line of that file it came by."""
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__)
             if entry.filename == path]  # fmt: skip
    place = f" at {path}:{lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {error}"


def _described(found: object) -> str:
    if isinstance(found, (tuple, list)):
        if not found:
            return f"an empty {type(found).__name__}"
        return f"a {type(found).__name__} whose first element is {type(found[0]).__name__!r}"
    return repr(type(found).__name__)


def checked(target: str) -> int:
    """The dry run of a step."""
    made = made_by(target)
    if made is None:
        return 2
    try:
        found = check(*made)
    except Exception as error:
        path = target.rpartition(":")[0]
        print(f"oomkit: the step raised {_told(error, path)}", file=sys.stderr)
        return 1
    print(found)
    return found.status


def estimated(target: str, budget: str | None) -> int:
    """What a step needs, and the largest micro-batch of a budget."""
    made = made_by(target)
    if made is None:
        return 2
    try:
        found = estimate(*made)
    except ValueError as error:
        print(f"oomkit: {error}", file=sys.stderr)
        return 1
    print(found)
    if budget is not None:
        try:
            rows = found.largest(budget)
        except ValueError as error:
            print(f"oomkit: {error}", file=sys.stderr)
            return 2
        print(f"{budget}: {rows or 'not even one'} {'row' if rows < 2 else 'rows'} at once")
        return 0 if rows else 1
    return 0


def explained(kind: str | None) -> int:
    """The entry of a kind; of none, the kinds."""
    text = "\n".join(entries()) if kind is None else explain(kind)
    if text is None:
        near = "".join(f"; did you mean {n}?" for n in get_close_matches(kind or "", entries(), 1))
        print(f"oomkit: there is no kind {kind!r} of error or warning{near}", file=sys.stderr)
        return 1
    print(text)
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m oomkit", description="Tools of oomkit.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="show records that sinks.JSONL has written")
    command.add_argument("file", type=Path, nargs="+", metavar="FILE", help="a JSONL file")
    command.add_argument("--all", action="store_true", help="every record, not one screen")
    command.add_argument(
        "--format", choices=("text", "markdown", "json"), default="text", help="default: text"
    )
    command.add_argument(
        "--html", type=Path, metavar="OUT", help="write a page; of two files it compares"
    )
    command.add_argument("--png", type=Path, metavar="OUT", help="draw a picture (matplotlib)")
    commands.add_parser("env", help="show versions, allocator settings and budgets")
    command = commands.add_parser("run", help="run a script with records and a report")
    command.add_argument("--records", type=Path, metavar="OUT", help="also write them as JSONL")
    command.add_argument("script", type=Path)
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    command = commands.add_parser("check", help="dry-run a step with a batch")
    command.add_argument(
        "target", metavar="FILE:NAME", help="a function that returns (step, argument, ...)"
    )
    command = commands.add_parser("estimate", help="say what a step needs, without running it")
    command.add_argument(
        "target", metavar="FILE:NAME", help="a function that returns (step, argument, ...)"
    )
    command.add_argument("--budget", metavar="SIZE", help="also the largest micro-batch for it")
    command = commands.add_parser("sizes", help="show what steps with remember=True have found")
    command.add_argument("function", nargs="?", help="only those of this function")
    command.add_argument("--clear", action="store_true", help="remove them")
    command = commands.add_parser("explain", help="show cause and fix of an error or a warning")
    command.add_argument("kind", nargs="?", help="as the message names it; all kinds without")
    return parser.parse_args(arguments)


def reported(options: argparse.Namespace) -> int:
    missing = [path for path in options.file if not path.exists()]
    if missing:
        print(f"oomkit: there is no file {missing[0]}", file=sys.stderr)
        return 2
    try:
        rows = read_all(options.file)
    except (OSError, ValueError) as error:
        print(f"oomkit: {error}", file=sys.stderr)
        return 1
    if options.html is not None:
        runs = [(path.stem, read(path)) for path in options.file]
        options.html.write_text(page.page(runs), encoding="utf-8")
    print(report(rows, format=options.format, all=options.all))
    if options.png is not None:
        if not rows:
            print(f"oomkit: {options.file[0]} has no records to draw", file=sys.stderr)
            return 1
        try:
            draw(rows, options.png)
        except ImportError:
            print("oomkit: --png needs matplotlib: pip install matplotlib", file=sys.stderr)
            return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.command == "explain":
        return explained(options.kind)
    if options.command == "sizes":
        return remembered(options.function, options.clear)
    if options.command == "env":
        print(environment(__version__))
        return 0
    if options.command == "run":
        if not options.script.is_file():
            print(f"oomkit: there is no file {options.script}", file=sys.stderr)
            return 2
        return run_script(options.script, options.arguments, options.records)
    if options.command == "check":
        return checked(options.target)
    if options.command == "estimate":
        return estimated(options.target, options.budget)
    return reported(options)


if __name__ == "__main__":
    sys.exit(main())
