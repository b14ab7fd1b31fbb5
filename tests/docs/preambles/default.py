import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import oomkit

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
criterion = nn.CrossEntropyLoss()
x, y = inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
dataset = TensorDataset(x, y)
loader = DataLoader(dataset, batch_size=4)


@oomkit.auto_batch
def step(x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


train_step = step
