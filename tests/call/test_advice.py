"""Advice follows from figures: each rule says its cause, and is silent about others'."""

import re
from dataclasses import replace

import pytest
import torch

from oomkit._reports.advice import RULES, Figures, sentences
from oomkit._reports.growth import Growth, growth_of, keeper

MIB = 2**20
ATTEMPT = {"micro_batch_size": 1}

# A model of 10 MiB in 40 MiB, that fails for no cause that a rule knows.
PLAIN = Figures(
    attempts=[ATTEMPT],
    phase="backward",
    device="cpu",
    budget=40 * MIB,
    allocated=38 * MIB,
    reserved=None,
    requested=4 * MIB,
    parameters=10 * MIB,
    all_gradients=10 * MIB,
    largest_gradient=4 * MIB,
    state=0,
    missing_state=0,
    activations=4 * MIB,
    batch=2**16,
    others=0,
    optimizers="AdamW",
    row_bytes=1024.0,
    ladder=30,
    growth=None,
    whole_parameters=10 * MIB,
    keeper=None,
    ranks=1,
    beside=None,
)
CASES = {
    "grows": {"growth": Growth(6, 4 * MIB, 24 * MIB)},
    "parameters_and_gradients": {"budget": 19 * MIB},
    "optimizer_state": {"missing_state": 21 * MIB, "ladder": 0},
    "fragmented": {"reserved": 45 * MIB, "device": "cuda:0"},
    "others_hold": {"beside": 2048 * MIB, "device": "cuda:0"},
    "one_sample": {"activations": 15 * MIB},
    "large_update": {"phase": "optimizer"},
    "many_ranks": {"ranks": 4},
}


def test_every_rule_has_a_case():
    assert list(CASES) == [rule.__name__ for rule in RULES]


@pytest.mark.parametrize("cause", CASES)
def test_a_rule_speaks_of_its_own_cause(cause):
    spoken = [rule.__name__ for rule in RULES if rule(replace(PLAIN, **CASES[cause]))]
    assert spoken == [cause]


def test_where_no_rule_knows():
    assert sentences(PLAIN) == ("give the step more than 40.00 MiB, or a smaller model",)
    assert sentences(replace(PLAIN, budget=None, missing_state=90 * MIB)) == (
        "free what else is on the device: other models, cached batches, stored outputs",
    )


def test_state_that_would_fit_without_the_others_is_not_the_cause():
    for phase in ("backward", "optimizer"):
        (text,) = sentences(
            replace(PLAIN, phase=phase, state=5 * MIB, missing_state=5 * MIB, others=30 * MIB)
        )
        assert text.startswith("30.00 MiB were allocated before the step and are no parameter")


def test_at_most_three():
    everything = {}
    for case in CASES.values():
        everything |= case
    assert len(sentences(replace(PLAIN, **everything))) == 3


def test_the_two_sums_are_told():
    (text,) = sentences(replace(PLAIN, budget=19 * MIB))
    assert text.startswith(
        "parameters (10.00 MiB) and their gradients (10.00 MiB) need 20.00 MiB of 19.00 MiB: no "
        "batch size, no rung of the ladder and no other optimizer helps; train fewer parameters "
    )
    (text,) = sentences(replace(PLAIN, budget=9 * MIB, parameters=0))
    assert text.startswith("the gradients of all parameters need 10.00 MiB of 9.00 MiB")


def test_a_gradient_more_is_told():
    split = [{"micro_batch_size": 2, "accumulation_steps": 32}]
    figures = replace(PLAIN, budget=23 * MIB, attempts=split)
    (text,) = sentences(replace(figures, ladder=0))
    assert text.startswith(
        "parameters and gradients (20.00 MiB) and what else was there before the step (64.00 KiB) "
        "leave no room in 23.00 MiB for the largest gradient of one more micro-batch (4.00 MiB): "
    )
    assert "smaller micro-batches do not help, but the rung 'gradients'" in text
    for other in ({"ladder": 62}, {"budget": 25 * MIB}, {"phase": "forward"}, {"ranks": 2}):
        assert "largest gradient" not in sentences(replace(figures, **({"ladder": 0} | other)))[0]
    assert "largest gradient" not in sentences(replace(PLAIN, budget=23 * MIB, ladder=0))[0]


