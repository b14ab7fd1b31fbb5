"""What `oomkit.transformers.protect` costs in a healthy call, beside `auto_batch` on the method.

    PYTHONPATH=. .venv-trainers/bin/python benchmarks/trainers.py

Medians of 300 calls of `training_step` of a tiny language model, taken in turn: by the clock, and
by the processor time of the thread, in which other programs of a busy machine have no part. The
bound is 500 us of it above `auto_batch`.
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
    clocks = {"clock": time.perf_counter, "processor": time.thread_time}
    times: dict[str, dict[str, list[float]]] = {c: {name: [] for name in made} for c in clocks}
    for _ in range(CALLS):
        for name, each in made.items():
            begun = [clock() for clock in clocks.values()]
            each.training_step(each.model, inputs, items)
            for (which, clock), since in zip(clocks.items(), begun, strict=True):
                times[which][name].append(clock() - since)
    medians = {
        which: {name: statistics.median(found) * 1e6 for name, found in each.items()}
        for which, each in times.items()
    }
    for which, each in medians.items():
        for name, median in each.items():
            print(f"{which:9} {name:10} {median:7.0f} us, {median - each['plain']:+5.0f}")
    processor = medians["processor"]
    return 0 if processor["protect"] - processor["auto_batch"] <= 500 else 1


if __name__ == "__main__":
    sys.exit(main())
