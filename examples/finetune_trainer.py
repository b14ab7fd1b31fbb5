"""transformers' Trainer under a memory budget: BERT, accumulation over 4 batches.

The largest batches do not fit. The plain Trainer dies; with one line more it runs to its end,
with the losses of a run that has memory for everything.

    python examples/finetune_trainer.py            # under a minute on a CPU
    python examples/finetune_trainer.py --plain    # the same without oomkit: it dies

Needs transformers and accelerate (`pip install -r requirements/trainers.txt`). Nothing is
downloaded: the model is small and begins with random weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
import transformers

import oomkit
import oomkit.transformers

MIB = 2**20
WORDS, LENGTH, ROWS = 1000, 32, 16


def rows(count: int = 256) -> list[dict[str, Any]]:
    """Texts of random words; their class is one of the first word."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 4} for row in ids]


def trainer() -> transformers.Trainer:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=5e-4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    made = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=rows(),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made: transformers.Trainer) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without oomkit")
    parser.add_argument("--budget", default="5MiB", help="beside what is in use at the start")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    with oomkit.limit_memory(options.budget, device="cpu"):
        made = trainer()
        if not options.plain:
            oomkit.transformers.protect(made)
        print(f"budget {options.budget}, batches of {ROWS}, accumulation 4", flush=True)
        try:
            made.train()
        except torch.OutOfMemoryError as error:
            print(
                f"died in step {made.state.global_step + 1}: {str(error).partition(' Default')[0]}"
            )
            return 0 if options.plain else 1
    if options.plain:
        print("the budget is enough for the plain program")
        return 1
    found = losses(made)
    for at, loss in enumerate(found, 1):
        print(f"update {at}: loss {loss:.4f}")
    records = oomkit.transformers.records(made)
    sizes = sorted({record.micro_batch_size or 0 for record in records})
    ooms = sum(record.ooms for record in records)
    peak = max(record.peak_allocated or 0 for record in records) / MIB
    print(
        f"{len(records)} calls, {ooms} of them out of memory once or more, at most {peak:.0f} MiB"
    )
    print(f"micro-batches of {' and '.join(map(str, sizes))} rows in place of {ROWS}")

    whole = trainer()
    whole.train()
    gap = max(abs(a - b) for a, b in zip(found, losses(whole), strict=True))
    print(f"the same without a budget: losses differ by {gap:.1e} at most")
    return 0 if gap < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
