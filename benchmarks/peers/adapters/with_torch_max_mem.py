"""torch-max-mem's maximize_memory_utilization around a step with a batch_size."""

import torch
from torch_max_mem import maximize_memory_utilization

from ..workloads import Work, accumulate

NAME = "torch-max-mem"


def train(work: Work) -> None:
    @maximize_memory_utilization(safe_devices=["cpu"])
    def step(model, optimizer, batch, *, batch_size):
        optimizer.zero_grad()
        accumulate(work, model, batch, batch_size)
        optimizer.step()

    model, optimizer = work.build()
    for batch in work.batches():
        step(model, optimizer, batch, batch_size=work.rows)
        del batch


def evaluate(work: Work) -> None:
    @maximize_memory_utilization(safe_devices=["cpu"])
    def predict(model, x, *, batch_size):
        return torch.cat([work.predict(model, rows) for rows in x.split(batch_size)])

    model = work.build_model()
    for step, (x, _, _) in enumerate(work.batches()):
        work.result(step, predict(model, x, batch_size=work.rows))


def healthy(function):
    @maximize_memory_utilization(safe_devices=["cpu"])
    def call(batch, batch_size=8):
        return function(batch)

    return call
