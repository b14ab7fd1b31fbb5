"""report(), its helpers, the sinks and `python -m oomkit report`."""

import io
import json
import sys
import types
from pathlib import Path

import pytest
from helpers.messages import message_of
from helpers.own_process import run_module, run_program

import oomkit
from oomkit import __main__ as program
from oomkit import sinks
from oomkit.report import format_bytes, format_seconds, record_dict

GIB = 2**30
VALUES = {
    "step": 1,
    "label": "train_step",
    "batch_size": 32,
    "micro_batch_size": 8,
    "accumulation_steps": 4,
    "attempts": 3,
    "ooms": 2,
    "requested_bytes": 2**20,
    "baseline": 0,
    "peak_allocated": 3 * GIB,
    "peak_reserved": None,
    "device_free": None,
    "budget": 4 * GIB,
    "started": 100.0,
    "time": 1.5,
    "time_lost": 0.25,
    "rung": 0,
    "reason": "oom",
    "outcome": "finished",
    "phases": None,
    "rank": None,
}


def record(**changes):
    values = {**VALUES, **changes}
    return oomkit.StepRecord(values[name] for name in oomkit.StepRecord.__match_args__)


RECORDS = [
    record(),
    record(
        step=2,
        ooms=0,
        attempts=1,
        started=101.0,
        peak_allocated=None,
        budget=None,
        time=0.002,
        time_lost=0.0,
    ),
    record(label=None, batch_size=None, micro_batch_size=None, ooms=1, started=99.0),
]

TEXT = """\
label       steps  OOMs  retries  plan changes  peak p50       p95       max  time p50     p95     max  time lost
----------  -----  ----  -------  ------------  --------  --------  --------  --------  ------  ------  ---------
train_step      2     2        2             0  3.00 GiB  3.00 GiB  3.00 GiB   2.00 ms  1.50 s  1.50 s  250.00 ms
(no label)      1     1        2             0  3.00 GiB  3.00 GiB  3.00 GiB    1.50 s  1.50 s  1.50 s  250.00 ms

events
label       step  batch  micro-batch  accumulation steps  peak allocated    budget  OOMs    time  time lost  reason
----------  ----  -----  -----------  ------------------  --------------  --------  ----  ------  ---------  ------
(no label)     1      -            -                   4        3.00 GiB  4.00 GiB     1  1.50 s  250.00 ms     oom
train_step     1     32            8                   4        3.00 GiB  4.00 GiB     2  1.50 s  250.00 ms     oom

the last 3 steps
label       step  batch  micro-batch  accumulation steps  peak allocated    budget  OOMs     time  time lost  reason
----------  ----  -----  -----------  ------------------  --------------  --------  ----  -------  ---------  ------
(no label)     1      -            -                   4        3.00 GiB  4.00 GiB     1   1.50 s  250.00 ms     oom
train_step     1     32            8                   4        3.00 GiB  4.00 GiB     2   1.50 s  250.00 ms     oom
train_step     2     32            8                   4               -         -     0  2.00 ms        0 s     oom"""  # noqa: E501

ALL = """\
train_step: 2 steps, 2 OOMs, highest peak 3.00 GiB, time lost 250.00 ms
step  batch  micro-batch  accumulation steps  peak allocated    budget  OOMs     time  time lost  reason
----  -----  -----------  ------------------  --------------  --------  ----  -------  ---------  ------
   1     32            8                   4        3.00 GiB  4.00 GiB     2   1.50 s  250.00 ms     oom
   2     32            8                   4               -         -     0  2.00 ms        0 s     oom

(no label): 1 step, 1 OOM, highest peak 3.00 GiB, time lost 250.00 ms
step  batch  micro-batch  accumulation steps  peak allocated    budget  OOMs    time  time lost  reason
----  -----  -----------  ------------------  --------------  --------  ----  ------  ---------  ------
   1      -            -                   4        3.00 GiB  4.00 GiB     1  1.50 s  250.00 ms     oom"""  # noqa: E501

MARKDOWN = """\
### train_step: 1 step, 2 OOMs, highest peak 3.00 GiB, time lost 250.00 ms

| step | batch | micro-batch | accumulation steps | peak allocated | budget | OOMs | time | time lost | reason |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 32 | 8 | 4 | 3.00 GiB | 4.00 GiB | 2 | 1.50 s | 250.00 ms | oom |"""  # noqa: E501


