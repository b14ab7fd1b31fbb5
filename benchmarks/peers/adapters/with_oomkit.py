"""oomkit.auto_batch around a step that knows nothing of parts."""

import oomkit

from ..workloads import Work

NAME = "oomkit"


def train(work: Work, **options) -> None:
    model, optimizer = work.build()
    if work.y.dim() == 2:  # a mean over tokens
        options["weight"] = work.weight

    @oomkit.auto_batch(**options)
    def step(batch):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()

    for batch in work.batches():
        step(batch)
        del batch
    work.finished(step)


def evaluate(work: Work) -> None:
    model = work.build_model()

    @oomkit.auto_batch
    def predict(x):
        return work.predict(model, x)

    for step, (x, _, _) in enumerate(work.batches()):
        work.result(step, predict(x))


def healthy(function):
    return oomkit.auto_batch(function)
