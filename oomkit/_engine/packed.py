"""Splitting and joining torch.nn.utils.rnn.PackedSequence.

The rows of a packed batch lie interleaved, time step after time step, so a part of them is a
copy: no view can pick the rows out. The arithmetic is integers only; values are gathered as
they are, and a graph behind the batch is kept.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import PackedSequence, invert_permutation, pack_sequence, unpack_sequence


def size(packed: PackedSequence) -> int:
    """The number of sequences."""
    return int(packed.batch_sizes[0])


def split(packed: PackedSequence, start: int, length: int) -> PackedSequence:
    """The sequences start to start + length, in the order that they were packed in."""
    data, sizes, order, back = packed
    places = torch.arange(start, start + length) if back is None else back[start : start + length]
    # Where the wanted ones stand among all, longest first; so they stay sorted.
    places = places.to("cpu").sort().values
    counts = torch.searchsorted(places, sizes)
    begins = sizes.cumsum(0) - sizes
    index = torch.cat(
        [places[:count] + begin for begin, count in zip(begins, counts.tolist(), strict=True)]
    )
    picked = data.index_select(0, index.to(data.device))
    counts = counts[counts > 0]
    if order is None:
        return PackedSequence(picked, counts)
    kept = order.index_select(0, places.to(order.device)) - start
    return PackedSequence(picked, counts, kept, invert_permutation(kept))


def join(results: list[PackedSequence], rows: list[int]) -> PackedSequence:
    """All sequences of the results, packed as a whole call would have packed them."""
    sequences = [each for packed in results for each in unpack_sequence(packed)]
    return pack_sequence(sequences, enforce_sorted=results[0].sorted_indices is None)
