"""How much larger the process is after many recovered OOMs: the slope of its resident set."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable

import torch

import oomkit
from oomkit.testing import inject_oom

PAGE = os.sysconf("SC_PAGE_SIZE")
BYTES_PER_OOM = 64
"""What is allowed: less than any object. Arenas of the interpreter come and go."""

MODEL = torch.nn.Linear(4, 2)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters(), lr=1e-3)
X = torch.randn(4, 4)


def _inside(x: torch.Tensor) -> float:
    OPTIMIZER.zero_grad()
    loss = MODEL(x).pow(2).mean()
    loss.backward()
    OPTIMIZER.step()
    return loss.item()


def _loss(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x).pow(2).mean()


def inside(i: int) -> None:
    step = oomkit.auto_batch(_inside, verify=False)
    with inject_oom(nth=1 + i % 6, phase="forward" if i % 2 else "backward"):
        step(X)


def returned(i: int) -> None:
    loss = oomkit.auto_batch(_loss, verify=False)(X)
    with inject_oom(nth=1 + i % 3):
        loss.backward()
    MODEL.zero_grad()


def split(i: int) -> None:
    step = oomkit.auto_batch(_loss, accumulation_steps=2, verify=False)
    with inject_oom(nth=1 + i % 9):
        loss = step(X)
    loss.backward()
    MODEL.zero_grad()


def evaluation(i: int) -> None:
    step = oomkit.auto_batch(_loss)
    with torch.no_grad(), inject_oom(nth=1 + i % 3):
        step(X)


def given_up(i: int) -> None:
    try:
        with inject_oom(nth=1 + i % 6, times=None):
            oomkit.auto_batch(_inside)(X)
    except oomkit.OutOfMemory:
        MODEL.zero_grad()


def guarded(i: int) -> None:
    with oomkit.guard(on_oom="skip"), inject_oom():
        torch.empty(1000)


FORMS: dict[str, Callable[[int], None]] = {
    f.__name__: f for f in (inside, returned, split, evaluation, given_up, guarded)
}


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def slope(form: Callable[[int], None], count: int) -> tuple[str, list[str]]:
    """(what was measured, what is wrong with it). The best of three thirds, after a warm-up of
    one: a leak is in each of them."""
    logging.getLogger("oomkit").addHandler(logging.NullHandler())
    logging.getLogger("oomkit").propagate = False
    third = count // 4
    per_oom, objects, tensors = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(third):
            form(i)
        for _ in range(3):
            gc.collect()
            before = resident(), len(gc.get_objects()), oomkit.memory("cpu").allocated or 0
            for i in range(third):
                form(i)
            gc.collect()
            per_oom.append((resident() - before[0]) / third)
            objects.append(len(gc.get_objects()) - before[1])
            tensors.append((oomkit.memory("cpu").allocated or 0) - before[2])
    told = f"{min(per_oom):.1f} bytes per OOM at best of three"
    wrong = []
    if min(per_oom) > BYTES_PER_OOM:
        wrong.append(f"the process grows: {told}, at most {BYTES_PER_OOM} are allowed")
    if min(objects) > third // 10:
        wrong.append(f"{min(objects)} objects more after {third} OOMs")
    if min(tensors) > 0:
        wrong.append(f"{min(tensors)} bytes of tensors more after {third} OOMs")
    return told, wrong
