"""transformers' Trainer in two processes over DistributedDataParallel, of which one or both run out
of memory; started by torchrun, as the file's own program.

    torchrun --nproc-per-node 2 tests/trainers/test_hf_ranks.py PROGRAM FILE
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, lm, tokens, trainer
from runs import SINGLE, parameters

import oomkit
from oomkit.testing import inject_oom
from oomkit.transformers import protect, records

HERE = Path(__file__).parent
RANKS = 2


class OwnMean(hf.Trainer):
    """A mean over the rows of each process."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Coupled(hf.Trainer):
    """A loss whose square couples the rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss**2
        return (loss, outputs) if return_outputs else loss


class OwnStep(hf.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def _lm(kind: Any = hf.Trainer, **more: Any) -> Any:
    return trainer(lm, tokens(32), kind, **{"eval_strategy": "no", **more})


def _classes(kind: Any = hf.Trainer, **more: Any) -> Any:
    return trainer(
        lambda: bert("SequenceClassification"),
        labelled("class", 32),
        kind,
        eval_strategy="no",
        **more,
    )


SETTINGS: dict[str, Callable[..., Any]] = {
    "lm": _lm,  # a sum over num_items_in_batch, which is that of both processes
    "lm_2": functools.partial(_lm, gradient_accumulation_steps=2),
    "lm_4_own_items": functools.partial(
        _lm, gradient_accumulation_steps=4, average_tokens_across_devices=False
    ),
    "checkpointing": functools.partial(_lm, gradient_checkpointing=True),
    "used": functools.partial(_lm, gradient_accumulation_steps=2, ddp_find_unused_parameters=False),
    "smoothed": functools.partial(_lm, label_smoothing_factor=0.1),
    "classes": _classes,
    "own_mean_2": functools.partial(_classes, OwnMean, gradient_accumulation_steps=2),
}
PLACES = [("forward", 40), ("backward", 3), ("backward", 20)]


def _rank() -> int:
    return int(os.environ["RANK"])


def _run(make: Callable[[], Any], fault: inject_oom | None, number: int, method: str) -> Any:
    """A whole training, in whose call of that number there may be an error: its trainer."""
    made = make()
    made.args.include_num_input_tokens_seen = "all"
    made.remove_callback(hf.PrinterCallback)
    if method == "plain":
        made.train()
        return made
    step, calls = getattr(protect(made), method), []

    def arm(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if fault is None or len(calls) != number:
            return step(*args, **kwargs)
        with fault:
            return step(*args, **kwargs)

    setattr(made, method, arm)
    made.train()
    setattr(made, method, step)
    return made


def _far(made: Any, plain: Any) -> float:
    """How far one run is from the other: parameters, and what both have logged."""
    ours, theirs = parameters(made.model), parameters(plain.model)
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert len(made.state.log_history) == len(plain.state.log_history)
    for one, two in zip(made.state.log_history, plain.state.log_history, strict=True):
        assert one.keys() == two.keys()
        still = {k for k in one if "runtime" not in k and "per_second" not in k}
        worst = max([worst, *(abs(one[k] - two[k]) for k in still)])
    counts = [
        (s.global_step, s.num_input_tokens_seen, float(s.total_flos))
        for s in (made.state, plain.state)
    ]
    assert counts[0] == counts[1], counts
    return worst


def faults(name: str, method: str) -> list[Any]:
    """Of each fault of a rank: where, whether it came, how far the run is from a plain one."""
    make, found = SETTINGS[name], []
    plain = _run(make, None, 0, "plain")
    found.append(["healthy", 0, _far(_run(make, None, 0, method), plain)])
    for number in (1, 2):
        for fails in (0, 1, 2):
            for phase, nth in PLACES if method == "training_step" else PLACES[:1]:
                fault = inject_oom(nth=nth, phase=phase) if fails in (_rank(), RANKS) else None
                made = _run(make, fault, number, method)
                where = f"{method} {number} of {fails}, {phase} {nth}"
                found.append([where, 0 if fault is None else fault.fired, _far(made, plain)])
                failed = [record for record in records(made) if record.ooms]
                assert sum(record.ooms for record in failed) == found[-1][1]
                assert all(record.accumulation_steps > 1 for record in failed)
    return found


def training(name: str) -> list[Any]:
    return faults(name, "training_step")


def evaluation(name: str) -> list[Any]:
    SETTINGS[name] = functools.partial(SETTINGS[name], eval_strategy="epoch")
    return faults(name, "prediction_step")


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def coupled(_: str) -> list[Any]:
    """The error, and whether parameters are as they were."""
    made: Any = None

    def make() -> Any:
        nonlocal made
        made = _lm(Coupled)
        return made

    error = _error(
        lambda: _run(make, inject_oom(nth=30) if _rank() == 1 else None, 1, "training_step")
    )
    ours, begun = parameters(made.model), parameters(_lm(Coupled).model)
    return [error, all(torch.equal(ours[name], begun[name]) for name in begun)]


def refused(_: str) -> list[Any]:
    from test_trl_sweep import sft

    return [_error(lambda: protect(sft())), _error(lambda: protect(_lm(OwnStep)))]


def resumed(_: str) -> list[Any]:
    """Micro-batches after a training was resumed, whose calls were split on rank 0 alone."""
    folder = os.environ["OOMKIT_FOLDER"]
    make = functools.partial(_lm, folder=folder, save_strategy="steps", save_steps=2)
    first = _run(make, inject_oom(nth=30) if _rank() == 0 else None, 1, "training_step")
    counts = [r.accumulation_steps for r in records(first)]
    protected, plain = protect(make()), make()
    for made in (protected, plain):
        made.args.include_num_input_tokens_seen = "all"
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return [_far(protected, plain), counts, [r.accumulation_steps for r in records(protected)]]


PROGRAMS = {
    "training": training,
    "evaluation": evaluation,
    "coupled": coupled,
    "refused": refused,
    "resumed": resumed,
}


def _of_both(program: str, tmp_path: Path) -> Iterator[Any]:
    """What each rank says of a program."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "OOMKIT_FOLDER": str(tmp_path / "saved")}
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    launch += ["--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*launch, __file__, program, str(tmp_path / "rank")],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return (json.loads(Path(f"{tmp_path}/rank-{rank}").read_text()) for rank in range(RANKS))


@pytest.mark.parametrize("name", SETTINGS)
def test_training_survives(name: str, tmp_path: Path) -> None:
    """The same parameters, logs and counts as of two processes that have enough memory."""
    fired = 0
    for rank in _of_both(f"training:{name}", tmp_path):
        for where, count, far in rank:
            assert far <= SINGLE, where
            fired += count
    assert fired >= 16


def test_evaluation_survives(tmp_path: Path) -> None:
    fired = 0
    for rank in _of_both("evaluation:lm", tmp_path):
        for where, count, far in rank:
            assert far <= SINGLE, where
            fired += count
    assert fired == 4


def test_a_loss_that_couples_rows_is_refused_on_both(tmp_path: Path) -> None:
    one, two = _of_both("coupled:", tmp_path)
    assert two[0].startswith("SplitError: auto_batch cannot split Coupled.training_step"), two
    assert one[0].startswith("RankError") and "rank 1" in one[0], one
    assert one[1] and two[1]


def test_a_resumed_training(tmp_path: Path) -> None:
    """Sizes are in the checkpoint, which rank 0 writes and both read."""
    one, two = _of_both("resumed:", tmp_path)
    assert one[0] <= SINGLE and two[0] <= SINGLE
    assert set(one[1]) == {2} and set(two[1]) == {1}
    assert set(one[2]) == set(two[2]) == {2}


def test_what_is_refused(tmp_path: Path) -> None:
    for gathers, returned in _of_both("refused:", tmp_path):
        assert "cannot protect SFTTrainer with world_size=2: its loss gathers metrics" in gathers
        assert 'cannot protect OwnStep with world_size=2 at "compute_loss"' in returned


if __name__ == "__main__":
    _program, _, _name = sys.argv[1].partition(":")
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    oomkit._C._keep_sizes(False)
    _said = PROGRAMS[_program](_name)
    Path(f"{sys.argv[2]}-{_rank()}").write_text(json.dumps(_said))
    torch.distributed.destroy_process_group()
