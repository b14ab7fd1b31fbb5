"""Several ranks, their wrappers and graph capture: neither split nor replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom


def _refused(model: nn.Module, parameters: list[torch.Tensor], match: str) -> None:
    """Refused in both ways, gradients and parameters as they were; an ordinary call works."""
    torch.manual_seed(SEED)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def plain(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    before = [p.detach().clone() for p in parameters]
    state = torch.get_rng_state()
    with inject_oom(nth=1), pytest.raises(oomkit.OutOfMemory, match=match):
        oomkit.auto_batch(plain)(x, y)
    with pytest.raises(oomkit.SplitError, match=match):
        oomkit.auto_batch(plain, accumulation_steps=2)(x, y)
    assert all(p.grad is None for p in parameters)
    assert all(torch.equal(a, p) for a, p in zip(before, parameters, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    oomkit.auto_batch(plain)(x, y)
    assert all(p.grad is not None for p in parameters)


@pytest.fixture
def _one_rank(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Mine(nn.parallel.DistributedDataParallel):
    pass


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, _Mine])
def test_distributed_data_parallel_is_retried(wrapper: Any) -> None:
    """More of it, with several ranks, is in tests/ranks."""
    model, plain = MLP(), MLP()
    plain.load_state_dict(model.state_dict())
    spread = wrapper(model)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    step = oomkit.auto_batch(lambda x, y: F.cross_entropy(spread(x), y).backward())
    F.cross_entropy(plain(x), y).backward()

    with inject_oom(nth=1):
        step(x, y)

    assert step.records[0].accumulation_steps == 2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.usefixtures("_one_rank")
def test_what_is_not_agreed_on_says_so_at_once() -> None:
    model = MLP()
    spread = nn.parallel.DistributedDataParallel(model, static_graph=True)
    spread._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.warns(oomkit.OomkitWarning, match="out-of-memory error: static_graph"):
        _refused(spread, list(model.parameters()), "other ranks waiting")


@pytest.mark.parametrize(
    "name", ["FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine", "MegatronModule"]
)
def test_sharded_modules_are_known_by_name(name: str) -> None:
    """FSDP itself wants a device; fully_shard() derives a class from the user's."""
    base = type(name, (), {})
    model = type("FSDPMLP", (base, MLP), {})()
    _refused(model, list(model.parameters()), "distributed training")


def test_more_than_one_rank() -> None:
    model = MLP()
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
    ):
        _refused(model, list(model.parameters()), "that it names")


def test_one_rank_without_a_wrapper_is_no_reason() -> None:
    model, x = MLP(), torch.randn(8, 6)
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=1),
    ):
        step = oomkit.auto_batch(lambda x: model(x).sum().backward(), accumulation_steps=2)
        step(x)
    assert step.records[0].accumulation_steps == 2


def test_graph_capture() -> None:
    model = MLP()
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        _refused(model, list(model.parameters()), "a CUDA graph is being captured")


def test_a_device_that_nobody_uses_is_not_woken() -> None:
    model = MLP()
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=False),
        mock.patch.object(torch.cuda, "is_current_stream_capturing") as asked,
    ):
        oomkit.auto_batch(lambda x: model(x).sum().backward(), accumulation_steps=2)(
            torch.randn(8, 6)
        )
    asked.assert_not_called()
