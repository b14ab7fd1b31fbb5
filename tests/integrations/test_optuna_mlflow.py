"""What an out-of-memory trial leaves in a real MLflow store."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlflow
import optuna
import pytest
from searches import MIB, STATE, study, take

import oomkit
from oomkit.optuna import prune_on_oom

# SQLAlchemy's, of what MLflow asks of it.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: to make one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.set_tracking_uri(f"sqlite:///{path}")
    mlflow.MlflowClient().search_experiments()
    return path


@pytest.fixture(autouse=True)
def store(empty_store: Path, tmp_path: Path) -> Iterator[mlflow.MlflowClient]:
    shutil.copy(empty_store, tmp_path / "runs.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.create_experiment("search", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("search")
    yield mlflow.MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every call that ends a run: (run, status)."""
    calls = []
    real = mlflow.MlflowClient.set_terminated

    def noted(self, run_id, status=None, *args):
        calls.append((run_id, status))
        return real(self, run_id, status, *args)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", noted)
    return calls


def oom(trial):
    take(4)
    return take(50).sum()


def checked(client, run_id, status, failed=True):
    run = client.get_run(run_id)
    assert run.info.status == status
    assert run.data.params.get("oom_error") == ("True" if failed else None)
    assert run.data.metrics["peak_memory_bytes"] >= 4 * MIB
    assert run.data.metrics["peak_memory_gb"] == run.data.metrics["peak_memory_bytes"] / 1e9
    return run


def test_a_run_in_a_with_block(store, ended, limit):
    limit(10)
    ids = []

    @prune_on_oom
    def objective(trial):
        with mlflow.start_run() as run:
            ids.append(run.info.run_id)
            return oom(trial) if trial.number == 0 else float(take(4).numel())

    study().optimize(objective, n_trials=2)
    assert ended == [(ids[0], "FAILED"), (ids[1], "FINISHED")]
    assert checked(store, ids[0], "FAILED").data.tags["oom_kind"] == "capacity"
    checked(store, ids[1], "FINISHED", failed=False)


def test_a_run_that_is_left_open_is_ended_once(store, ended, limit):
    limit(10)
    ids = []

    @prune_on_oom
    def objective(trial):
        ids.append(mlflow.start_run().info.run_id)
        value = oom(trial) if trial.number == 0 else float(take(4).numel())
        mlflow.end_run()
        return value

    study().optimize(objective, n_trials=2)
    assert ended == [(ids[0], "FAILED"), (ids[1], "FINISHED")]
    checked(store, ids[0], "FAILED")
    checked(store, ids[1], "FINISHED", failed=False)


def test_a_parent_is_untouched_and_nested_runs_are_ended(store, ended, limit):
    limit(10)
    ids = []

    @prune_on_oom
    def objective(trial):
        ids.append(mlflow.start_run(nested=True).info.run_id)
        ids.append(mlflow.start_run(nested=True).info.run_id)
        return oom(trial)

    with mlflow.start_run() as parent:
        study().optimize(objective, n_trials=1)
        assert mlflow.active_run().info.run_id == parent.info.run_id
        assert store.get_run(parent.info.run_id).info.status == "RUNNING"
        assert ended == [(ids[1], "FAILED"), (ids[0], "FAILED")]
    untouched = store.get_run(parent.info.run_id)
    assert untouched.data.params == {} and untouched.data.metrics == {}
    assert untouched.info.status == "FINISHED"
    assert len(ended) == 3


def test_a_nested_run_in_a_with_block(store, ended, limit):
    limit(10)
    ids = []

    @prune_on_oom
    def objective(trial):
        with mlflow.start_run(nested=True) as run:
            ids.append(run.info.run_id)
            return oom(trial) if trial.number == 0 else float(take(4).numel())

    with mlflow.start_run() as parent:
        study().optimize(objective, n_trials=2)
    checked(store, ids[0], "FAILED")
    checked(store, ids[1], "FINISHED", failed=False)
    assert store.get_run(parent.info.run_id).data.metrics == {}
    assert ended == [(ids[0], "FAILED"), (ids[1], "FINISHED"), (parent.info.run_id, "FINISHED")]


def test_a_trial_without_a_run_makes_none(store, limit):
    limit(10)
    study().optimize(prune_on_oom(oom), n_trials=1)
    with mlflow.start_run() as parent:
        study().optimize(prune_on_oom(oom), n_trials=1)
    (only,) = mlflow.search_runs(output_format="list")
    assert only.info.run_id == parent.info.run_id and only.data.params == {}


def test_the_run_that_optuna_opened_for_the_trial(store, ended, limit):
    """What `track_in_mlflow` does: a run around the objective, its id with the trial."""
    limit(10)
    ids = []
    wrapped = prune_on_oom(oom)

    def tracked(trial):
        with mlflow.start_run() as run:
            ids.append(run.info.run_id)
            trial.storage.set_trial_system_attr(trial._trial_id, "mlflow_run_id", ids[0])
            return wrapped(trial)

    study().optimize(tracked, n_trials=1)
    assert ended == [(ids[0], "FAILED")]
    checked(store, ids[0], "FAILED")


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "tracked"])
def test_a_run_that_the_second_attempt_ends_well_says_no_oom(chosen, store, limit):
    limit(40)

    @prune_on_oom(mlflow=(lambda trial: run.info.run_id) if chosen else "auto")
    def objective(trial):
        return float(take(4).numel())

    def tracked(trial):
        trial.storage.set_trial_system_attr(trial._trial_id, "mlflow_run_id", run.info.run_id)
        return objective(trial)

    with mlflow.start_run() as run, oomkit.testing.inject_oom(nth=1, min_bytes=MIB):
        one = study()
        one.optimize(objective if chosen else tracked, n_trials=1)
    assert one.trials[0].state == STATE.COMPLETE
    checked(store, run.info.run_id, "FINISHED", failed=False)


def test_a_run_of_ones_own_choice(store, limit):
    limit(10)
    run = store.create_run("1")
    study().optimize(prune_on_oom(oom, mlflow=lambda trial: run.info.run_id), n_trials=1)
    checked(store, run.info.run_id, "RUNNING")


@pytest.mark.parametrize("broken", ["log_param", "log_metric", "set_terminated", "get_run"])
def test_what_mlflow_refuses_hides_nothing(broken, limit, monkeypatch, caplog):
    limit(10)

    def refuse(*args, **kwargs):
        raise mlflow.MlflowException("the server is gone")

    monkeypatch.setattr(mlflow.MlflowClient, broken, refuse)

    @prune_on_oom
    def objective(trial):
        mlflow.start_run()
        return oom(trial)

    one = study()
    with caplog.at_level(logging.DEBUG, "oomkit"):
        one.optimize(objective, n_trials=1)
    assert one.trials[0].state == STATE.PRUNED and one.trials[0].user_attrs["oom"] is True
    assert "the server is gone" in caplog.text or broken == "get_run"
    assert mlflow.active_run() is None


def test_it_can_be_left_alone(store, limit):
    limit(10)

    @prune_on_oom(mlflow=False)
    def objective(trial):
        mlflow.start_run()
        return oom(trial)

    study().optimize(objective, n_trials=1)
    assert store.get_run(mlflow.active_run().info.run_id).data.params == {}


def test_a_user_who_prunes_keeps_his_run(store, ended, limit):
    limit(10)

    @prune_on_oom
    def objective(trial):
        with mlflow.start_run():
            take(4)
            raise optuna.TrialPruned

    study().optimize(objective, n_trials=1)
    assert [status for _, status in ended] == ["FAILED"]  # MLflow's own
    checked(store, ended[0][0], "FAILED", failed=False)