# --- the three formats ---


def test_fields_of_a_record():
    assert list(oomkit.StepRecord.__match_args__) == list(VALUES)
    assert record_dict(record()) == VALUES


def test_text():
    assert oomkit.report(RECORDS) == TEXT
    assert oomkit.report(RECORDS, all=True) == ALL


def test_markdown():
    assert oomkit.report(RECORDS[0], "markdown", all=True) == MARKDOWN
    assert oomkit.report(RECORDS[0], "markdown").startswith("| label | steps | OOMs |")


def test_json_has_bytes_and_seconds():
    (site, other) = json.loads(oomkit.report(RECORDS, format="json"))["sites"]
    assert site["label"] == "train_step"
    assert site["records"][0] == VALUES
    assert site["summary"] == {
        "steps": 2,
        "ooms": 2,
        "retries": 2,
        "plan_changes": 0,
        "unfinished": 0,
        "time": 1.502,
        "time_lost": 0.25,
        "time_p50": 0.002,
        "time_p95": 1.5,
        "time_max": 1.5,
        "peak_p50": 3 * GIB,
        "peak_p95": 3 * GIB,
        "peak_allocated": 3 * GIB,
        "peak_reserved": None,
    }
    assert other["records"][0]["batch_size"] is None


@pytest.mark.parametrize(
    ("format", "text"),
    [("text", "no records"), ("markdown", "no records"), ("json", '{\n "sites": []\n}')],
)
def test_without_records(format, text):
    assert oomkit.report([], format) == text


def test_over_what_has_records():
    guard = oomkit.guard(label="evaluation")
    with guard:
        pass

    @oomkit.auto_batch(label="live step")
    def step(batch):
        return None

    step([1, 2])
    assert "evaluation: 1 step, 0 OOMs, " in oomkit.report(guard, all=True)
    lines = oomkit.report([step, guard]).splitlines()[2:4]
    assert [line.split("  ")[0] for line in lines] == ["live step", "evaluation"]
    assert "live step: 1 step, " in oomkit.report(all=True)


@pytest.mark.parametrize("kind", [str, Path])
def test_to_a_path(tmp_path, kind):
    path = tmp_path / "report.txt"
    assert oomkit.report(RECORDS, file=kind(path)) == TEXT
    assert path.read_text() == TEXT + "\n"


def test_to_a_stream():
    stream = io.StringIO()
    oomkit.report(RECORDS, file=stream)
    assert stream.getvalue() == TEXT + "\n"


@pytest.mark.parametrize("format", ["html", None, 3])
def test_unknown_format(format):
    with pytest.raises(ValueError) as caught:
        oomkit.report(RECORDS, format)
    assert message_of(caught.value) == (
        f"report() expected format to be 'text', 'markdown' or 'json', got {format!r}"
    )


