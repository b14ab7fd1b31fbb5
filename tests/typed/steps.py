"""What a type checker sees of decorated steps."""

from typing import Any, reveal_type

import torch
from torch import Tensor, nn

import oomkit

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@oomkit.auto_batch
def step(x: Tensor, y: Tensor, *, scale: float = 1.0) -> float:
    loss = (model(x) - y).pow(2).mean() * scale
    loss.backward()
    optimizer.step()
    return float(loss)


@oomkit.auto_batch(accumulation_steps=2, label="b", static="y", rng="all", hooks="error")
def with_options(x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).pow(2).mean()
    return loss


x = torch.zeros(2, 4)
reveal_type(step(x, x, scale=2.0))  # float
reveal_type(with_options(x, y=x))  # torch._tensor.Tensor
reveal_type(step.records)  # tuple[oomkit._C.StepRecord, ...]
reveal_type(step.records[0].micro_batch_size)  # int | None
reveal_type(step.label)  # str
reveal_type(oomkit.auto_batch(len))  # oomkit._C.Step[[typing.Sized], int]
step(x)  # error: call-arg
step(x, x, scale="a")  # error: arg-type


def hook(record: oomkit.StepRecord) -> None:
    reveal_type(record.reason)  # str


def tokens(batch: Any) -> int:
    return 1


oomkit.auto_batch(
    step,
    model=model,
    optimizer=[optimizer],
    participants=(),
    backward=True,
    on_retry=hook,
    weight=tokens,
    dim={"x": 1},
)
oomkit.auto_batch(step, model="model")  # error: arg-type
oomkit.auto_batch(step, reduction="max")  # error: call-overload
oomkit.auto_batch(step, accumulation=2)  # error: call-overload


class Trainer:
    @oomkit.auto_batch
    def step(self, x: Tensor) -> Tensor:
        return x

    @oomkit.auto_batch
    @staticmethod
    def plain(x: Tensor) -> int:
        return 1

    @oomkit.auto_batch
    @classmethod
    def made(cls, x: Tensor) -> str:
        return ""


reveal_type(Trainer().step(x))  # torch._tensor.Tensor
reveal_type(Trainer.plain(x))  # int
reveal_type(Trainer().made(x))  # str
