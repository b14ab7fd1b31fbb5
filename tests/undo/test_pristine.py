"""Parameters that the step itself changes in the first micro-batch of a site's first split go
back as they were, of whatever kind they are; or the error says that they stay changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import oomkit
from oomkit import _C

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


class Net(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.weight.real.float().mean()


def _columns() -> torch.Tensor:
    return torch.randn(3, 5).t()


WEIGHTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(5, 3),
    "not contiguous": _columns,
    "part of a larger one": lambda: torch.randn(8, 3)[2:7],
    "half": lambda: torch.randn(7).half(),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "nan": lambda: torch.tensor([float("nan"), -0.0, 1.0]),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "double": lambda: torch.randn(200, dtype=torch.float64),
    "large": lambda: torch.randn(300, 100),
}


def _bytes(model: nn.Module) -> list[bytes]:
    return [
        p.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for p in model.parameters()
        if p.numel()
    ]


def _refused(model: Net, change: Callable[[Net], None]) -> BaseException:
    """The error of a first split call in whose first micro-batch `change` runs."""

    @oomkit.auto_batch(optimizer=None, verify=False)
    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        change(model)

    with oomkit.testing.force_slices([2, 2]), pytest.raises(oomkit.OomkitError) as caught:
        step(torch.randn(4, 4))
    return caught.value


def _add(model: Net) -> None:
    for p in model.parameters():
        if p.numel():
            p.data.add_(1.0)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_changed_parameter_goes_back(kind: str) -> None:
    torch.manual_seed(1)
    model = Net(WEIGHTS[kind]())
    before = _bytes(model)
    error = _refused(model, _add)
    said = "was changed" if kind not in ("empty", "nan") else "is nan although"
    assert said in str(error)
    assert _bytes(model) == before
    assert not getattr(error, "__notes__", [])
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_on_another_memory_goes_back() -> None:
    torch.manual_seed(1)
    model = Net(torch.randn(5, 3))
    before = _bytes(model)

    def change(model: Net) -> None:
        model.weight.data = torch.randn(3, 5).t()

    assert "was changed" in str(_refused(model, change))
    assert _bytes(model) == before


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float32, lambda w: w.double()),
        (torch.float32, lambda w: torch.cat([w, w])),
        (torch.complex64, lambda w: w.conj()),
    ],
    ids=["type", "shape", "conjugated"],
)
def test_a_parameter_of_another_kind_is_named(
    dtype: torch.dtype, other: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(1)
    model = Net(torch.randn(5, dtype=dtype))

    def change(model: Net) -> None:
        model.weight.data = other(model.weight.data)

    error = _refused(model, change)
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "weight" in text
    assert "stays changed" in text


def test_a_switched_parameter_that_goes_back_is_switched_back() -> None:
    model = Net(torch.randn(5, 3))

    def change(model: Net) -> None:
        model.first.weight.requires_grad_(False)
        model.weight.data.add_(1.0)

    _refused(model, change)
    assert model.first.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.uint8, torch.half, torch.float32, torch.complex128])
@pytest.mark.parametrize("count", [1, 3, 5, 64, 65, 640])
def test_a_sample_tells_of_each_value_that_is_in_it(dtype: torch.dtype, count: int) -> None:
    values = torch.arange(count).to(dtype)
    was = _C._tensor_sample(values)
    assert was != 0
    assert was == _C._tensor_sample(values.clone())
    for at in sorted({0, count // 64, count * 63 // 64}):
        now = values.clone()
        now[at] += 1
        assert _C._tensor_sample(now) != was


def test_values_without_gaps_are_sampled_in_any_order() -> None:
    """Also more values than there are in a sample."""
    for values in (torch.arange(15.0).view(3, 5).t(), torch.rand(2, 3, 8, 8).permute(0, 2, 3, 1)):
        assert not values.is_contiguous()
        was = _C._tensor_sample(values)
        assert was != 0
        values[0, 0] += 1
        assert _C._tensor_sample(values) != was


@pytest.mark.parametrize("rows", [3, 90])
def test_gaps_between_values_do_not_count(rows: int) -> None:
    """A sample is that of a copy without them; also of rows that are one in memory."""
    gapped = torch.rand(rows, 6)[:, ::2]
    for values in (gapped, torch.rand(3).expand(rows, 3), gapped.t(), torch.rand(rows, 3)[:, 1]):
        was = _C._tensor_sample(values)
        assert was == _C._tensor_sample(values.contiguous()) != 0
    was = _C._tensor_sample(gapped)
    gapped[0, 0] += 1
    assert _C._tensor_sample(gapped) != was


def test_what_is_no_plain_tensor_has_no_sample() -> None:
    none = [
        torch.ones(0),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        3,
    ]
    assert [_C._tensor_sample(value) for value in none] == [0] * len(none)
