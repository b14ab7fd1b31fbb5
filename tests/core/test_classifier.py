"""oomkit.classify against what real libraries say: tests/core/classifier_messages.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import oomkit

MESSAGES = tomllib.loads(
    (Path(__file__).with_name("classifier_messages.toml")).read_text(encoding="utf-8")
)["message"]
IDS = [f"{m['class']}-{m['type']}-{m['text'][:40]!r}" for m in MESSAGES]
PLAIN = {"RuntimeError", "MemoryError", "ValueError", "OSError"}


class Wrapper(Exception):
    """As torch's compiler wraps what went wrong while compiling."""

    __module__ = "torch._inductor.exc"


def make(message: dict[str, Any], text: str | None = None) -> BaseException:
    name, text = message["type"], message["text"] if text is None else text
    if name in PLAIN:
        return {"RuntimeError": RuntimeError, "MemoryError": MemoryError}.get(
            name, {"ValueError": ValueError, "OSError": OSError}.get(name, Exception)
        )(text)
    if name == "Wrapper":
        return Wrapper(text)
    if name == "DistBackendError":
        if not torch.distributed.is_available():
            pytest.skip("this torch has no torch.distributed")
        return torch.distributed.DistBackendError(text)
    error = getattr(torch, name)(text)
    if "code" in message:
        error.error_code = message["code"]
    return error


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_real_message_has_its_class(message: dict[str, Any]) -> None:
    error = make(message)
    assert oomkit.classify(error) == message["class"]
    # "sticky" is out of memory only by name: its retry is what must not happen.
    assert oomkit.is_oom_error(error) is (message["class"] in ("certain", "masked", "never"))


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_inside_a_wrapper_of_the_compiler_it_is_the_same(message: dict[str, Any]) -> None:
    class Compiler(Exception):
        __module__ = "torch._dynamo.exc"

    by_attribute = Compiler("backend='inductor' raised")
    by_attribute.inner_exception = make(message)  # type: ignore[attr-defined]
    by_cause = Compiler("x")
    by_cause.__cause__ = by_attribute
    assert oomkit.classify(by_attribute) == message["class"]
    assert oomkit.classify(by_cause) == message["class"]


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_alone_in_a_group_it_is_the_same(message: dict[str, Any]) -> None:
    assert oomkit.classify(BaseExceptionGroup("x", [make(message)])) == message["class"]


@pytest.mark.parametrize(
    "message", [m for m in MESSAGES if m["class"] != "other"], ids=lambda m: m["text"][:40]
)
def test_a_type_that_is_never_out_of_memory_may_quote_it(message: dict[str, Any]) -> None:
    for type_ in (ValueError, KeyError, AssertionError, OSError, KeyboardInterrupt, StopIteration):
        assert oomkit.classify(type_(message["text"])) == "other"


def test_every_class_and_every_kind_of_exception_is_in_the_table() -> None:
    assert {m["class"] for m in MESSAGES} == {"certain", "masked", "sticky", "never", "other"}
    assert {m["type"] for m in MESSAGES} == {
        "OutOfMemoryError",
        "AcceleratorError",
        "DistBackendError",
        "Wrapper",
        *PLAIN,
    }


@pytest.mark.parametrize(
    "message", [m for m in MESSAGES if "requested" in m], ids=lambda m: str(m["requested"])
)
def test_the_request_is_read_out_of_the_message(message: dict[str, Any]) -> None:
    """As the report of a step that gives up at once has it."""

    @oomkit.auto_batch(min_micro_batch=4)
    def step(x: torch.Tensor) -> None:
        raise make(message)

    with pytest.raises(oomkit.OutOfMemory) as caught:
        step(torch.zeros(4, 2))
    assert caught.value.report is not None
    assert caught.value.report.attempts[0]["requested_bytes"] == message["requested"]
