"""The plain attributes of modules, as C finds them for the look at side effects."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from oomkit import _C
from oomkit._code import objects
from oomkit._code import side_effects as effects


class Model(nn.Module):
    """Attributes of every kind that is recorded, and of some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.share, self.name, self.flag = 3, 0.5, "a", True
        self.nothing, self.raw, self.turn = None, b"ab", 1j
        self.items, self.table, self.names = [1, 2], {"a": 1}, {"a", "b"}
        self.ordered, self.other = collections.OrderedDict(a=1), object()
        self.tensor, self.weight = torch.ones(3), nn.Parameter(torch.ones(1))
        self.register_buffer("buffer", torch.ones(2))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Dropout()))
        self.again = self.inner
        self.register_module("missing", None)


class Slotted(Model):
    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot = 4


class Hiding(nn.Module):
    """Does not name what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield "", self


class Ordered(nn.Module):
    """Keeps its modules in a mapping of its own, as a scripted one does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 2
        self.__dict__["_modules"] = collections.OrderedDict(inner=nn.Linear(2, 2))


def _hiding_itself() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.named_modules = lambda *_, **__: iter([("", model)])  # type: ignore[method-assign]
    return model


def _found(how: str, model: nn.Module, skip: set[int], path: str = "model") -> dict[str, object]:
    scan = effects._Scan(skip)
    getattr(scan, how)(path, model)
    return scan.found


def _layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Conv1d(1, 1, 1) for _ in range(count)))


@pytest.mark.parametrize(
    ("model", "odd"),
    [
        (Model(), False),
        (nn.Sequential(Model(), Model(), nn.ModuleDict({"a": Model()})), False),
        (_layers(200), False),
        (nn.Sequential(_layers(70), Model()), False),
        (Slotted(), True),
        (nn.Sequential(nn.Linear(1, 1), Slotted()), True),
        (nn.Sequential(nn.Linear(1, 1), Hiding()), True),
        (Ordered(), True),
        (nn.Sequential(nn.Linear(1, 1), _hiding_itself()), True),
    ],
    ids=[
        "model",
        "nested",
        "layers",
        "more",
        "slots",
        "slots inside",
        "hiding",
        "ordered",
        "itself",
    ],
)
def test_c_finds_what_python_finds(model: nn.Module, odd: bool) -> None:
    listed = getattr(model, "items", None)
    skip = set() if listed is None else {id(listed)}
    for left_out in (set(), skip):
        scanned, walked = (_found(how, model, left_out) for how in ("module", "odd_module"))
        assert set(scanned) == set(walked)
        assert not [at for at in scanned if effects._difference(walked[at], scanned[at])]
        assert type(model) is not Model or ("model.items" in scanned) == (not left_out)
    found: dict[str, object] = {}
    assert _scan(model, found) != odd
    assert not (odd and found)


def _scan(
    model: object,
    found: dict[str, object],
    slots_of: Any = objects.slots_of,
    length: Any = effects._Length,
    mark: Any = effects.TensorMark,
    limits: tuple[int, int] = (64, 400),
) -> bool:
    own = objects.MODULE_OWN
    return _C._scan_modules("m", model, found, own, set(), slots_of, length, mark, *limits)


def test_tensors_of_the_model_itself_come_in_their_turn() -> None:
    """Those of modules inside are passed over; many plain attributes push out none of its own."""
    model = nn.Sequential(Model(), _layers(62))
    for number in range(120):
        setattr(model, f"plain{number}", number)
    model.tensor = torch.ones(1)
    found: dict[str, object] = {}
    assert _scan(model, found)
    assert len(found) == 400
    assert [at for at, kept in found.items() if isinstance(kept, effects.TensorMark)] == [
        "m.tensor"
    ]
    assert found.keys() == _found("odd_module", model, set(), "m").keys()


def test_no_more_is_looked_at_than_was_said() -> None:
    found: dict[str, object] = {}
    _scan(_layers(10), found, limits=(3, 400))
    assert {at.split(".")[1] for at in found} == {"0", "1"}, "the first is the model itself"
    found.clear()
    _scan(_layers(10), found, limits=(64, 5))
    assert len(found) == 5


def test_what_python_raises_comes_out_and_what_is_no_module_is_left_to_it() -> None:
    def broken(*_: object) -> Any:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        _scan(Model(), {}, slots_of=broken)
    with pytest.raises(ValueError, match="planted"):
        _scan(Model(), {}, length=broken)
    with pytest.raises(ValueError, match="planted"):
        _scan(Model(), {}, mark=broken)
    assert not _scan(object(), {})
    with pytest.raises(TypeError):
        _C._scan_modules("m", Model())  # type: ignore[call-arg]


def test_a_model_that_is_in_itself_is_looked_at_once() -> None:
    model = Model()
    model.myself = model
    found: dict[str, object] = {}
    assert _scan(model, found)
    assert "m.count" in found
    assert not [at for at in found if "myself" in at]
