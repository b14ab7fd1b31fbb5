from importlib.util import find_spec

if find_spec("lightning"):
    import lightning
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Classifier()
    dataset = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    loader = DataLoader(dataset, batch_size=4)
