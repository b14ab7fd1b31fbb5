import io

from tqdm import tqdm

from docs.preambles.default import *

optimizer = torch.optim.AdamW(model.parameters())
bar = tqdm(total=4, file=io.StringIO())


@oomkit.auto_batch
def step(x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
