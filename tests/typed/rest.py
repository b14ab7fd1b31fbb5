"""What a type checker sees of everything that is no step."""

from typing import reveal_type

import torch

import oomkit
from oomkit import sinks, testing

with oomkit.guard(on_oom="skip", label="g", reset_peaks=False) as guard:
    reveal_type(guard)  # oomkit._C.guard
reveal_type(guard.records)  # tuple[oomkit._C.StepRecord, ...]
reveal_type(guard.on_oom)  # Literal['raise'] | Literal['skip']
oomkit.guard(on_oom="ignore")  # error: arg-type


@oomkit.guard(label="f")
def guarded(x: torch.Tensor, n: int) -> list[int]:
    return [n]


reveal_type(guarded(torch.zeros(1), 2))  # list[int]

with oomkit.reserve("8GiB", device="cpu", timeout=1.5) as reserved:
    reveal_type(reserved)  # oomkit.reserve.Reservation
reveal_type(reserved.waited)  # float
oomkit.reserve(1.5)  # error: arg-type


@oomkit.reserve(2**30, limit=False)
def admitted(n: int) -> str:
    return str(n)


reveal_type(admitted(1))  # str

try:
    pass
except oomkit.OutOfMemory as error:
    reveal_type(error.committed)  # bool
    reveal_type(error.report)  # oomkit._C.OOMReport | None
    if error.report is not None:
        reveal_type(error.report.advice)  # tuple[str, str, str]
except oomkit.OomkitError as other:
    reveal_type(other)  # oomkit._C.OomkitError

reveal_type(oomkit.is_oom_error(ValueError()))  # bool
reveal_type(oomkit.current().is_last)  # bool
reveal_type(oomkit.current().weight)  # float
reveal_type(oomkit.memory())  # oomkit.memory.MemoryInfo
reveal_type(oomkit.memory("cpu").allocated)  # int | None
reveal_type(oomkit.max_memory_allocated())  # int | None
reveal_type(oomkit.budget())  # oomkit._api.budget.Budget
reveal_type(oomkit.budget("cuda:1").beside)  # int | None
reveal_type(oomkit.report())  # oomkit.report.Report

if oomkit.classify(ValueError()) == "nonsense":  # error: comparison-overlap
    pass

with testing.inject_oom(nth=2, then=testing.inject_oom(phase="backward")) as fault:
    reveal_type(fault)  # oomkit.testing.inject_oom
reveal_type(fault.fired)  # int


class Ragged:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


def cut(ragged: Ragged, start: int, length: int) -> Ragged:
    return Ragged(ragged.rows[start : start + length])


oomkit.register_splitter(Ragged, split=cut, size=lambda ragged: len(ragged.rows))
oomkit.register_splitter(Ragged, split=len)  # error: arg-type
reveal_type(sinks)  # types.ModuleType
