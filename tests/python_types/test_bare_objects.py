"""Objects of our types that nobody initialised, and live ones in the hands of the interpreter:
an answer or an exception, never a crash."""

from __future__ import annotations

import copy
import copyreg
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.leak_uses import KINDS as TYPES
from nomemory.fork import CALM, apart
from torch import nn

import oomkit
from oomkit import _C

STATE = Path(__file__).resolve().parents[2] / "csrc" / "py" / "state.h"
KINDS = {f"{number} {kind.__qualname__}": kind for number, kind in enumerate(TYPES)}

USES: dict[str, Callable[[Any], object]] = {
    "repr": repr,
    "str": str,
    "hash": hash,
    "bool": bool,
    "call": lambda o: o(),
    "call with arguments": lambda o: o(1, torch.zeros(2), key=o),
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
    "reduce": lambda o: o.__reduce_ex__(2),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "weakref": lambda o: weakref.ref(o)(),
    "compare": lambda o: (o == o, o != 1),
    "order": lambda o: o < o,
    "get": lambda o: type(o).__get__(o, object(), object),
    "set attribute": lambda o: setattr(o, "anything", o),
    "dictionary": lambda o: (vars(o), dir(o)),
    "clear dictionary": lambda o: vars(o).clear(),
    "enter": lambda o: o.__enter__(),
    "exit": lambda o: o.__exit__(None, None, None),
    "exit with an error": lambda o: o.__exit__(ValueError, ValueError(), None),
    "iterate": lambda o: list(o),
    "initialise": lambda o: (o.__init__(), o.__init__(1)),
    "new class": lambda o: setattr(o, "__class__", object),
    "traverse": lambda o: (gc.get_referents(o), gc.is_tracked(o), gc.collect()),
    "cycle": lambda o: (setattr(o, "own", [o]), gc.collect()),
    "size": lambda o: o.__sizeof__(),
}


def _attributes(thing: Any) -> Iterator[tuple[str, Callable[[Any], object]]]:
    for name in set(dir(type(thing))) - set(dir(object)):
        yield f"read {name}", lambda o, name=name: getattr(o, name)
        yield f"delete {name}", lambda o, name=name: delattr(o, name)
        if not name.startswith("__"):
            yield f"call {name}", lambda o, name=name: getattr(o, name)()


def run_all(make: Callable[[], Any]) -> list[str]:
    """Everything of the above, each with an object of its own. What is no Exception is wrong:
    SystemError says that a slot returned nothing and set nothing."""
    wrong = []
    for name, use in [*USES.items(), *_attributes(make())]:
        try:
            use(make())
        except SystemError as error:
            wrong.append(f"{name}: {error}")
        except Exception:
            pass
    gc.collect()
    return wrong


def bare(kind: type) -> list[str]:
    """Each way to an object that no constructor of ours has made."""
    gc.freeze()  # each collection looks at what is made here only
    wrong = []
    ways: list[Callable[[], Any]] = [
        lambda: kind.__new__(kind),
        lambda: object.__new__(kind),
        lambda: kind.__base__.__new__(kind),
        lambda: kind.__new__(kind, None),
        lambda: kind.__new__(kind, ()),
        lambda: kind.__new__(type("Sub", (kind,), {})),
        lambda: type("Sub", (kind,), {"__slots__": ()})(),
        lambda: copyreg.__newobj__(kind),
        lambda: kind.__new__(int),
        lambda: kind.__new__(),
    ]
    for number, way in enumerate(ways):
        try:
            thing = way()
        except SystemError as error:
            wrong.append(f"way {number}: {error}")
        except Exception as error:
            if type(error) not in (TypeError, ValueError):
                wrong.append(f"way {number}: {error!r}")
        else:
            del thing
            wrong += [f"way {number}: {line}" for line in run_all(way)]
    return wrong


