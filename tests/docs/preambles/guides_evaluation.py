import torch
from torch.utils.data import DataLoader, TensorDataset

import oomkit

torch.manual_seed(0)


class Model(torch.nn.Linear):
    def generate(self, input_ids, attention_mask, max_new_tokens):
        return (input_ids * attention_mask).repeat(1, max_new_tokens)


class Metric:
    def __init__(self):
        self.rows = 0

    def update(self, logits):
        self.rows += len(logits)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


model, metric, saved = Model(4, 2), Metric(), []
inputs = torch.randn(8, 4)
loader = DataLoader(TensorDataset(inputs, inputs), batch_size=8)
ids, mask = torch.arange(16).reshape(8, 2), torch.ones(8, 2, dtype=torch.long)
save = saved.append


def score(a, b):
    return a + b
