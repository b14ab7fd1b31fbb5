"""Few combinations of the values of several dimensions, in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

TRIED = 40


def pairs_of(combination: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(combination.items(), 2))


def pairwise(
    dimensions: Mapping[str, Sequence[Any]],
    seed: int,
    possible: Callable[[Combination], bool] = lambda combination: True,
    given: Sequence[Combination] = (),
) -> list[Combination]:
    """The combinations of `given`, then others until every possible pair occurs.

    Greedy: each new one has a pair that is still open, and of several drawn at random it is
    the one with the most of them. The same seed gives the same list.
    """
    draw = random.Random(seed)
    whole = [
        combination
        for values in itertools.product(*dimensions.values())
        if possible(combination := dict(zip(dimensions, values, strict=True)))
    ]
    open_pairs = {pair for combination in whole for pair in pairs_of(combination)}
    chosen = [dict(combination) for combination in given]
    for combination in chosen:
        open_pairs -= pairs_of(combination)
    while open_pairs:
        wanted = min(open_pairs, key=repr)  # sets have no order of their own
        having = [c for c in whole if wanted in pairs_of(c)]
        drawn = draw.sample(having, min(TRIED, len(having)))
        best = max(drawn, key=lambda c: len(pairs_of(c) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs_of(best)
    return chosen
