"""Batches that can be read in two ways."""

import pytest
import torch
from helpers.seen import Seen

import oomkit
from oomkit import testing


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.refusals
def test_samples_that_are_lists_of_two_things(count: int, kind: type) -> None:
    """The first thing of each happens to be as long as a sample has parts."""
    weight = torch.ones((), requires_grad=True)
    samples = [kind([torch.rand(2, 3 + i), torch.rand(1, 2)]) for i in range(count)]

    def step(samples: list) -> None:
        sum((one * weight).sum() * other.sum() for one, other in samples).backward()

    with testing.inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match=f"may be {count} samples, or columns of 2"):
            oomkit.auto_batch(step, verify=False)(samples)
    assert weight.grad is None
    step(samples)
    want, weight.grad = weight.grad, None
    with testing.inject_oom(nth=1, phase="backward"):
        oomkit.auto_batch(step)(samples)  # proven: a sum over samples
    torch.testing.assert_close(weight.grad, want)


@pytest.mark.parametrize("verify", [None, True])
@pytest.mark.parametrize("kind", ["columns", "pairs", "unpacked"])
@pytest.mark.refusals
def test_what_does_not_prove_to_be_samples_is_refused_as_before(kind: str, verify: bool) -> None:
    weight = torch.full((3,), 0.5, requires_grad=True)
    batch = [(torch.rand(4, 3), torch.rand(4, 2)) for _ in range(4)]

    def step(batch: list) -> None:
        if kind == "columns":  # the mean of all, over the one that the first gives
            scale = (batch[0][0] * weight).sum()
            (sum((each * weight).sum() for each, _ in batch) / scale.exp()).backward()
        elif kind == "pairs":
            one, two = batch[: len(batch) // 2], batch[len(batch) // 2 :]
            both = zip(one, two, strict=False)
            sum(((a[0] - b[0]) * weight).square().sum() for a, b in both).backward()
        else:
            a, b, c, d = batch
            ((a[0] + b[0] - c[0] * d[0]) * weight).mean().backward()

    decorated = oomkit.auto_batch(step, verify=verify)
    with testing.inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="may be 4 samples, or columns of 4"):
            decorated(batch)
    assert weight.grad is None


def test_samples_in_doubt_are_proven_once() -> None:
    """And forced slices are a test's own to compare."""
    weight = torch.full((3,), 0.5, requires_grad=True)
    batch = [(torch.rand(4, 3), torch.rand(4, 2)) for _ in range(4)]
    runs: Seen[int] = Seen()

    def step(batch: list) -> None:
        runs.append(len(batch))
        (sum((each * weight).sum() for each, _ in batch) / len(batch)).backward()

    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    decorated(batch)
    decorated(batch)
    runs.clear()
    decorated(batch)
    assert runs == [2, 2]
    with testing.force_slices([3, 1]):
        decorated(batch)
    assert runs == [2, 2, 3, 1]
