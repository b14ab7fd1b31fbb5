"""Bodies of loops over chunks() that fail half-way: rows are neither counted twice nor lost.

Each body counts its rows; memory runs out once at one of its calls. Either the loop goes on and
each row is counted once, or the error passes with a note that names the line.
"""

from __future__ import annotations

import collections
import functools
import heapq
import io
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit

ROWS = 12


class Fails:
    """Runs out of memory at one of its calls; gives back what it gets."""

    def __init__(self, at: int = 1) -> None:
        self.at, self.calls = at, 0

    def __call__(self, value: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return value


class Meter:
    def __init__(self) -> None:
        self.rows = 0
        self.seen: list[Any] = []

    def add(self, rows: int) -> None:
        self.rows += rows

    def look(self, rows: Any) -> Any:
        return rows * 2

    def check(self, rows: Any) -> None:
        if len(rows) > ROWS:
            raise ValueError


def scaled(rows: Any) -> Any:
    return rows * 2


def check(rows: Any) -> None:
    assert len(rows) <= ROWS


COUNTED: list[Any] = []


def count(rows: Any) -> None:
    COUNTED.append(len(rows))


HEADER = """
def run(x, fails, label):
    d, l, h, f, n, key = {}, [], [], io.StringIO(), 0, "k"
    l1, out, meter, q = [], {"a": []}, Meter(), collections.deque()
    best = first = None
    hist = np.zeros(64)
    t, u, total, rows_of = torch.zeros(()), torch.zeros(()), 0.0, torch.zeros(12)
    extend, put = l.extend, functools.partial(l.append)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    names = iter(range(100))
    mine, other, view, listed = out, meter, rows_of[:], [0]
    both = (listed,)
    parts = oomkit.chunks(x, label=label)
    for i, part in enumerate(parts):
        with oomkit.guard():
BODY
    return dict(locals())
"""


def run_body(body: str, x: Any, label: str, at: int = 1) -> tuple[Any, Fails]:
    lines = "\n".join(" " * 12 + line for line in body.splitlines())
    names = dict(globals())
    exec(compile(HEADER.replace("BODY", lines), label, "exec"), names)
    fails = Fails(at)
    return names["run"](x, fails, label), fails


TWICE = {
    "setdefault and append": "d.setdefault(key, []).append(part)\nfails()",
    "setdefault with what the part has": "d.setdefault(key, len(part))\nfails()",
    "a comprehension that appends": "[l.append(row) for row in part]\nfails()",
    "a generator that appends": "list(l.append(row) for row in part)\nfails()",
    "a comprehension that fails half-way": "[l.append(fails(row)) for row in part]",
    "map over a method": "list(map(l.append, part))\nfails()",
    "a lambda": "put_in = lambda rows: l.append(rows)\nput_in(part)\nfails()",
    "a function of the body": "def put_in():\n    l.append(part)\nput_in()\nfails()",
    "a partial": "put(part)\nfails()",
    "a bound method that fails half-way": "extend(fails(row) for row in part)",
    "write": "f.write(str(len(part)))\nfails()",
    "write whose result is kept": "size = f.write(str(len(part)))\nfails()",
    "print into a file": "print(len(part), file=f)\nfails()",
    "get and add": "d[key] = d.get(key, 0) + len(part)\nfails()",
    "add to an item": "d[key] = d[key] + 1 if key in d else 1\nfails()",
    "an item by another key": "d[i] = len(part)\nfails()",
    "an item added to in place": "out['a'] += [part]\nfails()",
    "heappush": "heapq.heappush(h, len(part))\nfails()",
    "heappushpop": "least = heapq.heappushpop(h, len(part))\nfails()",
    "a slice behind the end": "l[len(l):] = part.tolist()\nfails()",
    "np.add.at": "np.add.at(hist, part.long().numpy(), 1)\nfails()",
    "an array added to": "hist[part.long().numpy()] += 1\nfails()",
    "torch.add(out=)": "torch.add(t, part.sum(), out=t)\nfails()",
    "np.add(out=)": "np.add(hist, len(part), out=hist)\nfails()",
    "copy_ of itself": "t.copy_(t + part.sum())\nfails()",
    "copy_ of itself by two lines": "s = t + part.sum()\nt.copy_(s)\nfails()",
    "copy_ of a view of itself": "v = t.view(1)\nt.copy_(v[0] + part.sum())\nfails()",
    "two tensors that add": "u.copy_(t + part.sum())\nt.copy_(u)\nfails()",
    "index_put_": "rows_of.index_put_((part.long(),), part, accumulate=True)\nfails()",
    "an item of a tensor": "rows_of[0] = rows_of[0] + len(part)\nfails()",
    "an attribute": "meter.rows = meter.rows + len(part)\nfails()",
    "an attribute added to": "meter.rows += len(part)\nfails()",
    "an attribute's list": "meter.seen.append(part)\nfails()",
    "a method of an object": "meter.add(len(part))\nfails()",
    "setattr": "setattr(meter, 'rows', meter.rows + len(part))\nfails()",
    "a function that counts": "count(part)\nfails()",
    "del": "out['b'] = part\ndel out['b']\ndel out['a']\nfails()",
    "a name by another": "one = total + len(part)\ntotal = one\nfails()",
    "the best of all": "score = part.max().item()\nif best is None or score > best:\n"
    "    best = score\nfails()",
    "the first of all": "if first is None:\n    first = part\nfails()",
    "a deque": "q.appendleft(part)\nfails()",
    "a method by getattr": "getattr(l, 'append')(part)\nfails()",
    "next": "name = next(names)\nfails()",
    "zip with an iterator": "pairs = list(zip(names, part))\nfails()",
    "a loop over an iterator": "for name in names:\n    break\nfails()",
    "an inner loop": "for row in part:\n    l.append(row)\n    fails()",
    "try and except": "try:\n    int('x')\nexcept ValueError:\n    l.append(part)\nfails()",
    "append in a with": "with torch.no_grad():\n    l.append(part)\nfails()",
    "append of an alias": "mine = l\nmine.append(part)\nfails()",
    "append of one of two": "mine = l if part[0] < 0 else l1\nmine.append(part)\nfails()",
    "an item of a new list": "mine = [l]\nmine[0].append(part)\nfails()",
    "an item of a filled list": "mine = []\nmine.append(l)\nmine[0].append(part)\nfails()",
    "a walrus": "[total := total + 1 for _ in part]\nfails()",
    "a finally": "try:\n    fails()\nfinally:\n    total += len(part)",
    "a finally around a with": "try:\n    with torch.no_grad():\n        fails()\n"
    "finally:\n    l.append(part)",
    "an error handler that passes the error on": "try:\n    fails()\n"
    "except RuntimeError as error:\n    meter.rows += 1\n    raise",
    "an error handler that raises the error": "try:\n    fails()\n"
    "except RuntimeError as error:\n    meter.rows += 1\n    raise error",
    "a dictionary by another name": "out['n'] = out.get('n', 0)\nmine['n'] = out['n'] + 1\nfails()",
    "an attribute by another name": "other.rows = meter.rows + len(part)\nfails()",
    "a list in a tuple": "(one,) = both\none[0] = listed[0] + 1\nfails()",
    "a tensor by a view": "rows_of[part.long()] = view[part.long()] + 1\nfails()",
    "np.add with a third argument": "new = np.add(hist, len(part), hist)\nfails()",
    "a list by getattr": "getattr(meter, 'seen').append(part)\nfails()",
    "the longest of some lists": "longest = max([l, l1], key=len)\nlongest.append(part)\nfails()",
    "parameters of a model": "for p in model.parameters():\n    p.data.add_(1)\nfails()",
    "a parameter by its name": "p = model.get_parameter('weight')\np.data += 1\nfails()",
    "a state_dict": "weights = model.state_dict()\nweights['weight'].add_(1)\nfails()",
    "an update whose result is used": "loss = opt.step()\nfails()",
    "a function of many tensors": "torch._foreach_add_([t], 1)\nfails()",
    "an array as a tensor": "shared = torch.from_numpy(hist)\nshared.add_(1)\nfails()",
    "an operator's function": "import operator\noperator.iadd(l, part.tolist())\nfails()",
}


@pytest.mark.parametrize("body", TWICE)
def test_rows_that_would_count_twice_are_not_handed_out_again(
    body: str, request: pytest.FixtureRequest
) -> None:
    at = 3 if "half-way" in body or "inner" in body else 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_body(TWICE[body], torch.arange(float(ROWS)), request.node.name, at)
    assert caught.type is torch.OutOfMemoryError
    note = "".join(caught.value.__notes__)
    assert "in line 1" in note or "in line" in note
    assert "before memory ran out" in note and "oomkit.map()" in note


ONCE = {
    "the result of a method": "l.append(model.weight.detach() * fails(part).sum())",
    "append of a result": "y = scaled(part)\nl.append(fails(y))",
    "append at the end": "y = model(part[:, None])\nfails()\nl.append(y)\ntotal += len(part)",
    "functions of torch": "y = torch.relu(part).softmax(0).argmax(-1)\nfails()\nl.append(y)",
    "in place on what is new": "y = model(part[:, None])\ny.mul_(2)\ny += 1\nfails()",
    "a dictionary that is new": "y = {'a': part}\ny['b'] = scaled(part)\ny.pop('a')\nfails()",
    "a list that is new": "y = []\nfor row in part:\n    y.append(row)\nfails()\nl.extend(y)",
    "lists in a new list": "y = [[] for _ in range(3)]\ny[0].append(1)\nfails()",
    "a comprehension": "y = [row * 2 for row in part]\nfails()\nl.extend(y)",
    "a comprehension that fails": "y = [fails(row) for row in part]\nl.extend(y)",
    "setdefault of an empty list": "d.setdefault(key, []).append(fails(part))",
    "an attribute that is replaced": "meter.last = part\nfails()\nl.append(part)",
    "an item that is replaced": "out['last'] = part\nfails()\nl.append(part)",
    "rows of a tensor": "rows_of[parts.start:parts.stop] = part\nfails()",
    "a tensor that is replaced": "t.copy_(part.sum())\nfails()\nl.append(part)",
    "out= that is replaced": "torch.mul(part.sum(), 2, out=t)\nfails()\nl.append(part)",
    "a method whose result is used": "y = meter.look(part)\nfails()\nl.append(y)",
    "methods and functions that look": "meter.check(part)\ncheck(part)\nfails()",
    "contexts": "with torch.no_grad(), torch.autocast('cpu'):\n    y = model(part[:, None])\n"
    "    fails()\nl.append(y)",
    "lines for people": "print('part', i)\nlogging.getLogger('x').info('a')\nfails()",
    "a branch that is not taken": "if part[0] < 0:\n    l.append(part)\n    total += 1\nelse:\n"
    "    fails()",
    "asserts and lookups": "assert len(part) == parts.stop - parts.start\ny = out['a']\n"
    "n = len(l) + len(d.get(key, ()))\nfails()",
    "parameters that are looked at": "n = sum(p.numel() for p in model.parameters())\n"
    "for p in model.parameters():\n    p.requires_grad_(False)\nfails()\nl.append(part)",
    "the larger of two numbers": "best = max(part.max().item(), 0)\nfails(best)\nl.append(part)",
    "an attribute by getattr": "y = getattr(model, 'weight').sum() + part\nfails()\nl.append(y)",
    "module in evaluation": "model.eval()\nmodel.requires_grad_(False)\nfails()",
    "numpy": "y = part.numpy().copy()\ny[0] = 1\nz = np.concatenate([y, y]).sum()\nfails()",
    "try and except": "try:\n    y = int('x')\nexcept ValueError:\n    y = 1\nfails()",
    "a finally": "try:\n    y = scaled(part)\n    fails()\nfinally:\n    y = None",
    "a handler of another error": "try:\n    fails()\nexcept ValueError:\n    total += 1",
    "np.add with a third argument": "new = np.add(part.sum().numpy(), 1, hist)\nfails()",
    "another key by another name": "mine['b'] = out['a']\nfails()",
    "a lambda": "take = lambda rows: rows * 2\ny = take(part)\nfails()\nl.append(y)",
    "a list that a loop fills": "y = []\nfor row in part:\n    y.append([row, l])\n"
    "    y.append(row)\nfails()",
    "sorted": "y = sorted(part.tolist(), key=lambda row: -row)\nfails()\nl.append(y)",
}


@pytest.mark.parametrize("body", ONCE)
def test_what_leaves_nothing_is_handed_out_again(body: str, request: pytest.FixtureRequest) -> None:
    names, fails = run_body(ONCE[body], torch.arange(float(ROWS)), request.node.name)
    assert fails.calls > 1
    for result in (names["l"], names["out"]["a"]):
        assert sum(
            len(part) if hasattr(part, "shape") and part.dim() else 1 for part in result
        ) in (
            0,
            2,
            ROWS,
        )


def test_the_note_names_the_line_and_what_to_do(request: pytest.FixtureRequest) -> None:
    def run() -> None:
        fails, lines = Fails(), io.StringIO()
        for part in oomkit.chunks(torch.arange(4.0), label=request.node.name):
            with oomkit.guard():
                lines.write(str(part))
                fails()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    line = run.__code__.co_firstlineno + 4
    assert f"`lines.write()` in line {line} may have run" in "".join(caught.value.__notes__)


def test_objects_of_participants_go_back(request: pytest.FixtureRequest) -> None:
    class Metric(Meter):
        def state_dict(self) -> dict[str, Any]:
            return {"rows": self.rows}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows = state["rows"]

    metric, fails = Metric(), Fails()
    for part in oomkit.chunks(torch.zeros(ROWS), label=request.node.name, participants=metric):
        with oomkit.guard():
            metric.add(len(part))
            metric.rows += 0
            fails()
    assert metric.rows == ROWS and fails.calls == 3


def test_a_generator_that_hands_out_before_it_fails(request: pytest.FixtureRequest) -> None:
    def results() -> Any:
        fails = Fails()
        for part in oomkit.chunks(torch.zeros(ROWS), label=request.node.name):
            with oomkit.guard():
                yield part
                fails()

    got = []
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        for part in results():
            got.append(part)
    assert [len(part) for part in got] == [ROWS]


def test_a_module_level_loop(request: pytest.FixtureRequest) -> None:
    lines = [
        "for part in oomkit.chunks(x, label=label):",
        "    with oomkit.guard():",
        "        seen.append(part)",
        "        fails()",
    ]
    names: dict[str, Any] = {"oomkit": oomkit, "x": torch.zeros(ROWS), "fails": Fails()}
    names |= {"label": request.node.name, "seen": []}
    with pytest.raises(torch.OutOfMemoryError):
        exec(compile("\n".join(lines), "module", "exec"), names)
    assert len(names["seen"]) == 1


USED = (collections, functools, heapq, logging, np, nn, count)  # by the bodies
