"""What is private in torch: all of it is there, in a version that was tried or not, or calls are
refused."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import oomkit
from oomkit._ranks import private

from .launch import results_of


class Wrapper:
    """As it is in some torch."""

    there = True

    def method(self) -> None:
        self.assigned = 1


@pytest.fixture(autouse=True)
def _first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(private, "TRIED", {"Wrapper": ("2.11", "2.13")})
    private._tell.cache_clear()


def _refusal(version: str, names: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(torch, "__version__", version)
    return private.refusal("Wrapper", (Wrapper, names))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu"])
def test_a_version_that_was_tried_is_not_spoken_of(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _refusal(version, "there method assigned", monkeypatch) is None
    assert caplog.records == []


@pytest.mark.parametrize("version", ["2.12.0", "2.14.0a0+git1234", "3.0.0"])
def test_another_one_with_all_names_is_told_of_once(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "oomkit"):
        assert [_refusal(version, "there assigned", monkeypatch) for _ in range(2)] == [None] * 2
    (record,) = caplog.records
    minor = version[:4].removesuffix(".")
    assert f"Wrapper of torch {minor} was not tried" in record.getMessage()
    assert "(tried: 2.11, 2.13)" in record.getMessage()


@pytest.mark.parametrize("version", ["2.13.0", "2.14.0"])
def test_a_name_that_is_gone_is_a_refusal(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(Wrapper, "there")
    private.lacks.cache_clear()
    said = _refusal(version, "method there", monkeypatch)
    private.lacks.cache_clear()
    assert said == f"Wrapper of torch {version} has no Wrapper.there (tried: torch 2.11, 2.13)"
    assert caplog.records == []


def test_steps_over_a_version_that_was_not_tried_are_agreed_on() -> None:
    first, second = results_of("versions:newer", 2)
    for name, of in (("ddp", "DistributedDataParallel"), ("fsdp", "fully_shard()")):
        assert second[name] == [1, []]
        (said,) = first[name][1]
        assert said.startswith(f"{of} of torch 2.99 was not tried with several ranks")
        assert said.endswith(oomkit._C.see("distributed"))
