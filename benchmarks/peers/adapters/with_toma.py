"""toma.batch around a step that takes the size of its parts; toma.execute.chunked."""

import torch
from toma import toma

from ..workloads import Work, accumulate

NAME = "toma"


def train(work: Work) -> None:
    @toma.batch(initial_batchsize=work.rows)
    def step(batchsize, work, model, optimizer, batch):
        optimizer.zero_grad()
        accumulate(work, model, batch, batchsize)
        optimizer.step()

    model, optimizer = work.build()
    for batch in work.batches():
        step(work, model, optimizer, batch)
        del batch


def evaluate(work: Work) -> None:
    model = work.build_model()
    for step, (x, _, _) in enumerate(work.batches()):
        out = torch.empty(len(x), model.net[-1].out_features)

        @toma.execute.chunked(x, initial_step=work.rows)
        def predict(chunk, start, end, out=out):
            out[start:end] = work.predict(model, chunk)

        work.result(step, out)


def healthy(function):
    return toma.batch(lambda batchsize, batch: function(batch), initial_batchsize=8)
