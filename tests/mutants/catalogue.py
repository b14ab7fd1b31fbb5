"""All mutants, in the order of the table."""

from __future__ import annotations

from . import devices, failure, figures, host, once, ranks, sums, taking_back, trainers

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

CATALOGUES = {
    "engine": MUTANTS,
    "trainers": trainers.TRAINERS,
    "lightning": trainers.LIGHTNING,
}

__all__ = ["CATALOGUES", "MUTANTS"]
