"""Each sink against the library that it is for; `make test-sinks` has their environment."""

from __future__ import annotations

import io
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import oomkit
from oomkit import sinks
from oomkit.testing import inject_oom

NAMES = {"micro_batch_size", "accumulation_steps", "ooms", "peak_allocated", "time", "time_lost"}


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    yield
    for sink in sinks.attached():
        sinks.detach(sink)


def run(label: str = "train <step>") -> Any:
    """Three steps, of which the second runs out of memory once."""
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label=label)
    def step(x: torch.Tensor) -> None:
        weight.grad = None
        (weight * x).mean().backward()

    x = torch.ones(4, 8)
    step(x)
    with inject_oom(nth=2, phase="backward"):
        step(x)
    step(x)
    return step.records


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    sinks.attach(sinks.TensorBoard(writer))
    records = run()
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {f"oomkit/train _step_/{name}" for name in NAMES} <= set(tags)
    ooms = events.Scalars("oomkit/train _step_/ooms")
    assert [(event.step, event.value) for event in ooms] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    peaks = events.Scalars("oomkit/train _step_/peak_allocated")
    assert [event.value for event in peaks] == [record.peak_allocated for record in records]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("oomkit")
    with mlflow.start_run() as active:
        sinks.attach(sinks.MLflow(mlflow))
        records = run()
        sinks.detach(sinks.attached()[0])
    client = mlflow.MlflowClient()
    found = client.get_metric_history(active.info.run_id, "oomkit/train _step_/ooms")
    assert sorted((metric.step, metric.value) for metric in found) == [(1, 0), (2, 1), (3, 0)]
    metrics = client.get_run(active.info.run_id).data.metrics
    assert metrics["oomkit/train _step_/peak_allocated"] == records[-1].peak_allocated


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    with wandb.init(mode="offline", project="oomkit", dir=str(tmp_path)) as run_:
        sinks.attach(sinks.WandB(run_))
        run()
        run_.log({"loss": 1.0})  # what the program logs itself takes them along
        assert run_.summary["oomkit/train _step_/ooms"] == 0
        assert run_.summary["oomkit/train _step_/micro_batch_size"] > 0
        assert run_.step == 1


def test_prometheus_over_loopback() -> None:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    sinks.attach(sinks.Prometheus(registry))
    try:
        records = run("train")
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert 'oomkit_steps_total{label="train"} 3.0' in text
    assert 'oomkit_ooms_total{label="train"} 1.0' in text
    peak = f'oomkit_peak_allocated_bytes{{label="train"}} {float(records[-1].peak_allocated)}'
    assert peak in text


def test_prometheus_counts_a_call_once_that_is_told_twice() -> None:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    sinks.attach(sinks.Prometheus(registry))
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label="returned")
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).mean()

    loss = loss_of(torch.ones(4, 8))
    with inject_oom(nth=1, phase="backward"):
        loss.backward()
    labels = {"label": "returned"}
    assert registry.get_sample_value("oomkit_steps_total", labels) == 1
    assert registry.get_sample_value("oomkit_ooms_total", labels) == 1


def test_tqdm() -> None:
    from tqdm import tqdm

    stream = io.StringIO()
    with tqdm(total=3, file=stream) as bar:
        sinks.attach(sinks.tqdm_postfix(bar))
        run()
        bar.update(3)
        bar.refresh()
    assert "OOMs=1" in stream.getvalue() and "peak=" in stream.getvalue()


def test_rich() -> None:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(file=io.StringIO(), width=120)
    with Progress(TextColumn("{task.fields[oomkit]}"), console=console) as progress:
        sinks.attach(sinks.Rich(progress, progress.add_task("train", total=3, oomkit="")))
        run()
        progress.refresh()
    assert "OOMs 1" in console.file.getvalue()


def test_all_of_them_at_once_and_one_that_fails(tmp_path: Path) -> None:
    import prometheus_client
    from torch.utils.tensorboard import SummaryWriter

    def broken(record: Any) -> None:
        raise OSError("no space left")

    told: list[int] = []
    path = tmp_path / "steps.jsonl"
    with sinks.JSONL(path) as jsonl, SummaryWriter(str(tmp_path)) as writer:
        sinks.attach(broken)
        for sink in (jsonl, sinks.TensorBoard(writer), sinks.Logging()):
            sinks.attach(sink)
        sinks.attach(sinks.Prometheus(prometheus_client.CollectorRegistry()))
        sinks.attach(lambda record: told.append(record.step))
        with pytest.warns(oomkit.OomkitWarning, match="broken failed .*: OSError: no space left"):
            run()
    assert told == [1, 2, 3]
    assert [json.loads(line)["ooms"] for line in path.read_text().splitlines()] == [0, 1, 0]
    assert os.listdir(tmp_path)
