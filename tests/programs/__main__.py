"""`make programs`: every program at 20 places; rewrites docs/evidence/programs.md."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from .catalogue import PENDING, TABLE, table
from .harness import Report, sweep
from .world import PROGRAMS, SEED


def main() -> int:
    parser = argparse.ArgumentParser(prog="programs", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs to run; without one, all of them")
    parser.add_argument("--places", type=int, default=20)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PROGRAMS):
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # the number of allocations depends on it
    logging.getLogger("oomkit").addHandler(logging.NullHandler())
    names = arguments.names or list(PROGRAMS)
    print(f"torch {torch.__version__}, seed {SEED} (OOMKIT_TEST_SEED), {arguments.places} places")
    reports: dict[str, Report] = {}
    failed = 0
    for name in names:
        begin = time.perf_counter()
        report = sweep(PROGRAMS[name], arguments.places)
        seconds = time.perf_counter() - begin
        reason = PENDING.get(name)
        verdict = "ok" if not report.failures else "FAILED" if reason is None else "pending"
        told = ", ".join(f"{n} {kind}" for kind, n in report.places.most_common())
        print(f"{verdict:8s} {name:26s} {told}; {report.worst:.1e}; {seconds:.1f} s", flush=True)
        if report.failures and (reason is None or arguments.names):
            print("\n".join(f"    {failure}" for failure in report.failures))
        failed += verdict == "FAILED" or (verdict == "ok" and reason is not None)
        if verdict == "ok":
            reports[name] = report
            if reason is not None:
                print(f"    no longer pending ({reason}): take it off PENDING in catalogue.py")
    if failed:
        print(f"{failed} programs did not come out as stated; the table is left as it was")
    elif not arguments.names:
        TABLE.write_text(table(reports))
        print(f"wrote {TABLE}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
