"""What a healthy call costs in instructions: decorated against bare, function by function.

    python benchmarks/instructions.py [--only NAME ...] [--functions 40] [--order FILE]

Valgrind counts them, so that a busy machine changes nothing; needs valgrind with its headers and
a C compiler. One process calls the bare and the decorated function of each row in turn. With
--functions also where the difference is: functions by their own instructions, then those of oomkit
with all that they call. --order writes the script by which the linker puts the functions that were
called in a row (csrc/module/healthy.ld). The exit status is always 0.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import overhead
import torch

import oomkit

HERE = Path(__file__).resolve()
CALLS, BEFORE = 50, 60
NONE = "auto_batch(rng='none')"
Variants = Callable[[], dict[str, Callable[[], object]]]

ROWS: dict[str, tuple[Variants, str]] = {
    "call, rng='none'": (overhead.plain, NONE),
    "call": (overhead.plain, "auto_batch"),
    **{
        title: (functools.partial(lambda title: overhead.nested()[title], title), NONE)
        for title in overhead.nested()
    },
    "backward, 10 parameters": (functools.partial(overhead.one_backward, 10), NONE),
    "backward, 150 parameters": (functools.partial(overhead.one_backward, 150), NONE),
    "whole step, AdamW and scheduler": (overhead.whole_calls, "auto_batch"),
}
"""What is called, and the variant that is measured."""

COUNTING = """
#include <valgrind/callgrind.h>
void begin(void);
void end(void);
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def child(library: str, rows: list[str]) -> None:
    """Calls the variants of each row; what comes before and between is not counted."""
    torch.set_num_threads(1)
    counting = ctypes.CDLL(library)
    for row in rows:
        make, variant = ROWS[row]
        calls = make()
        both = calls["bare"], calls[variant]
        for call in both * 2:
            for _ in range(BEFORE // 2):
                call()
        for call in both:
            gc.collect()
            gc.disable()
            counting.begin()
            for _ in range(CALLS):
                call()
            counting.end()
            gc.enable()


def read(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Instructions of one call by function: its own, and with all that it calls."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    names: dict[str, str] = {}
    function, called = "", False
    for line in path.read_text().splitlines():
        found = re.match(r"(fn|ob|cob|cfn)=\((\d+)\) ?(.*)", line)
        if found and found.group(1).endswith("fn"):
            name = found.group(3).partition("'")[0] or names[found.group(2)]
            names[found.group(2)] = name
            function = name if found.group(1) == "fn" else function
        elif line.startswith("calls="):
            called = True
        elif re.match(r"[\d+*-]", line):
            count = int(line.split()[1])
            whole[function] += count
            own[function] += 0 if called else count
            called = False
    return own, whole


def difference(mine: Counter[str], bare: Counter[str]) -> list[tuple[float, str]]:
    found = [((mine[name] - bare[name]) / CALLS, name) for name in {*mine, *bare}]
    return sorted(found, key=lambda row: -abs(row[0]))


ORDER = """/* What a call runs when nothing fails, in a row: 16 pages where it was spread over 64,
 * which the step between two calls evicts from the TLB. A name that is missing costs time alone.
 * Written by `python benchmarks/instructions.py --order csrc/module/healthy.ld`. */
SECTIONS
{{
  .text.healthy :
  {{
{}
  }}
}}
INSERT BEFORE .text;
"""


def write_order(path: str, counted: Counter[str]) -> None:
    """The linker script of those functions of oomkit._C that were called."""
    symbols = subprocess.run(
        ["nm", oomkit._C.__file__], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    ours = {line.split()[2] for line in symbols if line.split()[-2] in ("t", "T")}
    called = sorted(name for name, count in counted.items() if count > 0 and name in ours)
    Path(path).write_text(ORDER.format("\n".join(f"    *(.text.{name})" for name in called)))


def show(row: str, bare: Path, mine: Path, functions: int) -> None:
    own, whole = zip(read(mine), read(bare), strict=True)
    after, before = (sum(one.values()) / CALLS for one in own)
    print(f"{row:50}{before:12.0f}{after:12.0f}{after - before:12.0f}")
    for count, name in difference(*own)[:functions]:
        print(f"  {count:10.1f}  {name[:120]}")
    inside = [(count, name) for count, name in difference(*whole) if "oomkit" in name]
    for count, name in inside[:functions]:
        print(f"  {count:10.1f} with what it calls  {name[:120]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", choices=ROWS, help="these rows")
    parser.add_argument("--functions", type=int, default=0, help="show so many of them")
    parser.add_argument("--order", metavar="FILE", help="write the linker's script")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.child[1:])
        return 0
    rows = args.only or list(ROWS)
    with tempfile.TemporaryDirectory() as name:
        source, library, out = (str(Path(name, x)) for x in ("count.c", "count.so", "out"))
        Path(source).write_text(COUNTING)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", library], check=True)
        command = [
            *("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"),
            f"--callgrind-out-file={out}",
            *(sys.executable, str(HERE), "--child", library, *rows),
        ]
        env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env)
        print(f"{'instructions of one call':50}{'bare':>12}{'decorated':>12}{'over bare':>12}")
        counted: Counter[str] = Counter()
        for number, row in enumerate(rows):
            bare, mine = (Path(f"{out}.{2 * number + each}") for each in (1, 2))
            show(row, bare, mine, args.functions)
            counted += read(mine)[0]
        if args.order:
            write_order(args.order, counted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
