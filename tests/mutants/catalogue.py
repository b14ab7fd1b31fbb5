"""All mutants, in the order of the table."""

from __future__ import annotations

from . import devices, failure, figures, host, once, ranks, sums, taking_back

MUTANTS = [
    *figures.MUTANTS,
    *sums.MUTANTS,
    *taking_back.MUTANTS,
    *once.MUTANTS,
    *failure.MUTANTS,
    *devices.MUTANTS,
    *host.MUTANTS,
    *ranks.MUTANTS,
]

__all__ = ["MUTANTS"]
