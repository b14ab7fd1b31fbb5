"""Examples under torchrun: they keep their batch, agree with runs without a limit, and the
undecorated programs die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .launch import ROOT


def _torchrun(ranks: int, example: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), COLUMNS="120")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "--standalone", str(ROOT / "examples" / example), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_pretraining_keeps_its_global_batch_finds_its_size_and_resumes(tmp_path: Path) -> None:
    options = ["--scale", "tiny", "--global-batch", "256", "--steps", "4"]
    options += ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    size = None
    for more in (["--stop-after", "3"], ["--resume"]):
        done = _torchrun(4, "pretrain.py", *options, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "agrees with plain torch without a limit" in done.stdout
        found = re.search(
            r"global batch \[256\], .* micro-batch (\d+) in the first step and (\d+) in the last",
            done.stdout,
        )
        assert found is not None, done.stdout
        first, last = (int(n) for n in found.groups())
        assert first == 1 if size is None else first > 4  # a size that was found
        size = last
    assert size is not None and size > 4
    dies = _torchrun(2, "pretrain.py", "--plain", *options)
    assert dies.returncode != 0 and "out of memory" in dies.stderr


def test_grpo_keeps_its_mini_batch_over_sharded_policies() -> None:
    done = _torchrun(2, "grpo.py", "--losses", "tokens", "groups")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mini-batch 12 per rank") == 2
    assert done.stdout.count("parameters agree with those without a limit") == 2
    dies = _torchrun(2, "grpo.py", "--plain", "--losses", "sequences")
    assert dies.returncode != 0 and "out of memory" in dies.stderr
