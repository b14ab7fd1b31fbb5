"""Every allocation of an evaluation over 50 samples failed in turn.

`python tests/evaluation/evaluation_faults.py` prints the table: for each way to evaluate and each
kind of fault, how many allocations there are, what came of failing each, and what was left behind.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

ROWS = 50
WIDTH = 12


_labels = count()


class World:
    """A model, its batch, and the parts that were computed to the end, in order."""

    @cached_property
    def label(self) -> str:
        return f"chunks {next(_labels)}"  # one world's sizes are not another's

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)
        ).eval()
        self.batch = torch.randn(ROWS, WIDTH)
        self.parts: list[int] = []

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
        logits = self.model(x)
        best = logits.softmax(1).max(1)
        result = {"logits": logits, "best": (best.values, best.indices)}
        self.parts.append(len(x))
        return result


class Generating(World):
    """A language model that generates greedily, with a cache that grows."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(11)
        config = GPT2Config(
            vocab_size=19, n_positions=16, n_embd=8, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).eval()
        self.batch = torch.randint(1, 19, (ROWS, 3))
        self.parts = []

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
        result = {"tokens": self.model.generate(x, max_new_tokens=2, do_sample=False)}
        self.parts.append(len(x))
        return result


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What a loop written by hand does in the end."""
    found: dict[str, Any] = {}
    for name, value in results[0].items():
        if isinstance(value, tuple):
            columns = zip(*(result[name] for result in results), strict=True)
            found[name] = tuple(torch.cat(column) for column in columns)
        else:
            found[name] = torch.cat([result[name] for result in results])
    return found


def by_step(world: World, fault: inject_oom, parts: int = 1) -> dict[str, Any]:
    step = oomkit.auto_batch(world, accumulation_steps=parts)
    with torch.no_grad(), fault:
        return step(world.batch)


def by_chunks(world: World, fault: inject_oom, parts: int = 1) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    rows = ROWS // parts
    with torch.no_grad(), fault:
        for part in oomkit.chunks(world.batch, label=world.label, micro_batch=rows):
            with oomkit.guard():
                results.append(world(part))
    return joined(results)  # by the program: no fault strikes there


def by_map(world: World, fault: inject_oom, parts: int = 1) -> dict[str, Any]:
    with fault:
        return oomkit.map(world, world.batch, micro_batch=ROWS // parts)


Form = Callable[[World, inject_oom], dict[str, Any]]

FORMS: dict[str, tuple[type[World], Form]] = {
    "auto_batch": (World, by_step),
    "auto_batch, 4 parts": (World, partial(by_step, parts=4)),
    "chunks + guard": (World, by_chunks),
    "chunks + guard, 4 parts": (World, partial(by_chunks, parts=4)),
    "map": (World, by_map),
    "map, 4 parts": (World, partial(by_map, parts=4)),
    "map, generate": (Generating, by_map),
}

# How often in a row an allocation fails: the parts get smaller until it is over.
TIMES: dict[str, int | None] = {"once": 1, "twice": 2, "from there on": None}


@dataclass
class Found:
    faults: int = 0
    recovered: int = 0
    refused: int = 0
    parts: set[tuple[int, ...]] = field(default_factory=set)
    leaked: int = 0
    failures: list[str] = field(default_factory=list)


def same(one: Any, two: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one.dtype == two.dtype and torch.equal(one, two)


def undisturbed(world: World) -> dict[str, Any]:
    """The parts of a run, computed by a plain loop and joined by hand."""
    lengths, at, results = list(world.parts), 0, []
    with torch.no_grad():
        for length in lengths:
            results.append(world(world.batch[at : at + length]))
            at += length
    return joined(results)


def allocated() -> int:
    return oomkit.memory("cpu").allocated or 0


def one_fault(name: str, nth: int, times: int | None, found: Found) -> bool:
    """Fails the nth allocation; False when there are not so many."""
    make, form = FORMS[name]
    world = make()
    form(world, inject_oom(nth=2**40))  # what is made once, and the next call's state
    world.parts.clear()
    before = allocated()
    fault = inject_oom(nth=nth, times=times)
    result, refusal = None, ""
    try:
        result = form(world, fault)
    except oomkit.OutOfMemory as error:
        refusal = str(error)
    if fault.fired == 0:
        return False
    found.faults += 1
    done = f"{name}, allocation {nth} {times}"
    if result is not None:
        found.recovered += 1
        found.parts.add(tuple(world.parts))
        if sum(world.parts) != ROWS:
            found.failures.append(f"{done}: parts {world.parts}")  # computed twice, or lost
        elif not same(result, undisturbed(world)):
            found.failures.append(f"{done}: other outputs over {world.parts}")
    else:
        found.refused += 1
        if (times is not None and "joined the results" not in refusal) or "ran out" not in refusal:
            found.failures.append(f"{done}: refused: {refusal.splitlines()[0]}")
    del result
    if allocated() != before:
        found.leaked += allocated() - before
        found.failures.append(f"{done}: {allocated() - before} bytes stay")
    world.parts.clear()
    again = form(world, inject_oom(nth=2**40))
    if not same(again, undisturbed(world)):
        found.failures.append(f"{done}: the next call has other outputs")
    return True


def sweep(name: str, kind: str, stride: int = 1, first: int = 1) -> Found:
    found = Found()
    gc.collect()
    gc.disable()  # nothing may need it
    try:
        nth = first
        while one_fault(name, nth, TIMES[kind], found):
            nth += stride
    finally:
        gc.enable()
    return found


def units() -> Iterator[tuple[str, str]]:
    for name in FORMS:
        for kind in TIMES:
            yield name, kind


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print(f"{'evaluation of 50 samples':<24} {'fails':<14} {'faults':>6} {'recovered':>9} "
          f"{'refused':>7} {'other bits':>10} {'leaked bytes':>12}")  # fmt: skip
    failed = 0
    for name, kind in units():
        found = sweep(name, kind)
        other = sum("other outputs" in line for line in found.failures)
        print(f"{name:<24} {kind:<14} {found.faults:>6} {found.recovered:>9} "
              f"{found.refused:>7} {other:>10} {found.leaked:>12}")  # fmt: skip
        for line in found.failures[:5]:
            print("   ", line)
        failed += len(found.failures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
