"""A training run that survives out-of-memory and still computes the same thing.

Trains a byte-level GPT on the sources of Python's standard library three times, each
in a process of its own, with the same seed and the same batches:

1. without a limit, for reference;
2. under a memory budget, as it is: it dies;
3. under the same budget with one added line, @oomkit.auto_batch: it finishes.

Exit status 1 when run 3 does not agree with run 1. On a machine with CUDA the GPU is
used, elsewhere the CPU. The training program is in train.py, the model in gpt.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpt
import picture
import show
from rich.console import Console

HERE = Path(__file__).resolve()
SHARE = 0.6  # of the way from parameters and optimizer state to the reference's peak
MIB = show.MIB

console = Console(highlight=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", choices=sorted(gpt.SCALES), default="demo")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument(
        "--run",
        choices=("reference", "plain", "oomkit"),
        help="make one of the three runs, in this process",
    )
    parser.add_argument("--budget", type=int, help="bytes, with --run")
    return parser.parse_args()


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
    sys.stdout.flush()  # the runs write to the same terminal


def start(
    args: argparse.Namespace, kind: str, budget: int | None, dies: bool = False
) -> subprocess.CompletedProcess[str]:
    """Makes one run in a new process; its errors are kept when it is meant to die."""
    command = [sys.executable, str(HERE), "--run", kind]
    command += ["--steps", str(args.steps), "--scale", args.scale]
    command += ["--output", str(args.output)]
    if budget is not None:
        command += ["--budget", str(budget)]
    errors = subprocess.PIPE if dies else None
    return subprocess.run(command, stderr=errors, text=True, check=False)


def figures(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((args.output / f"{kind}.json").read_text())
    loaded["batch_size"] = gpt.SCALES[args.scale].batch
    return loaded


def died(run: subprocess.CompletedProcess[str]) -> bool:
    """Shows how the plain run ended; was it the error that this is about?"""
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    for line in lines[-3:]:
        say(f"    {line}")
    oom = any(line.startswith("torch.OutOfMemoryError") for line in lines)
    return run.returncode != 0 and oom


def driver(args: argparse.Namespace) -> int:
    args.output.mkdir(parents=True, exist_ok=True)
    for old in args.output.glob("*"):
        if old.suffix in {".json", ".npz", ".png", ".txt"}:
            old.unlink()

    say("Run 1 of 3: no limit")
    if start(args, "reference", None).returncode != 0:
        say("The reference run failed.")
        return 1
    reference = figures(args, "reference")
    static, peak = reference["static_bytes"], reference["peak_bytes"]
    budget = int(static + SHARE * (peak - static))
    say(
        f"    {reference['parameters'] / 1e6:.2f} million parameters on "
        f"{reference['device']}; parameters and optimizer state {static / MIB:.1f} MiB, "
        f"peak {peak / MIB:.1f} MiB"
    )

    say(f"\nRun 2 of 3: a budget of {budget / MIB:.1f} MiB, nothing else changed")
    if not died(start(args, "plain", budget, dies=True)):
        say("The plain run should have died of torch.OutOfMemoryError, and did not.")
        return 1

    say("\nRun 3 of 3: the same budget, and one line added: @oomkit.auto_batch")
    if start(args, "oomkit", budget).returncode != 0:
        say("The run with oomkit failed.")
        return 1
    return judge(args, reference, budget)


def judge(args: argparse.Namespace, reference: dict[str, Any], budget: int) -> int:
    run = figures(args, "oomkit")
    truth = show.compare(args.output, reference, run)
    console.print(show.table(run["records"], budget))
    say(truth.line())
    show.write_table(args.output / "table.txt", run["records"], budget, truth)
    picture.draw(args.output, reference, run, budget, truth.loss)
    say(f"Table and picture: {args.output / 'table.txt'}, {args.output / 'demo.png'}")
    return 0 if truth.agrees else 1


def main() -> int:
    args = parse()
    if args.run is None:
        return driver(args)
    import train

    train.main(train.Settings(args.run, args.output, args.steps, args.scale, args.budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