def test_the_state_names_the_rung_that_is_left():
    figures = replace(PLAIN, missing_state=21 * MIB)
    assert not any("state of AdamW" in text for text in sentences(figures))  # not there yet
    figures = replace(figures, phase="optimizer")
    assert "which keeps it in host memory, did not help" in sentences(figures)[0]
    for ladder in (0, 2, 4):  # none, "update", "state"
        assert 'ladder=("update", "state")' in sentences(replace(figures, ladder=ladder))[0]


@pytest.mark.parametrize(
    ("row_bytes", "said"), [(1024.0, False), (4095.0, False), (4096.0, True), (3e6, True)]
)
def test_small_samples_are_not_to_be_smaller(row_bytes, said):
    (text,) = sentences(replace(PLAIN, activations=15 * MIB, row_bytes=row_bytes))
    assert text.startswith("the activations of one sample need at least 19.00 MiB")
    assert ("make each sample" in text) is said


def test_one_sample_by_the_ladder():
    (text,) = sentences(replace(PLAIN, activations=15 * MIB, ladder=0))
    assert 'ladder="auto"' in text
    (text,) = sentences(replace(PLAIN, activations=15 * MIB))
    assert "torch.utils.checkpoint" in text


def test_shards_are_told_from_the_whole():
    (text,) = sentences(replace(PLAIN, ranks=4, whole_parameters=40 * MIB))
    assert text.startswith("parameters are sharded, 10.00 MiB of 40.00 MiB here")


def test_the_keeper_is_named():
    growth = Growth(6, 4 * MIB, 24 * MIB)
    (text,) = sentences(replace(PLAIN, growth=growth, keeper="losses, a list of 6 ... (f:3),"))
    assert "each of the last 6 steps began with 4.00 MiB more" in text
    assert text.endswith("; losses, a list of 6 ... (f:3), keeps graphs: store loss.item() or "
                         "loss.detach() there")  # fmt: skip


KEPT = """
class Trainer:
    def __init__(self):
        self.losses = []

    def train(self, values):
        for value in values:
            self.losses.append(value)
        return keeper(None)

def by_key(values):
    seen = {}
    for i, value in enumerate(values):
        seen[i] = value
    return keeper(None)

def log(history, value):
    history += [value]

def elsewhere(values):
    history = []
    for value in values:
        log(history, value)
    return keeper(None)

def made(values):
    found = list(values)
    return keeper(None)
"""


@pytest.mark.parametrize(
    ("call", "name", "place"),
    [
        ("Trainer().train", "self.losses, a list", "filled at {}:8"),
        ("by_key", "seen, a dict", "filled at {}:14"),
        ("elsewhere", "history, a list", "filled at {}:18"),
        ("made", "found, a list", "a variable at {}:28 in made"),
    ],
)
@pytest.mark.parametrize("source", [True, False])
def test_the_line_that_fills_it(tmp_path, call, name, place, source):
    path = tmp_path / "train.py"
    if source:
        path.write_text(KEPT)
    names = {"keeper": keeper}
    exec(compile(KEPT, str(path), "exec"), names)
    weight = torch.ones(2, requires_grad=True)
    text = eval(call, names)(weight * i for i in range(20))
    assert text.startswith(f"{name} of 20 tensors with graphs (")
    if source:
        assert place.format(path) in text
    else:
        assert re.search(rf"a variable at {re.escape(str(path))}:\d+ in \w+\)", text)


class Record:
    def __init__(self, baseline):
        self.baseline = baseline


@pytest.mark.parametrize(
    ("baselines", "growth"),
    [
        ([], None),
        ([10, 20, 30, 40], None),  # three steps of growth: too few
        ([10, 20, 30, 40, 50], Growth(4, 10, 40)),
        ([99, 10, 20, 30, 40, 50], Growth(4, 10, 40)),
        ([10, 20, 30, 40, 50, 50], None),  # it has stopped
        ([10, 20, 30, None, 40, 50], Growth(4, 10, 40)),
        ([0, 1000, 1001, 1002, 1004, 1300], None),  # not alike
    ],
)
def test_growth(baselines, growth):
    assert growth_of([Record(baseline) for baseline in baselines]) == growth
