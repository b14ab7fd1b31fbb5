"""The log tells the whole story, with the label, and once."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import oomkit
from oomkit.testing import inject_oom

ROOT = Path(oomkit.__file__).parents[1]
PROGRAM = """
    import torch, oomkit
    {set_up}
    weight = torch.nn.Parameter(torch.ones(8))
    @oomkit.auto_batch(label="train")
    def step(x):
        weight.grad = None
        (weight * x).mean().backward()
    with oomkit.testing.inject_oom(nth=2, phase="backward"):
        step(torch.ones(4, 8))
"""
LINE = "train step=1 micro_batch=4->2 accumulation=1->2 reason=oom"
SUMMARY = "train: 1 step, 1 OOM, 1 retry, highest peak "


def stderr_of(set_up="", **environment):
    environment = {"OOMKIT_SUMMARY": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(set_up=set_up)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.stderr.splitlines()


def test_without_logging_set_up_our_name_is_in_front_once():
    line, summary = stderr_of()
    assert line == f"oomkit: {LINE}"
    assert summary.startswith(f"oomkit: {SUMMARY}")


def test_with_logging_set_up_the_loggers_name_is():
    line, summary = stderr_of("import logging; logging.basicConfig()")
    assert line == f"WARNING:oomkit:{LINE}"
    assert summary.startswith(f"WARNING:oomkit:{SUMMARY}")


@pytest.mark.parametrize(
    "set_up",
    [
        "import logging; logging.getLogger('oomkit').addHandler(logging.NullHandler())",
        "import logging; logging.getLogger('oomkit').setLevel(logging.ERROR)",
    ],
)
def test_silenced(set_up):
    assert stderr_of(set_up) == []


def test_without_the_last_line():
    assert stderr_of(OOMKIT_SUMMARY="0") == [f"oomkit: {LINE}"]


def test_a_process_without_errors_says_nothing():
    assert stderr_of("step = None; raise SystemExit") == []


@pytest.fixture
def counted():
    """Tensors of the CPU are counted from here on."""
    with oomkit.limit_memory(2**40, device="cpu"):
        yield


def test_growth_is_told_as_the_fall_was(counted, caplog):
    weight = torch.nn.Parameter(torch.ones(256))

    @oomkit.auto_batch(label="train", verify=False)
    def step(x):
        weight.grad = None
        torch.tanh(torch.tanh(weight * x)).mean().backward()

    x = torch.ones(1024, 256)
    room = oomkit.memory("cpu").allocated + 2**21
    with caplog.at_level(logging.INFO), oomkit.limit_memory(room, device="cpu"):
        step(x)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            step(x)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if "micro_batch" in r.msg]
    assert all(text.startswith("train step=") for _, text in lines)
    grown = [level for level, text in lines if text.endswith("reason=grown")]
    assert grown == ["WARNING"] and lines[0][0] == "WARNING"


HOLDER = torch.nn.Linear(8, 1)


def _mean(x):
    HOLDER.zero_grad()
    HOLDER(x).mean().backward()


def _sum(x):
    HOLDER.zero_grad()
    HOLDER(x).sum().backward()


def _reduction(x):
    HOLDER.zero_grad()
    torch.nn.functional.mse_loss(HOLDER(x), x[:, :1], reduction="sum").backward()


@pytest.mark.parametrize(("step", "said"), [(_mean, 0), (_sum, 1), (_reduction, 1)])
def test_a_mean_is_taken_for_granted_without_a_word(step, said, caplog):
    step = oomkit.auto_batch(step, label="train", verify=False, model=HOLDER)
    x = torch.ones(4, 8)
    with inject_oom(nth=1):
        step(x)
    texts = [r.getMessage() for r in caplog.records]
    assert sum("is taken for a mean over samples" in text for text in texts) == said
