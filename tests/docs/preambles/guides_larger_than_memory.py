import torch
from torch import nn

import oomkit

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
x, y = torch.randn(8, 4), torch.randint(3, (8,))


class MyOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
