"""The log tells the whole story, with the label, and once."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from helpers.own_process import run_program

import oomkit
from oomkit.testing import inject_oom

LINE = "train step=1 micro_batch=4->2 accumulation=1->2 reason=oom"
SUMMARY = "train: 1 step, 1 OOM, 1 retry, highest peak "
CASES = {
    "plain": "",
    "basic": "logging.basicConfig()",
    "null": "logging.getLogger('oomkit').addHandler(logging.NullHandler())",
    "level": "logging.getLogger('oomkit').setLevel(logging.ERROR)",
    "no summary": "os.environ['OOMKIT_SUMMARY'] = '0'",
    "no error": "sys.exit()",
}
# Each case is a process of its own, forked where torch has been imported.
PROGRAM = f"""
import json, logging, os, sys
import torch, oomkit

torch.set_num_threads(1)

def run():
    weight = torch.nn.Parameter(torch.ones(8))
    @oomkit.auto_batch(label="train")
    def step(x):
        weight.grad = None
        (weight * x).mean().backward()
    with oomkit.testing.inject_oom(nth=2, phase="backward"):
        step(torch.ones(4, 8))

said = {{}}
for name, set_up in {CASES!r}.items():
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(theirs, 2)
        os.close(theirs)
        exec(set_up)
        run()
        sys.exit()  # with what is done at exit
    os.close(theirs)
    with open(ours) as stream:
        said[name] = stream.read().splitlines()
    os.waitpid(child, 0)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """stderr of each case, in lines."""
    env = {**os.environ, "OOMKIT_SUMMARY": "1"}
    done = run_program(PROGRAM, env, Path(oomkit.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_logging_set_up_our_name_is_in_front_once(said):
    line, summary = said["plain"]
    assert line == f"oomkit: {LINE}"
    assert summary.startswith(f"oomkit: {SUMMARY}")


def test_with_logging_set_up_the_loggers_name_is(said):
    line, summary = said["basic"]
    assert line == f"WARNING:oomkit:{LINE}"
    assert summary.startswith(f"WARNING:oomkit:{SUMMARY}")


@pytest.mark.parametrize("how", ["null", "level", "no error"])
def test_silence(how, said):
    assert said[how] == []


def test_without_the_last_line(said):
    assert said["no summary"] == [f"oomkit: {LINE}"]


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
    assert sum("is treated as a mean over samples" in text for text in texts) == said
