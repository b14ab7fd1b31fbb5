"""A hyper-parameter search over transformers under a memory budget that kills the plain one.

Models base and large (BERT, RoBERTa, DeBERTa-v3, XLM-RoBERTa), lengths up to 512, batches up to
64 rows: one trial too large, and the whole study is gone. Here the same objective, in the same
space, is run with three changes: its two steps are decorated with `oomkit.auto_batch`, it is
wrapped with `oomkit.optuna.prune_on_oom`, and `oomkit.reserve` has its memory before it begins.

    python examples/tune_max.py --n-trials 20 --budget 300MiB
    python examples/tune_max.py --n-trials 20 --budget 300MiB --plain    # as it was: it dies
    python examples/tune_max.py --study tune.db     # kill it, and go on with the same line
    python examples/tune_max.py --device cuda       # models of full size

Several terminals may run the same line with one `--study`; `--device-memory` says how much there
is for all of them, and a trial begins when its budget is free.

It needs `pip install -r requirements/tune_max.txt`.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "numpy", "optuna", "mlflow", "sqlalchemy", "alembic", "transformers", "rich",
          "matplotlib")  # fmt: skip


def say_what_is_missing() -> bool:
    """Says which packages are missing, and the command that installs them."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    commands = ["pip install -r requirements/tune_max.txt"] if missing else []
    if find_spec("oomkit") is None:
        missing.append("oomkit")
        commands.append("pip install --no-build-isolation .")
    if missing:
        print(
            f"tune_max.py needs {', '.join(missing)}, not installed for {sys.executable}. In the "
            f"folder of oomkit's sources: {' && '.join(commands)}",
            file=sys.stderr,
        )
    return bool(missing)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-trials", type=int, default=20, help="that the study is to have")
    parser.add_argument("--budget", help="of a trial; by default 300MiB, on CUDA the device's")
    parser.add_argument("--study", type=Path, metavar="FILE", help="keep it here (sqlite)")
    parser.add_argument("--plain", action="store_true", help="without oomkit: dies")
    parser.add_argument("--multi-objective", action="store_true", help="loss and parameters")
    parser.add_argument("--grad-checkpointing", action="store_true", help="search it, too")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--device-memory", metavar="SIZE", help="for all trials at a time")
    parser.add_argument("--rows", type=int, help="texts that are trained on")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (1: the "
                        "models are small, and more of them wait for each other)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-mlflow", action="store_true", help="log no runs")
    parser.add_argument("--output", type=Path, default=Path("tune_max-output"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if say_what_is_missing():
        return 2
    from tuning.program import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
