import torch

import oomkit


class Graphs:
    def __init__(self, nodes):
        self.nodes, self.count = nodes, len(nodes)

    def subset(self, start, stop):
        return Graphs(self.nodes[start:stop])

    @staticmethod
    def concatenate(results):
        return Graphs(torch.cat([one.nodes for one in results]))
