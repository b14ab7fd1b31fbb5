"""What `oomkit.transformers.protect` costs in a healthy call, beside `auto_batch` on the method.

    PYTHONPATH=. .venv-trainers/bin/python benchmarks/trainers.py

Medians of calls of `training_step` of a tiny language model, taken in turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import transformers

import oomkit
import oomkit.transformers

CALLS = 300


def trainer() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True
    )
    made: Any = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=arguments)
    made.create_optimizer_and_scheduler(1)
    made.current_gradient_accumulation_steps = 1
    return made


def main() -> int:
    torch.set_num_threads(1)
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    inputs, items = {"input_ids": ids, "labels": ids}, torch.tensor(60)
    plain, alone, protected = trainer(), trainer(), oomkit.transformers.protect(trainer())
    alone.training_step = oomkit.auto_batch(alone.training_step, batch="inputs")
    made = {"plain": plain, "auto_batch": alone, "protect": protected}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(CALLS):
        for name, each in made.items():
            begun = time.perf_counter()
            each.training_step(each.model, inputs, items)
            times[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    for name, median in medians.items():
        print(f"{name:10} {median:7.0f} us, {median - medians['plain']:+5.0f}")
    return 0 if medians["protect"] - medians["auto_batch"] <= 500 else 1


if __name__ == "__main__":
    sys.exit(main())
