"""python -m couplings [SEED or NAME ...]: what becomes of these programs, or of all with a name."""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from . import known_exact, known_graphs, known_losses, known_returned, known_states
from .explore import become, couples
from .grammar import sentence
from .judge import judge
from .known import KNOWN, TROUBLES

FAMILIES = (known_losses, known_graphs, known_states, known_exact, known_returned)


def _random(seed: int) -> None:
    s = sentence(seed)
    print(s, flush=True)
    try:
        print(f"    split without a proof: {couples(s)}\n    {become(s)}")
    except Exception as error:  # the other seeds are to be seen, too
        print(f"    not judged: {type(error).__name__}: {error}")


def _known(name: str) -> None:
    program = KNOWN[name]
    kinds = {
        trouble: [judge(program.world, each, program.rows) for each in found]
        for trouble, found in TROUBLES.items()
    }
    told = "; ".join(f"{t}: {' '.join(v.kind for v in found)}" for t, found in kinds.items())
    print(f"{name}{' (apart)' if program.exact else ''}: {told}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="couplings", description=__doc__)
    parser.add_argument("what", nargs="*")
    arguments = parser.parse_args()
    names = arguments.what or list(KNOWN)
    if unknown := [name for name in names if name not in KNOWN and not name.isdigit()]:
        parser.error(f"no such program: {', '.join(unknown)}")
    torch.set_num_threads(1)  # the number of allocations depends on it
    logging.getLogger("oomkit").setLevel(logging.CRITICAL)
    for name in names:
        if name in KNOWN:
            _known(name)
        else:
            _random(int(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
