"""Names that options are given: of options and of arguments. A wrong one is said at once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import oomkit


def step(inputs: Any, labels: Any, *, weights: Any = None) -> None:
    pass


PARAMETERS = r"expected a parameter of the function: inputs, labels, weights"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": "input"}, f"batch='input', {PARAMETERS}; did you mean 'inputs'\\? .help"),
        ({"batch": ["inputs", "labelz"]}, f"batch='labelz', {PARAMETERS}; did you mean 'labels'"),
        ({"static": "weight"}, f"static='weight', {PARAMETERS}; did you mean 'weights'\\? .help"),
        ({"static": "weightz['classes']"}, "static=\"weightz.*; did you mean 'weights'"),
        ({"static": "inputz.mask"}, "static='inputz.mask', .*; did you mean 'inputs'"),
        ({"dim": {"label": 1}}, f"dim='label', {PARAMETERS}; did you mean 'labels'\\? .help"),
        ({"batch": "hidden"}, f"batch='hidden', {PARAMETERS} .help"),
    ],
)
def test_a_name_of_no_argument_is_said_at_the_decoration(options: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^auto_batch got {text}"):
        oomkit.auto_batch(step, **options)
    with pytest.raises(TypeError, match=f"^auto_batch got {text}"):
        oomkit.auto_batch(**options)(step)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": "inputs"},
        {"batch": ("inputs", "labels"), "static": "weights"},
        {"static": ["inputs['classes']", "labels.mask"]},
        {"dim": {"labels": 1, "return": 1}},
    ],
)
def test_names_of_arguments_pass(options: Any) -> None:
    assert callable(oomkit.auto_batch(step, **options))


def test_methods_and_partials_have_the_names_of_their_functions() -> None:
    class Trainer:
        def step(self, inputs: Any) -> None: ...

    for func in (Trainer.step, Trainer().step, functools.partial(step, weights=1)):
        assert callable(oomkit.auto_batch(func, batch="inputs"))
        with pytest.raises(TypeError, match="did you mean 'inputs'"):
            oomkit.auto_batch(func, batch="input")


@pytest.mark.parametrize("func", [lambda **kwargs: None, lambda *args: None, max])
def test_where_any_name_may_be_meant_none_is_refused(func: Any) -> None:
    assert callable(oomkit.auto_batch(func, batch="input"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: oomkit.auto_batch(bacth="x"), "auto_batch.* 'bacth'; did you mean 'batch'"),
        (
            lambda: oomkit.auto_batch(step, optimiser=None),
            "auto_batch.* 'optimiser'; did you mean 'optimizer'",
        ),
        (
            lambda: oomkit.chunks(torch.ones(2), microbatch=1),
            "chunks.* 'microbatch'; did you mean 'micro_batch'",
        ),
        (lambda: oomkit.guard(on_ooom="skip"), "guard.* 'on_ooom'; did you mean 'on_oom'"),
    ],
)
def test_a_wrong_option_names_the_one_that_was_meant(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_an_option_that_is_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(TypeError, match="got an unknown option 'zzz' .help"):
        oomkit.auto_batch(zzz=1)
