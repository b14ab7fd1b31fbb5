"""`python -m oomkit`: env, run and check. (report: test_report.py)"""

import gc
import json
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch

import oomkit
from oomkit import __main__


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """What `python -m oomkit` does over a file with this text, in this process."""

    def run(*arguments, text=""):
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        status = __main__.main([str(argument) for argument in arguments])
        return Done(status, *capsys.readouterr())

    gc.collect()
    oomkit.reset_report()
    yield run
    oomkit.limit_memory(None, device="cpu")


def test_env(program):
    done = program("env")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["oomkit"] == oomkit.__version__ and lines["torch"] == torch.__version__
    assert lines["device cpu"].strip().startswith("<oomkit.Budget")
    assert "bridge" in lines and "Python" in lines


def test_a_script_without_oomkit(program, tmp_path):
    text = """
    import sys, torch
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(int(sys.argv[1])):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    print(__name__, sys.argv[1:])
    """
    out = tmp_path / "steps.jsonl"
    done = program("run", "--records", out, tmp_path / "script.py", "5", "--flag", text=text)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['5', '--flag']\n"
    assert done.stderr.startswith("label") and "between updates      6" in done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["peak_allocated"] > 0 for row in rows)


def test_a_script_that_dies_has_a_report_too(program, tmp_path):
    text = """
    import torch, oomkit
    oomkit.limit_memory(2**40, device="cpu")
    oomkit.limit_memory(oomkit.memory("cpu").allocated + 2**21, device="cpu")
    def grow(kept=[]):
        while True:
            kept.append(torch.ones(2**18, dtype=torch.uint8))
    grow()
    """
    done = program("run", tmp_path / "script.py", text=text)
    assert done.returncode == 1
    head, _, rest = done.stderr.partition("torch.OutOfMemoryError: ")
    assert "Traceback (most recent call last)" in head
    assert "in grow" in head and "runpy" not in head
    assert "between updates      1     1" in rest


@pytest.mark.parametrize(
    ("last", "status"),
    [("raise SystemExit(7)", 7), ("raise SystemExit('bye')", 1), ("raise SystemExit", 0)],
)
def test_its_exit_status_stays(program, tmp_path, last, status):
    done = program("run", tmp_path / "script.py", text=last)
    assert done.returncode == status
    assert ("bye" in done.stderr) == ("bye" in last)


def test_a_script_with_decorated_steps(program, tmp_path):
    text = """
    import torch, oomkit
    weight = torch.nn.Parameter(torch.ones(8))
    @oomkit.auto_batch(label="mine")
    def step(x):
        (weight * x).mean().backward()
    step(torch.ones(4, 8))
    """
    done = program("run", tmp_path / "script.py", text=text)
    assert "mine" in done.stderr and "between updates" not in done.stderr


STEP = """
    import torch
    model = torch.nn.Linear(4, 2)
    def step(x):
        model.zero_grad()
        model(x).{0}().backward()
    def case():
        return step, torch.randn(6, 4)
    """


@pytest.mark.parametrize(("loss", "status"), [("mean", 0), ("sum", 1)])
def test_check(program, tmp_path, loss, status):
    done = program("check", f"{tmp_path / 'script.py'}:case", text=STEP.format(loss))
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith("batch") and "6 rows" in done.stdout


@pytest.mark.parametrize("target", ["script.py", "{}:other"])
def test_check_of_nothing(program, tmp_path, target):
    done = program("check", target.format(tmp_path / "script.py"), text="")
    assert done.returncode == 2 and done.stderr.startswith("oomkit: ")


@pytest.mark.parametrize(("budget", "status"), [("1GiB", 0), ("100B", 1), (None, 0)])
def test_estimate(program, tmp_path, budget, status):
    more = () if budget is None else ("--budget", budget)
    target = f"{tmp_path / 'script.py'}:case"
    done = program("estimate", target, *more, text=STEP.format("mean"))
    assert done.returncode == status, done.stderr
    assert "each row" in done.stdout
    assert (budget is None) == ("at once" not in done.stdout)


def test_a_budget_that_is_no_size(program, tmp_path):
    target = f"{tmp_path / 'script.py'}:case"
    done = program("estimate", target, "--budget", "nonsense", text=STEP.format("mean"))
    assert done.returncode == 2
    assert done.stderr.startswith("oomkit: ") and "'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "check", "estimate", "report"])
def test_a_file_that_is_not_there(program, tmp_path, command):
    target = tmp_path / "none.py"
    done = program(command, target if command in ("run", "report") else f"{target}:make")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"oomkit: there is no file {target}\n"


@pytest.mark.parametrize("command", ["check", "estimate"])
@pytest.mark.parametrize(
    ("text", "said", "status"),
    [
        ("def case(: pass", "does not run: SyntaxError", 2),
        ("\nraise OSError('no data')", "does not run: OSError at {}:2: no data", 2),
        ("def case():\n  raise KeyError('w')", "but it raised KeyError at {}:2: 'w'", 2),
        ("def case(): pass", "but it returned 'NoneType'", 2),
        ("def case(): return ()", "but it returned an empty tuple", 2),
        ("def case(): return 1, 2", "but it returned a tuple whose first element is 'int'", 2),
        ("def step(x): return x.no\ndef case(): return step, 7", None, 1),
    ],
)
def test_a_case_that_cannot_be_made(program, tmp_path, command, text, said, status):
    path = tmp_path / "script.py"
    done = program(command, f"{path}:case", text=text)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("oomkit: ") and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if said is not None:
        assert said.format(path) in done.stderr


def test_an_error_of_the_step_is_told(program, tmp_path):
    text = "def step(x): return x.no\ndef case(): return step, __import__('torch').ones(4)"
    done = program("check", f"{tmp_path / 'script.py'}:case", text=text)
    assert done.returncode == 1
    line = f"oomkit: the step raised AttributeError at {tmp_path / 'script.py'}:1: "
    assert done.stderr.startswith(line) and "Traceback" not in done.stderr
