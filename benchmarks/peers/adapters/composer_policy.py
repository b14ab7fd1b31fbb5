"""Composer's device_train_microbatch_size="auto", re-implemented: mosaicml 0.32.1 needs
torch < 2.7.1 and cannot be installed beside the others. From its trainer: the micro-batch
is halved and the batch done again from its start, the error is dealt with outside of
`except`, losses weigh their share of the batch (of the tokens, with
accumulate_train_batch_on_tokens)."""

import torch

from ..workloads import Work, accumulate

NAME = "Composer's policy"


class Auto:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, body, batch):
        while True:
            found_oom = False
            try:
                result = body(batch, self.size)
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
                found_oom = True
            if not found_oom:
                return result
            self.size = max(self.size // 2, 1)


def train(work: Work) -> None:
    model, optimizer = work.build()

    def train_microbatches(batch, size):
        optimizer.zero_grad()
        accumulate(work, model, batch, size)

    auto = Auto(work.rows)
    for batch in work.batches():
        auto(train_microbatches, batch)
        optimizer.step()
        del batch


def evaluate(work: Work) -> None:
    model = work.build_model()

    def predict(x, size):
        return torch.cat([work.predict(model, rows) for rows in x.split(size)])

    auto = Auto(work.rows)
    for step, (x, _, _) in enumerate(work.batches()):
        work.result(step, auto(predict, x))


def healthy(function):
    def body(batch, size):  # its trainer cuts every batch, whether or not there was an error
        for rows in batch.split(size):
            result = function(rows)
        return result

    auto = Auto(8)
    return lambda batch: auto(body, batch)
