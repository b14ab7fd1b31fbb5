import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

import docs

sys.path.append(str(Path(docs.__file__).parents[1] / "trainers"))
import hf_models
import transformers

torch.manual_seed(0)
dataset = hf_models.labelled("class")
model = transformers.BertForSequenceClassification(
    transformers.BertConfig(**hf_models._BERT, num_labels=3)
)
settings = {
    "output_dir": tempfile.mkdtemp(),
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
arguments = transformers.TrainingArguments(**settings)

if find_spec("trl"):
    import datasets

    datasets.disable_progress_bars()
    settings |= {"bf16": False, "gradient_checkpointing": False}
    texts = datasets.Dataset.from_list([{"text": f"w{i} w2 w{i + 1} w4"} for i in range(8)])
    causal, words = hf_models.llama(), hf_models.tokenizer()
