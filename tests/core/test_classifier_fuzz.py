"""The classifier on arbitrary text and on exceptions that are linked in arbitrary ways.

Seeds are printed and can be given: OOMKIT_FUZZ_SEED, and OOMKIT_FUZZ_ROUNDS for longer runs.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.core_programs import PROGRAMS, build, sanitize

import oomkit
from core.test_classifier import MESSAGES, make

__all__ = ["sanitize"]  # a fixture

SEED = int(os.environ.get("OOMKIT_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("OOMKIT_FUZZ_ROUNDS", "2000"))
CLASSES = {"certain", "masked", "sticky", "never", "other"}
WORST = ["certain", "masked", "never", "sticky", "other"]  # a group is the worst of its members
LOOK_THROUGH = 16


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_arbitrary_text(seed: int, tmp_path: Path, sanitize: list[str]) -> None:
    program = tmp_path / "fuzz"
    built = build(program, [PROGRAMS / "fuzz" / "classify.c"], sanitize)
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [str(program), str(seed), str(5 * ROUNDS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Compiler(Exception):
    __module__ = "torch._dynamo.exc"


class Unspeakable(RuntimeError):
    """Whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Lying(RuntimeError):
    """Whose text is no str."""

    def __str__(self) -> Any:
        return 7


class Broken(RuntimeError):
    """Whose attributes cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner_exception", "error_code", "args"):
            raise MemoryError("no attributes")
        return super().__getattribute__(name)


class BrokenCompiler(Compiler):
    __module__ = "torch._inductor.exc"

    @property
    def inner_exception(self) -> Any:
        raise RuntimeError("CUDA error: out of memory")


def leaf(rng: random.Random) -> tuple[BaseException, str | None]:
    """An exception that wraps nothing, and its class where it is known."""
    choice = rng.randrange(8)
    if choice == 0:
        return rng.choice([Unspeakable, Lying])(), "other"
    if choice == 1:
        return Broken("CUDA error: out of memory"), "certain"
    if choice == 2:
        arguments = [7, None, b"CUDA out of memory. Tried to allocate 1 bytes", [], object()]
        return RuntimeError(*rng.sample(arguments, rng.randrange(4))), None
    if choice == 3:
        return RuntimeError("CUDA error: out of memory", rng.random()), "certain"
    if choice == 4:
        return ValueError("CUDA error: out of memory"), "other"
    if choice == 5:
        return RuntimeError("\udc80" * rng.randrange(3)), "other"
    message = rng.choice([m for m in MESSAGES if m["type"] != "DistBackendError"])
    return make(message), message["class"]


def wrapped(rng: random.Random, inner: BaseException) -> BaseException:
    """By an attribute, by a cause, or with an attribute that cannot be read and a cause."""
    error = rng.choice([Compiler, BrokenCompiler])("backend raised")
    if type(error) is Compiler and rng.random() < 0.5:
        error.inner_exception = inner
        if rng.random() < 0.3:
            error.__cause__ = RuntimeError("CUDA error: out of memory")
    else:
        error.__cause__ = inner
    if rng.random() < 0.3:
        error.__context__ = rng.choice([error, inner, RuntimeError("CUDA error: out of memory")])
    return error


def tree(rng: random.Random, depth: int) -> tuple[BaseException, str | None]:
    choice = rng.randrange(3) if depth > 0 else 0
    if choice == 0:
        return leaf(rng)
    if choice == 1:
        inner, known = tree(rng, depth - 1)
        return wrapped(rng, inner), known
    members = [tree(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    classes = [known for _, known in members]
    group = BaseExceptionGroup("several", [error for error, _ in members])
    if None in classes:
        return group, None
    return group, max(classes, key=lambda name: WORST.index(str(name)))


def test_trees_of_wrappers_and_groups() -> None:
    rng = random.Random(SEED)
    for n in range(ROUNDS):
        error, known = tree(rng, rng.randrange(8))
        found = oomkit.classify(error)
        assert found in CLASSES
        assert known is None or found == known, (SEED, n, error)
        assert oomkit.classify(error) == found
        assert oomkit.is_oom_error(error) is (found in ("certain", "masked", "never"))
        assert sys.exception() is None


def test_graphs_with_cycles_end() -> None:
    rng = random.Random(SEED)
    for n in range(ROUNDS):
        errors: list[BaseException] = [Compiler(str(i)) for i in range(rng.randrange(1, 8))]
        errors += [leaf(rng)[0] for _ in range(rng.randrange(3))]
        errors += [
            BaseExceptionGroup("x", rng.choices(errors, k=rng.randrange(1, 4)))
            for _ in range(rng.randrange(3))
        ]
        for error in errors:
            for link in ("inner_exception", "__cause__", "__context__"):
                if rng.random() < 0.5 and not isinstance(error, Broken | BrokenCompiler):
                    setattr(error, link, rng.choice(errors))
        for error in errors:
            assert oomkit.classify(error) in CLASSES, (SEED, n)


@pytest.mark.parametrize("link", ["inner_exception", "__cause__", "group"])
def test_a_chain_is_followed_so_far_and_no_further(link: str) -> None:
    error: BaseException = RuntimeError("CUDA error: out of memory")
    for depth in range(1, 4 * LOOK_THROUGH):
        if link == "group":
            error = BaseExceptionGroup("x", [error])
        else:
            outer = Compiler("x")
            setattr(outer, link, error)
            error = outer
        assert oomkit.classify(error) == ("certain" if depth < LOOK_THROUGH else "other")


def test_a_wide_group_of_deep_groups_takes_no_time_that_grows_with_its_paths() -> None:
    """Each level holds the one below twice: 2 ** 15 ways down."""
    error: BaseException = torch.OutOfMemoryError("x")
    for _ in range(LOOK_THROUGH - 1):
        error = BaseExceptionGroup("x", [error, error])
    assert oomkit.classify(error) == "certain"


def test_what_goes_wrong_inside_is_not_left_behind() -> None:
    try:
        raise KeyError("mine")
    except KeyError as mine:
        for error in (Unspeakable(), Lying(), Broken("x"), BrokenCompiler("x")):
            assert oomkit.classify(error) == "other"
        assert sys.exception() is mine
        assert mine.__context__ is None
