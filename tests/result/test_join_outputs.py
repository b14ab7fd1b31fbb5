"""Results that are objects with parts come back as their own type, without their __init__."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import logging
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch

import oomkit
from oomkit.testing import force_slices

ROWS = 7


def rows_of(x, *, grad=False):
    return (x * 2 + 1) if grad else (x * 2 + 1).detach()


def split(step, batch=None, lengths=(3, 2, 2), **options):
    batch = torch.arange(float(ROWS), dtype=torch.float64)[:, None] if batch is None else batch
    with force_slices(lengths):
        return oomkit.auto_batch(step, label="step", **options)(batch)


def whole_and_split(step, **options):
    batch = torch.arange(float(ROWS), dtype=torch.float64)[:, None]
    return step(batch), split(step, batch, **options)


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    loss: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    square: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "square", self.logits**2)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    logits: torch.Tensor
    name: str = "slotted"


@dataclasses.dataclass
class Picky:
    """An __init__ that can only be used once."""

    logits: torch.Tensor
    made: dataclasses.InitVar[list[int]]

    def __post_init__(self, made):
        made.append(len(self.logits))
        if len(self.logits) not in (3, 2):
            raise ValueError("not from outside")
        self.extra = self.logits + 1  # no field


class Pair(NamedTuple):
    logits: torch.Tensor
    epoch: int


class AttrDict(dict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Strict(collections.OrderedDict):
    """Needs an argument, and changes what is set and read."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def __setitem__(self, key, value):
        raise TypeError("read-only")

    def __getitem__(self, key):
        return list(self.values())[key]


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As transformers' ModelOutput: entries are attributes, None is left out."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Any = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __delitem__(self, key):
        raise TypeError("no deleting")

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


# --- data classes ---


def test_a_data_class():
    whole, got = whole_and_split(lambda x: Plain(rows_of(x), x.mean()))
    assert type(got) is Plain
    assert torch.equal(got.logits, whole.logits) and got.loss.item() == pytest.approx(3.0)


def test_a_frozen_one_with_a_field_that_init_does_not_take():
    whole, got = whole_and_split(lambda x: Frozen(rows_of(x)))
    assert type(got) is Frozen and got.logits.shape == (ROWS, 1)
    assert torch.equal(got.square, whole.square)
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.logits = None


def test_one_with_slots():
    whole, got = whole_and_split(lambda x: Slotted(rows_of(x)))
    assert type(got) is Slotted and got.name == "slotted"
    assert torch.equal(got.logits, whole.logits)


def test_init_runs_for_the_micro_batches_alone():
    made = []
    got = split(lambda x: Picky(rows_of(x), made))
    assert made == [3, 2, 2] and type(got) is Picky
    assert torch.equal(got.extra, got.logits + 1) and got.extra.shape == (ROWS, 1)


def test_what_differs_is_named_as_an_attribute():
    names = iter("abc")
    with pytest.raises(oomkit.SplitError, match=r"micro-batches: result\.name differs: 'a' and"):
        split(lambda x: Slotted(rows_of(x), next(names)))


def test_an_attribute_that_only_some_have():
    def step(x):
        out = Plain(rows_of(x), x.mean())
        if len(x) == 3:
            out.more = x
        return out

    with pytest.raises(oomkit.SplitError, match="result differs"):
        split(step)


def test_the_loss_of_a_data_class_of_sums():
    got = split(lambda x: Plain(rows_of(x), x.sum()), reduction="sum")
    assert got.loss.item() == 21.0


def test_nested_ones():
    def step(x):
        return {"a": [Plain(rows_of(x), x.mean())], "b": Pair(Frozen(rows_of(x)), 3)}

    whole, got = whole_and_split(step)
    assert type(got["a"][0]) is Plain and type(got["b"]) is Pair
    assert torch.equal(got["b"].logits.square, whole["b"].logits.square)
    assert got["b"].epoch == 3


# --- mappings ---


def test_an_ordered_dict_in_its_own_order():
    def step(x):
        out = collections.OrderedDict(a=rows_of(x), b=x.mean(), c=None)
        out.move_to_end("a")
        return out

    whole, got = whole_and_split(step)
    assert type(got) is collections.OrderedDict and list(got) == ["b", "c", "a"]
    assert torch.equal(got["a"], whole["a"]) and got["c"] is None
    got["d"] = 1
    assert list(reversed(got)) == ["d", "a", "c", "b"]


def test_a_default_dict_keeps_its_factory():
    def step(x):
        out = collections.defaultdict(list)
        out["rows"].append(rows_of(x))
        return out

    whole, got = whole_and_split(step)
    assert type(got) is collections.defaultdict and got["new"] == []
    assert torch.equal(got["rows"][0], whole["rows"][0])


