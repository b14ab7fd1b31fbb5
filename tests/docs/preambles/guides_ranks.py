from torch.distributed import HashStore, init_process_group
from torch.nn.parallel import DistributedDataParallel

from docs.preambles.default import *

init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
net = model
