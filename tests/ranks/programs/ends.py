"""A rank that ends in the midst of a step, wherever it is, and what the others see of it."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oomkit.testing import inject_oom

from ..launch import Rank
from .ddp import World
from .fsdp import Sharded
from .world import die

PATIENCE = 4.0
"""Seconds that ranks wait for one that is stopped."""


class Left(Exception):
    """What a rank raises that ends by an error."""


def _end(how: str) -> None:
    if how != "raise":
        die(how)
    raise Left("a label that there is not")


@contextlib.contextmanager
def _called(count: Callable[[Any], None]) -> Iterator[None]:
    """`count(frame)` at each call of a Python function."""

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            count(frame)

    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)


def _own(frame: Any) -> bool:
    """Is it a function of the library's own, which users' errors do not come from?"""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("oomkit."):
            return True
        frame = frame.f_back
    return False


def victim_of(seed: int, world: int) -> int:
    """The rank that ends."""
    return random.Random(seed).randrange(world)


def one_ends(rank: Rank) -> dict[str, Any]:
    """The last steps of a program, of which one rank sees only a part."""
    given = rank.arguments
    rank.votes_by()
    rank.join(PATIENCE)
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    victim = victim_of(given["seed"], rank.world)
    draw = random.Random(f"{given['seed']} {rank.world}")
    at = draw.random()
    fails = draw.choice([None, *range(rank.world)])
    fault = inject_oom(nth=draw.randint(1, 20), phase=draw.choice(["forward", "backward"]))
    world = (Sharded if given["sharded"] else World)(given["option"], rank)
    world.begin(2)
    calls = [0, 0]

    def count(frame: Any) -> None:
        calls[0] += 1

    world.call(2, _called(count))
    # The way back from an error is as long again, and more.
    place = 1 + int(at * calls[0] * (1.0 if fails is None else 2.0))
    died = Path(rank.store).with_name("died")

    def end(frame: Any) -> None:
        calls[1] += 1
        killed = given["how"] in ("kill", "stop")
        if calls[1] >= place and (killed or not _own(frame)):
            sys.setprofile(None)
            died.write_text(str(time.monotonic()))
            _end(given["how"])

    @contextlib.contextmanager
    def around(fault: inject_oom | None) -> Iterator[None]:
        with fault or contextlib.nullcontext():
            with _called(end) if rank.rank == victim else contextlib.nullcontext():
                yield

    text = "nothing"
    try:
        for turn in range(4):
            world.call(2, around(fault if rank.rank == fails and turn == 0 else None))
    except Left:
        raise
    except Exception as error:
        text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    took = time.monotonic() - float(died.read_text()) if died.exists() else -1.0
    return {"victim": victim, "text": text, "seconds": took}