def test_a_counter_is_added():
    labels = ["cat", "cat", "dog", "cat", "dog", "dog", "cat"]

    def step(x):
        return collections.Counter(labels[int(i)] for i in x[:, 0])

    whole, got = whole_and_split(step)
    assert type(got) is collections.Counter and got == whole == {"cat": 4, "dog": 3}


def test_a_user_dict():
    class Batch(collections.UserDict):
        def __init__(self, data, kind):
            super().__init__(data)
            self.kind = kind

    whole, got = whole_and_split(lambda x: Batch({"x": rows_of(x)}, "text"))
    assert type(got) is Batch and got.kind == "text"
    assert torch.equal(got["x"], whole["x"])


@pytest.mark.parametrize(
    "kind", [dict, collections.OrderedDict, collections.UserDict, types.SimpleNamespace]
)
def test_parts_in_another_order_in_each_micro_batch(kind):
    number = itertools.count()

    def step(x):
        parts = {"a": rows_of(x), "b": rows_of(x) * 2, "c": "text"}
        turned = dict(reversed(parts.items())) if next(number) % 2 else parts
        return kind(**turned)

    whole, got = whole_and_split(step)
    read = vars if kind is types.SimpleNamespace else dict
    assert type(got) is kind and read(got)["c"] == "text"
    assert all(torch.equal(read(got)[name], read(whole)[name]) for name in "ab")


def test_an_attribute_of_a_user_dict_that_is_an_entry_is_one_result():
    def step(x):
        out = collections.UserDict(x=rows_of(x, grad=True))
        out.shown = out["x"]
        out.__dict__["x"] = out["x"]
        return out

    whole, got = whole_and_split(step)
    assert got.x is got["x"] and got.shown is not got.x and list(vars(got)) == list(vars(whole))
    assert torch.equal(got.x, whole.x) and torch.equal(got.shown, whole.x)


def test_a_dict_that_is_its_own_attributes():
    whole, got = whole_and_split(lambda x: AttrDict(logits=rows_of(x)))
    assert type(got) is AttrDict and torch.equal(got.logits, whole.logits)
    got.more = 1
    assert got["more"] == 1


def test_a_mapping_with_methods_of_its_own():
    def step(x):
        out = Strict("here")
        collections.OrderedDict.__setitem__(out, "rows", rows_of(x))
        return out

    whole, got = whole_and_split(step)
    assert type(got) is Strict and got.source == "here" and list(got) == ["rows"]
    assert torch.equal(got[0], whole[0])


def test_the_place_in_a_mapping_is_named():
    counts = iter("abc")
    with pytest.raises(oomkit.SplitError, match=r"result\['k'\] differs: 'a' and 'b'"):
        split(lambda x: collections.OrderedDict(k=next(counts)))


def test_an_output_whose_entries_are_attributes():
    def step(x):
        return Output(loss=x.mean(), logits=rows_of(x), hidden=(x, x + 1))

    whole, got = whole_and_split(step)
    assert type(got) is Output and list(got) == ["loss", "logits", "hidden"]
    assert got.logits is got["logits"] and got.past_key_values is None
    for a, b in zip(got.hidden, whole.hidden, strict=True):
        assert torch.equal(a, b)


# --- tuples ---


def test_what_torch_max_returns():
    batch = torch.rand(ROWS, 3)
    got = split(lambda x: x.max(1), batch)
    assert type(got) is type(batch.max(1))
    assert torch.equal(got.values, batch.max(1).values)
    assert torch.equal(got.indices, batch.max(1).indices)


def test_a_named_tuple_is_named_by_its_fields():
    epochs = iter("abc")
    with pytest.raises(oomkit.SplitError, match=r"result\.epoch differs"):
        split(lambda x: Pair(rows_of(x), next(epochs)))


# --- caches ---


class KeyCache:
    """What a model returns to go on from: nothing that could be joined."""

    def __init__(self, x):
        self.layers = [x]


def said(caplog):
    return [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]


@pytest.mark.parametrize("name", ["past_key_values", "cache_params", "past_buckets_states"])
def test_a_cache_is_dropped_by_name(name, caplog):
    caplog.set_level(logging.INFO, "oomkit")
    step = oomkit.auto_batch(lambda x: {name: KeyCache(x), "logits": rows_of(x)}, label="step")
    for _ in range(2):
        with force_slices((3, 4)):
            got = step(torch.ones(ROWS, 1))
        assert got[name] is None and got["logits"].shape == (ROWS, 1)
    assert said(caplog) == [
        f"results of the micro-batches of step: result['{name}'] dropped: a cache cannot be joined"
    ]


