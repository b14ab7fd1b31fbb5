"""`make mutants`: each mutant must be caught by a test; writes the table.

    python -m mutants [--jobs 2] [--only NAME ...] [--list] [--of trainers|lightning]

With --only just those, and the table is not written. With --of those of trainers, in an
environment that has them (`make mutants-trainers`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .catalogue import CATALOGUES
from .mutant import Mutant
from .table import entry, path_of, summary, table
from .tree import make_base
from .verdict import Verdict, prove, unmutated


def mapped_tests(mutants: list[Mutant]) -> list[str]:
    """All mapped tests, each once: a test of a file that is there whole is left out."""
    names = sorted({test for mutant in mutants for test in mutant.tests})
    files = {name for name in names if "::" not in name}
    functions = {name for name in names if "[" not in name} - files
    return [
        name
        for name in names
        if name in files
        or (name.partition("::")[0] not in files
            and (name in functions or name.partition("[")[0] not in functions))
    ]  # fmt: skip


def prove_all(mutants: list[Mutant], folder: Path, jobs: int) -> list[Verdict]:
    base = make_base(folder / "unmutated")
    names = mapped_tests(mutants)
    with ThreadPoolExecutor(jobs) as pool:
        parts = [part for i in range(4 * jobs) if (part := names[i :: 4 * jobs])]
        wrong = [text for text in pool.map(lambda part: unmutated(base, part), parts) if text]
        if wrong:
            raise SystemExit("\n".join(wrong))
        print(f"the {len(names)} mapped tests pass without a mutant", flush=True)

        def one(mutant: Mutant) -> Verdict:
            place = folder / mutant.name.replace(" ", "-")
            verdict = prove(base, mutant, place)
            shutil.rmtree(place, ignore_errors=True)
            print(entry(verdict), flush=True)
            if verdict.how:
                print(f"    {verdict.how}", flush=True)
            return verdict

        return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--of", choices=CATALOGUES, default="engine")
    arguments = parser.parse_args()
    catalogue = CATALOGUES[arguments.of]
    if unknown := set(arguments.only) - {mutant.name for mutant in catalogue}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; see --list")
    if arguments.list:
        print("\n".join(f"{mutant.name}: {mutant.breaks}" for mutant in catalogue))
        return 0
    mutants = [m for m in catalogue if not arguments.only or m.name in arguments.only]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="oomkit-mutants-") as folder:
        verdicts = prove_all(mutants, Path(folder), arguments.jobs)
    seconds = time.perf_counter() - begin
    print(f"\n{summary(verdicts, seconds)}")
    if not arguments.only:
        file = path_of(arguments.of)
        file.write_text(table(verdicts, seconds))
        print(f"wrote {file}")
    return 0 if all(v.caught for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
