from docs.preambles.default import *
from docs.preambles.guides_lightning import *

loader = DataLoader(dataset, batch_size=4)
