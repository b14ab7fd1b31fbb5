"""Examples under torchrun: they keep their batch, agree with runs without a limit, and the
undecorated programs die. In a sample most are started as torchrun does it, but without seconds of
imports for each rank."""

from __future__ import annotations

import math
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sample import WHOLE

from .launch import ROOT, ranks_of


def _torchrun(
    ranks: int, example: str, *options: str, more: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Status, and what all ranks have printed."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), COLUMNS="120")
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "--standalone", *more, str(ROOT / example), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _run(ranks: int, example: str, *options: str) -> tuple[int, str]:
    """The same, of ranks that are forked where only a sample is run."""
    if WHOLE:
        return _torchrun(ranks, example, *options)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    given = {"script": str(ROOT / example), "options": options, "port": port}
    ended = ranks_of("world:example", ranks, 300.0, **given)
    return max(abs(one.status) for one in ended), "".join(one.output for one in ended)


def _number(said: str, after: str) -> int:
    """Of what the example says of memory: the first one after that text."""
    found = re.search(rf"{after} ?(\d+)" if after else r"(\d+) KiB before the rollout", said)
    assert found is not None, said
    return int(found[1])


def test_pretraining_keeps_its_global_batch_finds_its_size_and_resumes(tmp_path: Path) -> None:
    options = ["--scale", "tiny", "--global-batch", "256", "--steps", "4"]
    options += ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    size = None
    for more in (["--stop-after", "3"], ["--resume"]):
        status, said = _run(4, "examples/pretrain.py", *options, *more)
        assert status == 0, said
        assert "agrees with plain torch without a limit" in said
        found = re.search(
            r"global batch \[256\], .* micro-batch (\d+) in the first step and (\d+) in the last",
            said,
        )
        assert found is not None, said
        first, last = (int(n) for n in found.groups())
        assert first == 1 if size is None else first > 4  # a size that was found
        size = last
    assert size is not None and size > 4


def test_pretraining_without_oomkit_dies(tmp_path: Path) -> None:
    options = ["--scale", "tiny", "--global-batch", "256", "--steps", "4"]
    options += ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    status, said = _run(2, "examples/pretrain.py", "--plain", *options)
    assert status != 0 and "out of memory" in said


def _grpo() -> dict[str, Any]:
    """The example's names, as in one process."""
    return runpy.run_path(str(ROOT / "examples/grpo.py"), run_name="grpo")


def _by_groups(grpo: dict[str, Any], policy: Any, batch: dict[str, torch.Tensor]) -> float:
    """Group after group, token after token."""
    new, groups = grpo["chosen"](policy, batch["tokens"]).tolist(), []
    of = {name: batch[name].tolist() for name in ("old", "reference", "advantage", "mask")}
    for first in range(0, len(new), grpo["COMPLETIONS"]):
        terms = []
        for row in range(first, first + grpo["COMPLETIONS"]):
            for at in (at for at, counts in enumerate(of["mask"][row]) if counts):
                ratio, gain = math.exp(new[row][at] - of["old"][row][at]), of["advantage"][row]
                clipped = min(max(ratio, 1 - grpo["CLIP"]), 1 + grpo["CLIP"])
                away = of["reference"][row][at] - new[row][at]
                kept = grpo["KL"] * (math.exp(away) - away - 1)
                terms.append(kept - min(ratio * gain, clipped * gain))
        groups.append(sum(terms) / len(terms))
    return sum(groups) / len(groups)


@pytest.fixture
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_grpo_keeps_its_mini_batch_over_sharded_policies(in_double: None) -> None:
    losses = ["groups", "sequences", "tokens"] if WHOLE else ["groups"]
    rounds = [] if WHOLE else ["--rounds", "1"]
    status, said = _run(2, "examples/grpo.py", "--losses", *losses, *rounds)
    assert status == 0, said
    assert said.count("mini-batch 12 per rank") == len(losses)
    assert said.count("parameters agree with those without a limit") == len(losses)
    # What the first rank has before any update, in one process.
    grpo = _grpo()
    torch.manual_seed(0)
    policy = grpo["Policy"]()
    rolled = grpo["rollout"](policy, policy, 0)
    expected = _by_groups(grpo, policy, {name: t[:12] for name, t in rolled.items()})
    assert f", loss {expected:+.4f} to" in said
    # What the rollout holds is in what was there when a step began.
    cache = grpo["CACHE"] * 8 / 1024
    before, baseline, peak, budget = (
        _number(said, text)
        for text in ("", "before the rollout,", "first step begins,", "at its peak, within")
    )
    assert before + cache <= baseline < peak <= budget, said


@torch.no_grad()
def test_grpo_normalises_by_groups_in_micro_batches_too(in_double: None) -> None:
    """Where the new policy is another one, and a micro-batch has a part of a group."""
    grpo = _grpo()
    torch.manual_seed(0)
    old, reference, policy = (grpo["Policy"]() for _ in range(3))
    batch = grpo["rollout"](old, reference, 0)
    found = sum(
        float(grpo["loss_of"](policy, {n: t[rows] for n, t in batch.items()}, "groups")) * share
        for rows, share in ((slice(6), 6 / 24), (slice(6, 24), 18 / 24))
    )
    assert found == pytest.approx(_by_groups(grpo, policy, batch), abs=1e-12)
    for kind in ("tokens", "sequences"):
        assert abs(float(grpo["loss_of"](policy, batch, kind)) - found) > 1e-4


@pytest.mark.whole
def test_grpo_without_oomkit_dies() -> None:
    status, said = _run(2, "examples/grpo.py", "--plain", "--losses", "sequences")
    assert status != 0 and "out of memory" in said


@pytest.mark.whole
def test_a_job_that_torchrun_starts_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gloo of torch 2.13 itself reads addresses of the first start, with or without us.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    status, said = _torchrun(2, "tests/ranks/elastic.py", more=("--max-restarts=1",))
    assert status == 0, said
    for rank in range(2):
        assert f"start 1, rank {rank}: 4 steps, shared True" in said
    assert "start 0, rank" not in said
    assert "RankError: rank 1 cannot" in said, said
