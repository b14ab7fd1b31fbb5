"""All mutants, in the order of the table."""

from __future__ import annotations

from . import failure, figures, once, sums, taking_back

MUTANTS = [
    *sums.MUTANTS,
    *taking_back.MUTANTS,
    *once.MUTANTS,
    *failure.MUTANTS,
    *figures.MUTANTS,
]

__all__ = ["MUTANTS"]
