"""TRL's DPOTrainer under a memory budget: pairs stay together when a batch is split.

    python examples/dpo.py            # under a minute on a CPU
    python examples/dpo.py --plain    # the same without oomkit: it dies

Needs trl (`pip install -r requirements/trainers.txt`). Nothing is downloaded: the model is small
and begins with random weights, the tokenizer knows a word for each number.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

import oomkit
import oomkit.transformers

MIB = 2**20
WORDS, ROWS = 200, 16


def tokenizer() -> Any:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def pairs(count: int = 64) -> datasets.Dataset:
    """The better answer counts up from the last word of the prompt."""
    chance = random.Random(0)
    rows = []
    for _ in range(count):
        first, length = chance.randrange(WORDS - 40), chance.randint(8, 24)
        up = " ".join(f"w{first + i}" for i in range(length))
        other = " ".join(f"w{chance.randrange(WORDS - 3)}" for _ in range(length))
        rows.append({"prompt": f"w{first}", "chosen": " " + up, "rejected": " " + other})
    return datasets.Dataset.from_list(rows)


def model() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def trainer() -> trl.DPOTrainer:
    torch.manual_seed(0)
    arguments = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    policy, reference = model(), model()
    reference.load_state_dict(policy.state_dict())
    made = trl.DPOTrainer(
        policy,
        ref_model=reference,
        args=arguments,
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def log(made: trl.DPOTrainer) -> list[dict[str, float]]:
    return [line for line in made.state.log_history if "loss" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without oomkit")
    parser.add_argument("--budget", default="40MiB", help="beside what is in use at the start")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()

    with oomkit.limit_memory(options.budget, device="cpu"):
        made = trainer()
        if not options.plain:
            oomkit.transformers.protect(made)
        print(f"budget {options.budget}, batches of {ROWS} pairs", flush=True)
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
    for at, line in enumerate(log(made), 1):
        margin = line["rewards/margins"]
        print(f"update {at}: loss {line['loss']:.4f}, margin {margin:.4f}")
    records = oomkit.transformers.records(made)
    sizes = sorted({record.micro_batch_size or 0 for record in records})
    print(f"micro-batches of {' and '.join(map(str, sizes))} pairs in place of {ROWS}")

    whole = trainer()
    whole.train()
    names = ("loss", "rewards/margins", "logits/chosen", "entropy", "num_tokens")
    gap = max(
        abs(a[name] - b[name]) / max(1.0, abs(b[name]))
        for a, b in zip(log(made), log(whole), strict=True)
        for name in names
    )
    print(f"the same without a budget: {', '.join(names)} differ by {gap:.1e} at most")
    return 0 if gap < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
