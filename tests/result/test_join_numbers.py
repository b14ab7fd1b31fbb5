"""Numbers in results: averaged, added, kept, or the last one's; said once; and errors after
the update."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch
from helpers.messages import message_of
from torch import nn
from torch.nn.utils import clip_grad_norm_

import oomkit
from oomkit.testing import force_slices

ROWS = 6
PREFIX = "results of the micro-batches of step: "


def decorated(function, **options):
    """Runs as a whole with `call(x)`, split with `call(x, slices)`."""
    step = oomkit.auto_batch(function, label="step", **options)

    def call(x, slices=None):
        if slices is None:
            return step(x)
        with force_slices(slices):
            return step(x)

    return call


def batch_of(rows=ROWS):
    return torch.linspace(-1, 1, rows * 2, dtype=torch.float64).reshape(rows, 2)


def split(function, slices=(4, 2), **options):
    return decorated(function, **options)(batch_of(sum(slices)), slices)


def said(caplog):
    texts = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.INFO or "averaged" in record.getMessage()
    ]
    return [t.removeprefix(PREFIX) for t in texts if t.startswith(PREFIX)]


def trainer(result):
    """A step with clipping, whole and split, from the same start."""
    torch.manual_seed(3)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return result(loss, norm, x)

    call = decorated(step)
    whole = call(batch_of())
    model.load_state_dict(start)
    return whole, call(batch_of(), (4, 2))


# --- the norm of the gradients ---


@pytest.mark.parametrize("wrap", [float, lambda n: n], ids=["float", "tensor"])
def test_a_norm_is_the_whole_ones(wrap, caplog):
    caplog.set_level(logging.INFO, "oomkit")
    whole, got = trainer(
        lambda loss, norm, x: {"loss": loss.item(), "more": {"log": {"grad_norm": wrap(norm)}}}
    )
    assert (
        abs(float(got["more"]["log"]["grad_norm"]) - float(whole["more"]["log"]["grad_norm"]))
        <= 1e-12
    )
    assert abs(got["loss"] - whole["loss"]) <= 1e-12
    assert said(caplog) == [
        "result['loss'] averaged",
        "result['more']['log']['grad_norm'] taken from the last micro-batch",
    ]


@pytest.mark.parametrize("wrap", [float, lambda n: n], ids=["float", "tensor"])
def test_a_norm_beside_the_loss(wrap):
    whole, got = trainer(lambda loss, norm, x: (loss.detach(), wrap(norm)))
    assert all(abs(float(a) - float(b)) <= 1e-12 for a, b in zip(got, whole, strict=True))


def test_a_norm_in_a_named_tuple():
    class Log(NamedTuple):
        loss: float
        total_norm: float
        accuracy: float

    def result(loss, norm, x):
        return Log(loss.item(), norm.item(), float(bool((x > 0.9).any())))

    whole, got = trainer(result)
    assert abs(got.total_norm - whole.total_norm) <= 1e-12
    # Zero in all but the last as well, but its name says that it is no norm.
    assert got.accuracy == pytest.approx(2 / 6)


# --- booleans ---


class Finite(NamedTuple):
    finite: list[torch.Tensor]


def test_booleans_must_agree():
    assert split(lambda x: {"finite": True, "ok": torch.tensor(True)})["finite"] is True
    with pytest.raises(oomkit.SplitError, match=r"result\['big'\] differs: False and True"):
        split(lambda x: {"big": bool((x > 0.9).any())})
    with pytest.raises(oomkit.SplitError, match=r"result\.finite\[0\] differs: tensor\(False\)"):
        split(lambda x: Finite([(x > 0.9).any()]))


# --- integers ---


def test_counts_are_added(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    call = decorated(lambda x: {"seen": len(x), "positive": (x[:, 0] > 0).sum()})
    whole = call(batch_of())
    for _ in range(2):
        got = call(batch_of(), (2, 2, 2))
        assert got["seen"] == whole["seen"] == ROWS
        assert got["positive"].item() == whole["positive"].item()
    assert said(caplog) == ["result['seen'] added", "result['positive'] added"]


@pytest.mark.parametrize("name", ["epoch", "global_step", "Iteration", "rank", "seed"])
def test_a_name_that_is_no_count(name, caplog):
    caplog.set_level(logging.INFO, "oomkit")
    got = split(lambda x: {name: 7, "nested": {name: torch.tensor(7)}})
    assert got[name] == 7 and got["nested"][name].item() == 7
    assert said(caplog) == [f"result['{name}'] kept", f"result['nested']['{name}'] kept"]


def test_a_name_helps_only_where_all_are_equal():
    assert split(lambda x: {"step": len(x)}) == {"step": ROWS}


def test_what_a_whole_call_returned_is_kept(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    call = decorated(lambda x: {"classes": 3, "seen": len(x)})
    assert call(batch_of()) == {"classes": 3, "seen": 6}
    assert call(batch_of(), (3, 3)) == {"classes": 3, "seen": 6}
    assert call(batch_of(4), (2, 2)) == {"classes": 3, "seen": 4}
    assert said(caplog) == ["result['classes'] kept", "result['seen'] added"]


def test_a_whole_call_of_fewer_rows_shows_nothing():
    call = decorated(lambda x: {"seen": len(x)})
    assert call(batch_of(3)) == {"seen": 3}
    assert call(batch_of(), (3, 3)) == {"seen": 6}


def test_by_position_in_a_tuple():
    class Log(NamedTuple):
        loss: float
        classes: int

    call = decorated(lambda x: (x.mean().item(), 3))
    call(batch_of())
    assert call(batch_of(), (3, 3))[1] == 3
    call = decorated(lambda x: Log(x.mean().item(), 3))
    call(batch_of())
    assert call(batch_of(), (3, 3)).classes == 3


def test_a_number_that_was_another_one_each_time_is_a_count():
    hits = iter([4, 2, 3, 3, 3])
    call = decorated(lambda x: {"hits": next(hits)})
    assert [call(batch_of())["hits"] for _ in range(3)] == [4, 2, 3]
    assert call(batch_of(), (3, 3)) == {"hits": 6}


def test_without_knowledge_and_name_they_are_added():
    assert split(lambda x: {"classes": 3}) == {"classes": 6}
    assert split(lambda x: (1.0, {"deep": [3]})) == (1.0, {"deep": [6]})


def test_numbers_too_large_to_be_learned():
    call = decorated(lambda x: {"n": 2**70})
    call(batch_of())
    assert call(batch_of(), (3, 3)) == {"n": 2**71}


def test_more_keys_than_are_remembered():
    call = decorated(lambda x: {f"k{i}": i for i in range(30)})
    call(batch_of())
    got = call(batch_of(), (3, 3))
    assert [got[f"k{i}"] for i in range(30)] == [i if i < 24 else 2 * i for i in range(30)]


# --- what is said ---


MEAN = (
    "averaged over the rows: correct for a mean over rows, wrong for a sum, a maximum or a mean "
    "over tokens; return a value for each row, or pass join=... (verify=True checks it)"
)


def test_each_choice_is_said_once_by_its_place(caplog):
    caplog.set_level(logging.INFO, "oomkit")

    def step(x):
        return {
            "lr": 0.1,
            "mean": x.mean(),
            "per_layer": [1.0, x.mean().item()],
            "w": torch.ones(2),
        }

    call = decorated(step)
    for _ in range(2):
        call(batch_of(5), (3, 2))
    assert said(caplog) == [
        "result['lr'] kept",
        f"result['mean'] {MEAN}",
        "result['per_layer'][...] kept",
        f"result['per_layer'][...] {MEAN}",
        "result['w'] kept",
    ]


def test_the_loss_of_a_sum_is_said_to_be_added(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    split(lambda x: {"loss": x.sum().item(), "mean": x.mean().item()}, reduction="sum")
    assert said(caplog) == ["result['loss'] added", f"result['mean'] {MEAN}"]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (lambda x: x.sum().item(), "result"),
        (lambda x: {"loss": x.sum()}, "result['loss']"),
        (lambda x: (x.max(), x), "result[0]"),
    ],
)
def test_in_the_place_of_a_loss_it_is_said_too(form, place, caplog):
    """Nothing has proven that it is a mean where nothing needs a gradient."""
    with torch.no_grad():
        split(form)
    assert f"{place} {MEAN}" in said(caplog)


def test_nothing_is_said_of_a_whole_call(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    decorated(lambda x: {"loss": x.mean().item(), "n": 1})(batch_of())
    assert said(caplog) == []


def test_keys_made_anew_at_every_step_fill_no_memory(caplog):
    caplog.set_level(logging.INFO, "oomkit")
    keys = [{}]
    call = decorated(lambda x: keys[0])
    for i in range(4):
        keys[0] = {f"k{i}_{n}": 1.0 for n in range(200)}
        call(batch_of(), (3, 3))
    assert len(said(caplog)) == 512


# --- after the update ---


def failing_trainer(result):
    torch.manual_seed(3)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return result(loss, x)

    return model, step


def test_an_error_of_joining_says_that_the_update_stands():
    model, step = failing_trainer(
        lambda loss, x: {"loss": loss.item(), "shape": tuple(x.shape)[0:1] * len(x)}
    )
    twin, plain = failing_trainer(lambda loss, x: None)
    plain(batch_of())

    with pytest.raises(oomkit.SplitError) as caught:
        decorated(step)(batch_of(), (4, 2))

    assert [message_of(note) for note in caught.value.__notes__] == [
        "oomkit: the update of this batch had been applied: it stands, do not repeat it"
    ]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_an_error_of_the_users_join_says_it_too():
    _, step = failing_trainer(lambda loss, x: loss.item())
    with pytest.raises(ZeroDivisionError) as caught:
        decorated(step, join=lambda results, rows: 1 // 0)(batch_of(), (4, 2))
    assert "the update of this batch had been applied" in caught.value.__notes__[0]


def test_without_an_update_the_state_is_as_before():
    model = nn.Linear(2, 1).double()

    def step(x):
        model(x).mean().backward()
        return tuple(range(len(x)))

    with pytest.raises(oomkit.SplitError) as caught:
        decorated(step)(batch_of(), (4, 2))
    assert not hasattr(caught.value, "__notes__")
    assert all(p.grad is None for p in model.parameters())


def test_the_next_call_goes_on_after_an_error_of_joining():
    answers = iter(["a", "b"])
    call = decorated(lambda x: next(answers, "c"))
    with pytest.raises(oomkit.SplitError, match="result differs: 'a' and 'b'"):
        call(batch_of(), (3, 3))
    assert call(batch_of(), (3, 3)) == "c"


@pytest.mark.parametrize("k", [2, 3])
def test_what_the_update_has_changed_is_that_of_the_last_micro_batch(k: int) -> None:
    """A learning rate returned after scheduler.step(): the held-back ones have not moved it."""

    def run(decorate: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

        @decorate
        def step(x: torch.Tensor) -> dict[str, Any]:
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            return {
                "lr": scheduler.get_last_lr(),
                "rate": optimizer.param_groups[0]["lr"],
                "scale": scaler.get_scale(),
                "at": scheduler.last_epoch,
                "half": 0.5,
            }

        return [step(torch.ones(12, 4)) for _ in range(2)]

    assert run(lambda f: oomkit.auto_batch(f, accumulation_steps=k)) == run(lambda f: f)


@pytest.mark.parametrize("name", ["rows", "step"])
def test_rows_that_are_what_a_number_of_steps_has_come_to(name: str) -> None:
    """1, then 2: rows of these micro-batches as well as steps. The name tells, or they are rows."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> dict[str, int]:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        return {"rows": len(x)} if name == "rows" else {"step": scheduler.last_epoch}

    step(torch.ones(2, 4))
    with force_slices([1, 2]):
        assert step(torch.ones(3, 4)) == {name: 3 if name == "rows" else 2}
