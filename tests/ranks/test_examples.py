"""Examples under torchrun: they keep their batch, agree with runs without a limit, and the
undecorated programs die. In a sample most are started as torchrun does it, but without seconds of
imports for each rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
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


def test_grpo_keeps_its_mini_batch_over_sharded_policies() -> None:
    losses = ["tokens", "sequences", "groups"] if WHOLE else ["tokens"]
    status, said = _run(2, "examples/grpo.py", "--losses", *losses)
    assert status == 0, said
    assert said.count("mini-batch 12 per rank") == len(losses)
    assert said.count("parameters agree with those without a limit") == len(losses)


def test_grpo_without_oomkit_dies() -> None:
    status, said = _run(2, "examples/grpo.py", "--plain", "--losses", "sequences")
    assert status != 0 and "out of memory" in said


@pytest.mark.skipif(not WHOLE, reason="a sample has no time for five imports of torch")
def test_a_job_that_torchrun_starts_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gloo of torch 2.13 itself reads addresses of the first start, with or without us.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    status, said = _torchrun(2, "tests/ranks/elastic.py", more=("--max-restarts=1",))
    assert status == 0, said
    for rank in range(2):
        assert f"start 1, rank {rank}: 4 steps, shared True" in said
    assert "start 0, rank" not in said
    assert "RankError: rank 1 cannot" in said, said