@pytest.mark.parametrize(("steps", "got"), [(3, "int"), ("text", "str"), ([object()], "object")])
def test_not_a_step(steps, got):
    with pytest.raises(TypeError) as caught:
        oomkit.report(steps)
    assert message_of(caught.value) == (
        f"report() expected decorated steps, guards or StepRecords, got '{got}'"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (GIB, "1.00 GiB"),
        (5000 * GIB, "5000.00 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (75.0, "75.00 s"),
        (0.0125, "12.50 ms"),
        (3.1e-6, "3.10 us"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


# --- sinks ---


class Recorder:
    """Notes every call of every method."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


FIGURES = {
    "oomkit/train_step/micro_batch_size": 8,
    "oomkit/train_step/accumulation_steps": 4,
    "oomkit/train_step/ooms": 2,
    "oomkit/train_step/peak_allocated": 3 * GIB,
    "oomkit/train_step/budget": 4 * GIB,
    "oomkit/train_step/time": 1.5,
    "oomkit/train_step/time_lost": 0.25,
    "oomkit/train_step/headroom": GIB,
}


def test_jsonl(tmp_path):
    path = tmp_path / "steps.jsonl"
    with sinks.JSONL(path) as sink:
        sink(RECORDS[0])
        assert json.loads(path.read_text()) == VALUES  # written at once
        sink(RECORDS[1])
    with sinks.JSONL(str(path)) as sink:
        sink(RECORDS[2])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 1]


def test_tensorboard():
    writer = Recorder()
    sinks.TensorBoard(writer)(record(step=7))
    assert writer.calls == [
        ("add_scalar", (name, value), {"global_step": 7}) for name, value in FIGURES.items()
    ]


def test_wandb_leaves_the_runs_step_alone():
    run = Recorder()
    sinks.WandB(run)(record())
    assert run.calls == [("log", (FIGURES,), {"commit": False})]


def test_mlflow():
    client = Recorder()
    sinks.MLflow(client, prefix="gpu0")(record(step=7, label="f.<locals>.step"))
    ((name, (metrics,), options),) = client.calls
    assert (name, options) == ("log_metrics", {"step": 7})
    assert metrics["gpu0/f._locals_.step/ooms"] == 2


def test_prometheus(monkeypatch):
    made = {}

    class Metric:
        def __init__(self, name, help, *, labelnames, registry):
            assert (labelnames, registry) == (("label",), "mine")
            self.value = 0
            made[name] = self

        def labels(self, label):
            assert label == "train_step"
            return self

        def inc(self, amount=1):
            self.value += amount

        def set(self, value):
            self.value = value

    module = types.SimpleNamespace(Counter=Metric, Gauge=Metric)
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    sink = sinks.Prometheus("mine")
    sink(record())
    sink(record(step=2, peak_allocated=GIB, budget=None))
    assert {name: metric.value for name, metric in made.items()} == {
        "oomkit_steps": 2,
        "oomkit_ooms": 4,
        "oomkit_time_lost_seconds": 0.5,
        "oomkit_micro_batch_rows": 8,
        "oomkit_accumulation_steps": 4,
        "oomkit_peak_allocated_bytes": GIB,
        "oomkit_budget_bytes": 4 * GIB,
    }


def test_tqdm_postfix_counts_ooms():
    bar = Recorder()
    sink = sinks.tqdm_postfix(bar)
    sink(record())
    sink(record(ooms=1, micro_batch_size=None, peak_allocated=None))
    assert [args[0] for _, args, _ in bar.calls] == [
        {"micro_batch": 8, "peak": "3.00 GiB", "OOMs": 2},
        {"micro_batch": "-", "peak": "-", "OOMs": 3},
    ]


def test_sinks_import_no_tracker():
    code = """
import sys
import torch
before = set(sys.modules)
import oomkit.sinks
new = set(sys.modules) - before
print(sorted({"tensorboard", "wandb", "mlflow", "prometheus_client", "tqdm"} & new))
"""
    shown = run_program(code, cwd=Path(oomkit.__file__).parents[1])
    assert shown.stdout == "[]\n", shown.stderr


# --- python -m oomkit report ---


@pytest.fixture
def steps_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    with sinks.JSONL(path) as sink:
        for item in RECORDS:
            sink(item)
    return path


def test_report_of_a_file(steps_file, capsys):
    assert program.main(["report", str(steps_file)]) == 0
    assert capsys.readouterr().out == TEXT + "\n"


def test_report_of_a_file_as_json(steps_file, capsys):
    assert program.main(["report", str(steps_file), "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 2


def test_as_a_program(steps_file):
    root = Path(oomkit.__file__).parents[1]
    shown = run_module("oomkit", "report", str(steps_file), cwd=root)
    assert (shown.returncode, shown.stdout) == (0, TEXT + "\n")


def test_picture(steps_file, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.png"
    assert program.main(["report", str(steps_file), "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(steps_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert program.main(["report", str(steps_file), "--png", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err == "oomkit: --png needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "line 1: not a step record"),
        ("\nnot json\n", "line 2: not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("3\n", "line 1: not a step record"),
    ],
)
def test_not_a_file_of_records(tmp_path, capsys, text, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    assert program.main(["report", str(path)]) == 1
    assert capsys.readouterr().err == f"oomkit: {path}, {message}\n"


def test_file_is_not_there(tmp_path, capsys):
    assert program.main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"oomkit: there is no file {tmp_path / 'none'}\n"


def test_nothing_to_draw(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    path.touch()
    assert program.main(["report", str(path), "--png", str(tmp_path / "x.png")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "no records\n"
    assert captured.err == f"oomkit: {path} has no records to draw\n"
