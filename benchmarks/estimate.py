"""How near `oomkit.estimate` comes to the peak that is then measured, over the zoo of tests.

Each model of tests/zoo with its own loss and optimizer, and larger ones. The peak is estimated
from a batch of a few rows, then measured with many, by the CPU's counters.

    PYTHONPATH=. python benchmarks/estimate.py --output benchmarks/results/estimate-cpu.md
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oomkit
from oomkit.report import format_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "demo")]
TIMES = 64  # so often are a small model's rows repeated


@dataclass
class Line:
    name: str
    rows: int
    estimate: int | None
    measured: int | None
    said: str

    def cells(self) -> tuple[str, ...]:
        if self.estimate is None or self.measured is None:
            return self.name, str(self.rows), "-", "-", "-", self.said
        difference = self.estimate / self.measured - 1
        figures = format_bytes(self.estimate), format_bytes(self.measured)
        return self.name, str(self.rows), *figures, f"{100 * difference:+.1f} %", self.said


def repeated(value: Any, times: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.repeat(times, *[1] * (value.dim() - 1)) if value.dim() else value
    if isinstance(value, dict):
        return {key: repeated(item, times) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(value) * times
    raise TypeError(f"a batch of {type(value).__name__}, which is not repeated here")


def rows_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.shape[0]
    return rows_of(next(iter(value.values() if isinstance(value, dict) else value)))


def training(model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, Any], Any]) -> Any:
    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return step


Made = tuple[nn.Module, Any, Callable[[nn.Module, Any], Any], Callable[[Any], Any]]


def zoo() -> Iterator[tuple[str, Callable[[], Made], int]]:
    from zoo.catalogue import MODELS

    for name, spec in MODELS.items():
        if not spec.compiled and spec.options.get("dim", 0) == 0:
            yield (
                name,
                lambda s=spec: (s.make(torch.float32), s.batch(torch.float32), s.loss, s.optimizer),
                TIMES,
            )


def larger() -> Iterator[tuple[str, Callable[[], Made], int]]:
    import gpt

    cross = nn.functional.cross_entropy

    def demo() -> Made:
        scale = gpt.SCALES["demo"]
        tokens = torch.randint(256, (4, scale.context + 1))
        batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
        return (
            gpt.GPT(scale),
            batch,
            lambda m, b: cross(m(b["x"]).flatten(0, 1), b["y"].flatten()),
            torch.optim.AdamW,
        )

    def resnet() -> Made:
        layers: list[nn.Module] = []
        for one, two in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        batch = {"x": torch.randn(4, 3, 32, 32), "y": torch.randint(10, (4,))}
        return model, batch, lambda m, b: cross(m(b["x"]), b["y"]), torch.optim.AdamW

    def bert() -> Made:
        import transformers

        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
        )
        model = transformers.BertForSequenceClassification(config)
        batch = {
            "input_ids": torch.randint(1000, (4, 64)),
            "attention_mask": torch.ones(4, 64, dtype=torch.long),
            "labels": torch.randint(2, (4,)),
        }
        return model, batch, lambda m, b: m(**b).loss, torch.optim.AdamW

    yield "the demo's GPT", demo, 4
    yield "conv, BatchNorm, 32x32 images", resnet, 16
    yield "transformers BERT, 2 layers", bert, 16


def measured(step: Any, batch: Any, before: int) -> int:
    """The peak of a second step above what was there before the model."""
    guard = oomkit.guard()
    step(batch)
    gc.collect()
    with guard:
        step(batch)
    return guard.records[0].peak_allocated - before


def line(name: str, make: Callable[[], Made], times: int) -> Line:
    torch.manual_seed(0)
    gc.collect()
    before = oomkit.memory("cpu").allocated
    try:
        model, few, loss, optimizer = make()
    except ImportError as error:
        return Line(name, 0, None, None, f"not measured: {error.name} is not installed")
    step = training(model, optimizer(model.parameters()), loss)
    try:
        found = oomkit.estimate(step, few)
    except ValueError as error:
        reads = "reads values" in str(error)
        said = "it reads values" if reads else "torch's tracker cannot follow it"
        return Line(name, rows_of(few), None, None, f"refused: {said}")
    try:
        batch = repeated(few, times)
    except TypeError as error:
        return Line(name, rows_of(few), None, None, f"not measured: {error}")
    del few
    gc.collect()  # fake graphs hold real copies of the random state until then
    rows = rows_of(batch)
    peak = measured(step, batch, before)
    return Line(name, rows, found.peak(rows), peak, "; ".join(found.unknown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    oomkit.limit_memory(1 << 50, device="cpu")
    head = ("model", "rows", "estimate", "measured", "difference", "what estimate says")
    table = [head, ("---", "---:", "---:", "---:", "---:", "---")]
    lines = []
    for name, make, times in (*zoo(), *larger()):
        lines.append(line(name, make, times))
        table.append(lines[-1].cells())
        print(" | ".join(table[-1]), flush=True)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    if options.output is not None:
        options.output.write_text(text + "\n")
    known = [x for x in lines if x.estimate is not None and x.measured is not None]
    near = sum(abs(x.estimate / x.measured - 1) <= 0.1 for x in known)
    print(f"{near} of {len(known)} within 10 %, {len(lines) - len(known)} not measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
