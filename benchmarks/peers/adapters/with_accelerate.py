"""accelerate's find_executable_batch_size, as its example automatic_gradient_accumulation.py
has it: everything is made inside the function, and the accumulation follows the size found."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

from ..workloads import Work

NAME = "accelerate"


def train(work: Work) -> None:
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=work.rows)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = work.rows // batch_size
        model, optimizer = work.build()
        model, prepared, loader = accelerator.prepare(model, optimizer, work.loader(batch_size))
        for part in loader:
            with accelerator.accumulate(model):
                accelerator.backward(work.loss(model, part))
                prepared.step()
                prepared.zero_grad()

    inner_training_loop()


def evaluate(work: Work) -> None:
    @find_executable_batch_size(starting_batch_size=work.rows)
    def inner_evaluation_loop(batch_size):
        model = work.build_model()
        for step, (x, _, _) in enumerate(work.batches()):
            work.result(
                step, torch.cat([work.predict(model, rows) for rows in x.split(batch_size)])
            )

    inner_evaluation_loop()


def healthy(function):
    return find_executable_batch_size(starting_batch_size=8)(
        lambda batch_size, batch: function(batch)
    )
