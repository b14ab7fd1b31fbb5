"""torch.compile around a step: torch does not ask for an issue about functions of oomkit."""

from __future__ import annotations

from helpers.own_process import run_program

# In a process of its own: torch says such things once.
SCRIPT = """
import warnings
import torch
import oomkit
from oomkit.testing import inject_oom
from torch import nn

model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
own = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)


@oomkit.auto_batch
def step(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.compile(backend="eager")
def plain():
    own.step()  # of nobody that oomkit knows
    layer = nn.Linear(2, 2)  # registers parameters
    layer.register_buffer("b", torch.zeros(1))
    return layer(torch.ones(2))


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = torch.compile(step, backend="eager")
    for nth in (10**9, 3, 10**9):
        with inject_oom(nth=nth):
            compiled(torch.ones(4, 3))
    plain()
assert step.records[-1].accumulation_steps == 2, step.records
for each in caught:
    print(each.message)
print("done")
"""


def test_torch_does_not_ask_for_an_issue_about_our_hooks() -> None:
    done = run_program(SCRIPT)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-2000:]
    said = done.stdout + done.stderr
    assert "oomkit._C" not in said and "file an issue" not in said, said
