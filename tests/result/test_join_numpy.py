"""Arrays and numbers of numpy in results."""

from __future__ import annotations

import pytest
import torch

import oomkit
from oomkit.testing import force_slices

np = pytest.importorskip("numpy")  # oomkit itself does without


def whole_and_split(step, slices=(3, 2, 2), **options):
    batch = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2)
    whole = step(batch)
    with force_slices(slices):
        return whole, oomkit.auto_batch(step, label="step", **options)(batch)


def test_predictions_are_put_one_after_the_other():
    whole, got = whole_and_split(lambda x: {"p": (x * 2).numpy(), "k": x.argmax(1).numpy()})
    for key in ("p", "k"):
        assert type(got[key]) is np.ndarray and got[key].dtype == whole[key].dtype
        assert np.array_equal(got[key], whole[key])


def test_numbers_keep_their_type():
    def step(x):
        return {
            "loss": np.float32(x.mean().item()),
            "double": np.mean(x.numpy()),
            "seen": np.int64(len(x)),
            "epoch": np.int32(3),
            "fine": np.bool_(True),
        }

    whole, got = whole_and_split(step)
    for key, value in whole.items():
        assert type(got[key]) is type(value)
        assert abs(float(got[key]) - float(value)) <= 1e-7


def test_constant_arrays_are_kept_and_others_refused():
    whole, got = whole_and_split(lambda x: np.arange(5.0))
    assert np.array_equal(got, whole)
    with pytest.raises(oomkit.SplitError, match=r"result\['a'\] has shapes \[5\] and \[5\]"):
        whole_and_split(lambda x: {"a": np.full(5, x.sum().item())})


def test_ragged_arrays_and_arrays_of_objects_are_refused():
    with pytest.raises(oomkit.SplitError, match="pad to a fixed length"):
        whole_and_split(lambda x: np.zeros((len(x), 1 + len(x))))
    with pytest.raises(oomkit.SplitError, match="result differs: array"):
        whole_and_split(lambda x: np.array([str(len(x))] * len(x)))


def test_booleans_must_agree():
    with pytest.raises(oomkit.SplitError, match="result differs: False and True"):
        whole_and_split(lambda x: np.bool_(bool((x > 0.9).any())), slices=(4, 3))


def test_an_array_that_is_used_again_is_not_put_together_with_itself():
    buffer = np.zeros((3, 2))

    def step(x):
        buffer[: len(x)] = x.numpy() * 2
        return buffer[: len(x)]

    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    with force_slices((3, 3)):
        got = oomkit.auto_batch(step)(batch)
    assert np.array_equal(got, batch.numpy() * 2)
