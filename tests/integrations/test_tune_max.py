"""examples/tune_max.py, small: it ends where the plain one dies, and goes on where it is killed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
import torch

import oomkit
from oomkit._limits import admission as _admission

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import tune_max  # noqa: E402
from tuning import training  # noqa: E402
from tuning.alive import Alive  # noqa: E402
from tuning.search import Options, bury, open_study, search, suggest  # noqa: E402

# SQLAlchemy's, of what MLflow and Optuna ask of it; transformers', of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = ("model", "tok.max_length", "train.batch_size", "train.grad_accum")
SMALL = ("bert-base", 128, 8, 1)
LARGE = ("bert-large", 480, 48, 4)  # the one that died
HOPELESS = ("deberta-v3-large", 512, 8, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OOMKIT_RESERVE_DIR", str(tmp_path / "queues"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    while mlflow.active_run() is not None:
        mlflow.end_run()
    oomkit.limit_memory(None, device="cpu")


def queued(*configurations: tuple[Any, ...]) -> optuna.Study:
    """A study in tune.db whose first trials are these."""
    study = optuna.create_study(study_name="tune_max", storage="sqlite:///tune.db")
    for one in configurations:
        study.enqueue_trial(dict(zip(NAMES, one, strict=True)))
    return study


def run(*options: str, rows: int = 8) -> int:
    gc.collect()  # what other tests have left in cycles would take part of the budget
    return tune_max.main(["--study", "tune.db", "--rows", str(rows), *options])


def counts(text: str) -> dict[str, int]:
    """The numbers of the table."""
    head, _, row = text[text.index("  trials   OOM") :].split("\n")[:3]
    names = ("trials", "OOM", "pruned", "completed", "in parts", "OOMs survived", "died")
    assert all(name in head for name in (*names, "best"))
    return dict(zip(names, map(int, row.split()[:7]), strict=True))


def held() -> list[str]:
    """Places of living processes in the queue of the CPU's memory."""
    queue = _admission.folder("cpu")
    return [p.name for p in _admission._places(queue) if _admission._is_held(queue / p.name)]


# --- plain, and with oomkit -----------------------------------------------------------


def test_the_plain_search_dies(capsys: pytest.CaptureFixture[str]) -> None:
    study = queued(SMALL, LARGE)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run("--plain", "--no-mlflow", "--budget", "100MiB", rows=48)
    said = capsys.readouterr().out
    assert "The study died in trial 1, with 1 of 20 trials finished." in said
    assert counts(said)["completed"] == 1
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]


