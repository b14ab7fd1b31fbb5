import torch
from torch import nn
from torch.nn import functional as F

import oomkit

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(16, (8, 6))
labels = ids.clone()
labels[:4, 3:] = -100
