"""Rows of overhead.py for several builds of oomkit, side by side.

    python benchmarks/builds.py old=FOLDER new=FOLDER [--sections whole_step] [--times 14]

FOLDER is what goes into PYTHONPATH: a checkout with the extension built in place, or the
build folder of `python setup.py build --build-lib FOLDER`. Each figure is a process of its
own, for two processes of one build differ by as much as builds do; the builds take turns, in
another order at each, so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

OVERHEAD = Path(__file__).with_name("overhead.py")
ORDER = random.Random(0)


def run(folder: str, sections: list[str], scale: float) -> list[dict[str, float]]:
    """The rows of one process that have a bare one beside them."""
    with tempfile.TemporaryDirectory() as place:
        figures = Path(place) / "figures.json"
        command = [sys.executable, str(OVERHEAD), "--scale", str(scale), "--json", str(figures)]
        env = {**os.environ, "PYTHONPATH": str(Path(folder).resolve())}
        subprocess.run(
            [*command, "--sections", *sections], env=env, check=True, capture_output=True
        )
        return [row for row in json.loads(figures.read_text()) if row["over_bare"] is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--sections", nargs="+", default=["whole_step"])
    parser.add_argument("--times", type=int, default=14, help="processes of each build")
    parser.add_argument("--scale", type=float, default=0.4, help="as of overhead.py")
    args = parser.parse_args()
    builds = dict(one.split("=", 1) for one in args.builds)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(args.times):
        for name in ORDER.sample(list(builds), len(builds)):
            for row in run(builds[name], args.sections, args.scale):
                found[str(row["name"])][name].append(row["over_bare"])
                if row["median"] is not None:
                    bare = row["median"] - row["over_bare"]
                    shares[str(row["name"])][name].append(row["over_bare"] / bare)
    first = next(iter(builds))
    print(f"over bare: median of {args.times} processes of each build (half of them lie within)\n")
    for title, by_build in found.items():
        print(title)
        for name, figures in by_build.items():
            low, middle, high = statistics.quantiles(figures, n=4)
            ratio = middle / statistics.median(by_build[first])
            share = statistics.median(shares[title][name] or [0.0])
            print(
                f"  {name:24} {middle:10.3f}  ({low:.3f} to {high:.3f})"
                f"  {share:7.2%} of bare  {ratio:6.2f} of {first}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