def test_a_cache_in_an_output_is_left_out(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    got = split(lambda x: Output(logits=rows_of(x), past_key_values=KeyCache(x)))
    assert list(got) == ["logits"] and got.past_key_values is None
    assert len(said(caplog)) == 1


def test_a_cache_of_tensors_is_joined_where_it_can_be():
    whole, got = whole_and_split(lambda x: {"past_key_values": ((x, x + 1),)})
    assert torch.equal(got["past_key_values"][0][1], whole["past_key_values"][0][1])


def test_a_cache_of_tensors_that_cannot_be_joined_is_dropped(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    got = split(lambda x: {"mems": [torch.full((5, 1), x.sum().item())], "y": rows_of(x)})
    assert got["mems"] is None and "result['mems']" in said(caplog)[0]


def test_a_cache_is_gone_before_the_next_micro_batch():
    caches = []

    def step(x):
        assert all(cache() is None for cache in caches)
        cache = KeyCache(x)
        caches.append(weakref.ref(cache))
        return [cache, rows_of(x)]

    assert split(step)[0] is None and len(caches) == 3


def test_other_objects_are_refused():
    with pytest.raises(oomkit.SplitError, match=r"result\['thing'\] differs"):
        split(lambda x: {"thing": object()})


# --- ragged tensors, the next batch ---


def test_ragged_tensors_are_refused_with_what_to_do():
    with pytest.raises(oomkit.SplitError) as caught:
        split(lambda x: {"tokens": torch.zeros(len(x), int(x.max()))})
    assert str(caught.value).startswith(
        "auto_batch cannot join the results of 3 micro-batches: result['tokens'] has shapes "
        "[3, 2] and [2, 4] for 3 and 2 rows, which cannot be put one after the other"
    )
    assert "pad to a fixed length, or use oomkit.map(..., pad=...)" in str(caught.value)


def test_the_next_batch_fetched_inside_the_step():
    batches = iter(torch.rand(9, ROWS, 2))

    def step(x):
        return x.mean().item(), next(batches), next(batches)

    with pytest.raises(oomkit.SplitError, match="the next batch fetched inside the step") as caught:
        split(step)
    assert "result[1] has shapes [7, 2] and [7, 2] for 3 and 2 rows" in str(caught.value)


def test_lists_for_each_row_of_objects():
    def step(x):
        return {"boxes": [{"box": row.detach(), "label": "x"} for row in x], "note": "n", "z": None}

    whole, got = whole_and_split(step)
    assert got["note"] == "n" and got["z"] is None and len(got["boxes"]) == ROWS
    for a, b in zip(got["boxes"], whole["boxes"], strict=True):
        assert torch.equal(a["box"], b["box"]) and a["label"] == "x"


def test_what_torch_cannot_put_together_is_refused_by_its_place():
    kinds = iter([torch.float32, torch.float32])

    def step(x):
        first = next(kinds, None) is not None
        return {"a": [x.to_sparse() if first and len(x) == 3 else x]}

    with pytest.raises(oomkit.SplitError, match=r"result\['a'\]\[0\] cannot be put together"):
        split(step)


def test_tensors_that_cannot_be_compared_are_refused():
    with pytest.raises(oomkit.SplitError, match="result has"):
        split(lambda x: torch.full((5,), float(len(x))).to_sparse())


# --- memory that is used again ---


def test_a_buffer_that_is_used_again_is_refused():
    buffer = torch.zeros(8, 1, dtype=torch.float64)

    def step(x):
        return {"out": torch.mul(x, 2, out=buffer[: len(x)])}

    with pytest.raises(oomkit.SplitError, match=r"result\['out'\] .* overwrote: return a clone"):
        split(step)


@pytest.mark.filterwarnings("ignore:.*as many rows")
def test_a_buffer_that_is_filled_row_after_row_is_joined():
    buffer, at = torch.zeros(ROWS, 1, dtype=torch.float64), [0]

    def step(x):
        start, at[0] = at[0], at[0] + len(x)
        buffer[start : at[0]] = x * 2
        return buffer[start : at[0]]

    assert torch.equal(split(step), torch.arange(float(ROWS), dtype=torch.float64)[:, None] * 2)


def test_a_total_that_the_step_keeps_is_itself():
    total = torch.zeros((), dtype=torch.int64)

    def step(x):
        return {"seen": total.add_(len(x))}

    got = split(step)
    assert got["seen"] is total and total.item() == ROWS


def test_state_that_moved_only_in_the_update_is_kept():
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x):
        model(x).mean().backward()
        optimizer.step()
        return {"state": model.state_dict(), "weight": model.weight}

    got = step(torch.ones(4, 1, dtype=torch.float64))
    assert got["weight"] is model.weight
    assert torch.equal(got["state"]["weight"], model.weight)
    assert type(got["state"]) is collections.OrderedDict


def test_the_parts_of_micro_batches_are_freed():
    alive = []

    def step(x):
        assert all(ref() is None for ref in alive)
        middle = (x * 2).requires_grad_() * 1
        alive.append(weakref.ref(middle))
        return Output(logits=middle.exp())

    gc.collect()
    assert split(step).logits.shape == (ROWS, 1)