def test_the_search_ends_with_a_table_and_a_picture(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    study = queued(SMALL, LARGE, HOPELESS, SMALL)
    assert run("--budget", "100MiB", "--n-trials", "4", rows=48) == 0
    said = capsys.readouterr().out
    small, large, hopeless, again = study.trials
    assert [t.state.name for t in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert small.value == again.value  # nothing of the others reaches it
    assert large.user_attrs["micro_batch_size"] < 48 and large.user_attrs["oom_retries"] > 0
    assert large.user_attrs["peak_memory_bytes"] <= 100 * 2**20
    assert hopeless.user_attrs["oom"] is True
    assert hopeless.user_attrs["oom_config"] | {} == {
        **dict(zip(NAMES, HOPELESS, strict=True)),
        **{"model": "deberta-v3-large", "max_length": 512, "batch_size": 8, "grad_accum": 8},
        "effective_batch_size": 64,
    }
    found = counts(said)
    assert found.pop("OOMs survived") >= 1
    assert found == {"trials": 4, "OOM": 1, "pruned": 0, "completed": 3, "in parts": 1, "died": 0}
    assert "trial   2: deberta-v3-large, 8 x 8 rows of 512 tokens: out of memory" in said
    picture = (folder / "tune_max-output" / "tune_max.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 100_000
    runs = mlflow.search_runs(experiment_names=["tune_max"], output_format="list")
    by_id = {one.info.run_id: one for one in runs}
    assert len(by_id) == 4
    marked = by_id[hopeless.user_attrs["mlflow_run"]]
    assert marked.data.params["oom_error"] == "True" and marked.info.status == "FAILED"
    fine = by_id[large.user_attrs["mlflow_run"]]
    assert fine.info.status == "FINISHED" and fine.data.params["batch_size"] == "48"
    assert fine.data.metrics["peak_memory_bytes"] == large.user_attrs["peak_memory_bytes"]
    assert held() == []


def test_two_objectives_and_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--no-mlflow", "--multi-objective", "--grad-checkpointing", "--n-trials", "2")
    assert tune_max.main(["--rows", "8", *options]) == 0  # a study that is kept nowhere
    assert counts(capsys.readouterr().out)["trials"] == 2


# --- killed, and gone on with ---------------------------------------------------------

DRIVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import tune_max
from tuning import search

real, calls = search.train, []

def train(config, scale, report, plain, told):
    def stop(epoch, loss):
        report(epoch, loss)
        if len(calls) == 2:
            print("in the middle of a trial", flush=True)
            sys.stdin.read()
    calls.append(config)
    return real(config, scale, stop, plain, told)

search.train = train
tune_max.main()
"""


def test_a_search_that_is_killed_goes_on(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ["--study", "tune.db", "--rows", "8", "--n-trials", "3"]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(ROOT / "examples"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        try:
            assert any("in the middle of a trial" in line for line in process.stdout)
            assert len(held()) == 1
        finally:
            process.kill()
    study = optuna.load_study(study_name="tune_max", storage="sqlite:///tune.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "RUNNING"]
    assert held() == []  # the kernel took the lock with the process

    assert run("--n-trials", "3") == 0
    said = capsys.readouterr().out
    first, dead, *rest = study.trials
    assert re.search(r"trial   1: .* rows of \d+ tokens: died with its process", said)
    assert "study tune.db: trials finished: 1, to go: 2" in said
    assert (first.state.name, dead.state.name, len(rest)) == ("COMPLETE", "FAIL", 2)
    assert all(trial.state.is_finished() and trial.state.name != "FAIL" for trial in rest)
    assert first.params not in [trial.params for trial in rest]  # the seed begins not anew
    found = counts(said)
    assert (found["trials"], found["died"]) == (4, 1)
    assert found["OOM"] + found["pruned"] + found["completed"] == 3
    assert held() == [] and not Alive(folder / "tune.db.lock").is_held(1)
    runs = mlflow.search_runs(experiment_names=["tune_max"], output_format="list")
    status = {one.info.run_id: one.info.status for one in runs}
    assert len(status) == 4 and status.pop(dead.user_attrs["mlflow_run"]) == "KILLED"
    assert "RUNNING" not in status.values()

    assert run("--n-trials", "3") == 0  # nothing is left to do, and nothing is done
    said = capsys.readouterr().out
    assert "trials finished: 3, to go: 0" in said and "died with" not in said
    assert len(study.trials) == 4


def test_a_trial_of_a_living_process_is_left_alone(folder: Path) -> None:
    study = queued()
    mine, theirs = study.ask(), study.ask()
    held_here, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Alive(folder / "tune.db.lock").hold(theirs.number)
            os.write(says, b"!")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(held_here, 1) == b"!"
        alive = Alive(folder / "tune.db.lock")
        alive.hold(mine.number)
        assert alive.is_held(mine.number) and alive.is_held(theirs.number)
        assert bury(study, alive, track=False) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(held_here)
        os.close(says)
    assert [trial.number for trial in bury(study, alive, track=False)] == [theirs.number]
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "FAIL"]
    alive.drop(mine.number)
    alive.close()
    other = Alive(folder / "tune.db.lock")
    assert not other.is_held(mine.number)
    other.close()


# --- several at once, and what is refused ---------------------------------------------


def options(folder: Path, n_trials: int, study: str = "tune.db") -> Options:
    return Options(n_trials, 100 * 2**20, None, folder / study, False, False, False, folder, 1)


def test_terminals_that_start_at_once_make_one_study(folder: Path) -> None:
    arguments = [sys.executable, str(ROOT / "examples" / "tune_max.py"), "--study", "new.db",
                 "--n-trials", "0"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [1, 1, 1]  # of no trials none fits
    assert not [text for text in errors if "Traceback" in text]


def test_each_process_begins_with_trials_of_its_own(folder: Path) -> None:
    studies = [open_study(options(folder, 1)) for _ in range(2)]  # both before the first trial
    for number, study in enumerate(studies, 1):
        chosen = options(folder, number)
        search(
            study,
            lambda trial: len(suggest(trial, options(folder, 0))),
            None,
            chosen,
            lambda frozen: None,
        )
    first, second = studies[0].trials
    assert first.params != second.params


def test_trials_that_others_run_count(folder: Path) -> None:
    study = open_study(options(folder, 1))
    running = study.ask()
    alive = Alive(folder / "tune.db.lock")
    alive.hold(running.number)
    search(study, lambda trial: 1.0, alive, options(folder, 1), lambda frozen: None)
    assert len(study.trials) == 1
    alive.drop(running.number)  # dead, as far as anybody can tell
    search(study, lambda trial: 1.0, alive, options(folder, 1), lambda frozen: None)
    assert len(study.trials) == 2
    alive.close()


def test_who_is_killed_while_burying_leaves_it_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = queued()
    study.ask().set_user_attr("mlflow_run", "0")
    alive = Alive(folder / "tune.db.lock")

    def killed() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow, "MlflowClient", killed)
    with pytest.raises(KeyboardInterrupt):
        bury(study, alive, track=True)
    assert [trial.number for trial in bury(study, alive, track=False)] == [0]
    alive.close()


def test_what_cannot_work_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert run("--no-mlflow", "--budget", "300MiB", "--device-memory", "200MiB") == 2
    assert "--budget is 300.00 MiB, more than the 200.00 MiB of" in capsys.readouterr().err
    assert not (folder / "tune.db").exists()
    study = queued()
    study.tell(study.ask(), 1.0)
    assert run("--no-mlflow", "--plain") == 2
    assert "tune.db has trials already: --plain needs" in capsys.readouterr().err
    assert run("--no-mlflow", "--multi-objective") == 2
    assert "has 1 objective(s): run it without --multi-objective" in capsys.readouterr().err
    assert len(study.trials) == 1


# --- the models -----------------------------------------------------------------------


@pytest.mark.parametrize("name", training.MODELS)
def test_each_model_trains_on_the_longest_text(name: str) -> None:
    scale = training.scale_of("cpu", 8)
    told = training.Trained()
    config = {"model": name, "max_length": 512, "batch_size": 8, "grad_accum": 1}
    seen: list[int] = []
    training.train(config, scale, lambda epoch, loss: seen.append(epoch), True, told)
    assert seen == [0, 1] and told.loss == told.loss and told.parameters > 100_000


def test_micro_batches_compute_what_the_batch_does() -> None:
    """Without dropout, which draws others: the loss after two epochs is the same."""
    config = {"model": "bert-base", "max_length": 128, "batch_size": 16, "grad_accum": 2}
    scale = training.scale_of("cpu", 48)
    losses = []
    for plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "dropout", lambda x, *a, **k: x)
            with contextlib.ExitStack() as stack:
                if not plain:
                    stack.enter_context(oomkit.testing.inject_oom(nth=9, phase="backward"))
                told = training.Trained()
                training.train(config, scale, lambda *a: None, plain, told)
        losses.append(told.loss)
        assert told.ooms == (not plain)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