@pytest.mark.parametrize("name", KINDS)
def test_bare_objects_do_no_harm(name: str) -> None:
    answer = apart(lambda: bare(KINDS[name]), CALM)
    assert (answer.died, answer.value) == ("", [])


def _interceptor() -> Any:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    @oomkit.auto_batch(model=model, optimizer=optimizer)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        kept.append(optimizer.step)
        optimizer.step()

    step(torch.zeros(2, 2))
    return kept[0]


def _pending() -> Any:
    model = nn.Linear(2, 2)
    loss = oomkit.auto_batch(lambda x: model(x).mean())(torch.zeros(2, 2))
    return loss.grad_fn.metadata["oomkit"]


def _split_pending() -> Any:
    model = nn.Linear(2, 2)
    with oomkit.testing.force_slices([1, 1]):
        loss = oomkit.auto_batch(lambda x: model(x).mean(), verify=False)(torch.zeros(2, 2))
    return loss.grad_fn.metadata["oomkit"]


def _backward() -> Any:
    oomkit.auto_batch(lambda x: x)(torch.zeros(2, 2))
    return torch.autograd.backward


def _bound() -> Any:
    class Model(nn.Module):
        @oomkit.auto_batch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Model().forward


def _report() -> Any:
    step, x = oomkit.auto_batch(lambda x: x + 1), torch.zeros(2)
    with oomkit.testing.inject_oom(times=None):
        try:
            step(x)
        except oomkit.OutOfMemory as error:
            return error.report


def _record() -> Any:
    with oomkit.guard() as guard:
        pass
    return guard.records[-1]


def _chunks() -> Any:
    parts = oomkit.chunks(torch.zeros(4, 2), label="live")
    next(parts)
    return parts


LIVE: dict[str, Callable[[], Any]] = {
    "chunks": _chunks,
    "chunks not begun": lambda: oomkit.chunks(torch.zeros(4, 2), label="live"),
    "step": lambda: oomkit.auto_batch(lambda x: x),
    "step of a module": lambda: oomkit.auto_batch(nn.Linear(2, 2)),
    "bound step": _bound,
    "guard": lambda: oomkit.guard(),
    "guarded": lambda: oomkit.guard()(lambda: 1),
    "guarded module": lambda: oomkit.guard()(nn.Linear(2, 2)),
    "interceptor": _interceptor,
    "pending": _pending,
    "split pending": _split_pending,
    "backward": _backward,
    "current": oomkit.current,
    "record": _record,
    "report": _report,
    "error": lambda: oomkit.OutOfMemory("text"),
}


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("name", LIVE)
def test_live_objects_do_no_harm(name: str) -> None:
    def work() -> tuple[str, list[str]]:
        gc.freeze()
        thing = LIVE[name]()
        kind = f"{type(thing).__module__}.{type(thing).__name__}"
        del thing
        return kind, run_all(LIVE[name])

    answer = apart(work, CALM)
    assert answer.died == ""
    kind, wrong = answer.value
    assert kind.startswith("oomkit.")
    assert wrong == []


def test_every_type_is_among_them() -> None:
    """state.h's list; _NodeHook is only ever one of a graph's node."""
    listed = re.search(r"OOMKIT_STATE_TYPES\(X\)(.*?)\n\n", STATE.read_text(), re.S)
    assert listed is not None
    fields = re.findall(r"X\((\w+)\)", listed.group(1))
    assert len(KINDS) == len(fields), (sorted(KINDS), fields)


def test_the_bridge_has_no_types() -> None:
    from oomkit import _bridge

    assert sorted(k for k in vars(_bridge) if not k.startswith("__")) == ["api", "torch_version"]
    assert not [v for v in vars(_bridge).values() if isinstance(v, type)]


def test_a_crash_would_be_seen() -> None:
    import ctypes

    def crash() -> None:
        ctypes.string_at(0)

    assert apart(crash).died.startswith("SIGSEGV")
    assert apart(lambda: 1 / 0).died.startswith("exit 1")
    assert _C is oomkit._C
