"""The effective batch in one static space, and predictions of memory."""

from __future__ import annotations

import logging
import random

import optuna
import pytest
import torch
from searches import MIB, STATE, study, take

import oomkit
from oomkit.optuna import MemoryModel, Training, objective, prune_on_oom, suggest_batch

# --- suggest_batch ---


@pytest.mark.parametrize(
    ("effective", "most", "micro", "accumulation"),
    [(64, None, 64, 1), (64, 24, 22, 3), (7, 2, 2, 4), (8, 100, 8, 1)],
)
def test_a_plan_of_equal_parts(effective, most, micro, accumulation):
    trial = optuna.trial.FixedTrial({"effective_batch_size": effective})
    plan = suggest_batch(trial, 1, 512, max_micro=most)
    assert (plan.effective, plan.micro, plan.accumulation) == (effective, micro, accumulation)
    assert plan.micro * plan.accumulation >= effective > plan.micro * (plan.accumulation - 1)


def test_choices_and_wrong_arguments():
    trial = optuna.trial.FixedTrial({"effective_batch_size": 32})
    assert suggest_batch(trial, choices=(16, 32)).effective == 32
    with pytest.raises(TypeError, match="expected low to be an int, got 'float'"):
        suggest_batch(trial, 8.0)
    with pytest.raises(ValueError, match="1 <= low <= high"):
        suggest_batch(trial, 64, 8)


def test_a_space_that_changes_is_said():
    def changes(trial):
        return suggest_batch(trial, 8, 32 if trial.number else 64).effective

    with pytest.warns(oomkit.OomkitWarning, match="samplers model only what is the same"):
        study().optimize(changes, n_trials=2)


# --- the objective that trains ---


def build(trial, batch_size):
    width = trial.suggest_categorical("width", [16, 4096])
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(64, 8)

    def step(part):
        optimizer.zero_grad()
        loss = (model(part) - 1).square().mean()
        loss.backward()
        optimizer.step()

    def evaluate():
        with torch.no_grad():
            return float((model(x[:1]) - 1).square().mean())

    return Training(step, lambda: x.split(batch_size), evaluate, epochs=2)


def fixed(one, *params):
    for row in params:
        one.enqueue_trial(row)
    return len(params)


def test_trials_that_would_not_fit_whole_complete(limit):
    one = study()
    n = fixed(
        one,
        {"effective_batch_size": 64, "width": 16},
        {"effective_batch_size": 64, "width": 4096},
        {"effective_batch_size": 8, "width": 4096},
    )
    with oomkit.limit_memory(None, device="cpu"):
        searched = objective(build, batch=(8, 64))
    limit(1.6)
    one.optimize(searched, n_trials=n)
    small, large, least = one.trials
    assert {t.state for t in one.trials} == {STATE.COMPLETE}
    assert small.user_attrs["oom_retries"] == 0 and small.user_attrs["micro_batch_size"] == 64
    assert large.user_attrs["oom_retries"] > 0
    micro, parts = (large.user_attrs[k] for k in ("micro_batch_size", "accumulation_steps"))
    assert micro < 64 <= micro * parts
    assert large.user_attrs["memory_constraint"] <= 0
    assert "oom" not in large.user_attrs and least.params["effective_batch_size"] == 8
    with oomkit.limit_memory(None, device="cpu"):
        whole = study()
        fixed(whole, large.params)
        whole.optimize(objective(build, batch=(8, 64)), n_trials=1)
    assert large.value == pytest.approx(whole.trials[0].value, rel=1e-4)


def test_what_does_not_fit_at_one_row_is_pruned(limit):
    one = study()
    n = fixed(one, {"effective_batch_size": 64, "width": 4096})
    limit(0.1)
    one.optimize(objective(build, batch=(8, 64)), n_trials=n)
    (trial,) = one.trials
    assert trial.state == STATE.PRUNED and trial.user_attrs["oom_kind"] == "capacity"
    assert trial.user_attrs["oom_config"]["effective_batch_size"] == 64


def test_a_step_that_trials_share_is_counted_once(limit):
    limit(1)

    @oomkit.auto_batch
    def step(rows):
        return (take(len(rows) / 40).sum() + rows.sum()).item()

    @objective(batch=(64, 64))
    def searched(trial, batch_size):
        batches = [] if trial.number == 2 else [torch.zeros(batch_size, 2)]
        return Training(step, batches, lambda: 1.0)

    one = study()
    one.optimize(searched, n_trials=3)
    first, second, third = (t.user_attrs.get("oom_retries") for t in one.trials)
    assert first > 0 and second == 0 and third is None


def test_the_objective_reports_and_prunes():
    class Never(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return True

    one = study(pruner=Never())
    one.optimize(objective(batch=(8, 16))(build), n_trials=1)
    assert one.trials[0].state == STATE.PRUNED and len(one.trials[0].intermediate_values) == 1
    assert "oom" not in one.trials[0].user_attrs


# --- MemoryModel ---


def record(one, config, peak, **more):
    """A finished trial as prune_on_oom leaves it."""
    attributes = {"peak_memory_bytes": int(peak), "memory_config": config, **more}
    one.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=attributes))


def test_it_learns_a_law_it_was_not_told():
    def law(c):
        return 5e6 + 2e5 * c["batch_size"] + 7e3 * c["batch_size"] * c["max_length"]

    one = study()
    for batch in (2, 4, 8, 16):
        for length in (32, 64, 128):
            config = {"model": "a", "batch_size": batch, "max_length": length}
            record(one, config, law(config))
    model = MemoryModel().fit(one)
    config = {"model": "a", "batch_size": 64, "max_length": 512}
    assert model.predict(config) == pytest.approx(law(config), rel=1e-6)
    assert model.predict({**config, "model": "b"}) is None  # each model by itself
    assert "a: 12 peaks" in model.report()


def test_accumulation_does_not_count():
    model = MemoryModel(lambda c: 1e6 * c["train.batch_size"] * c["train.grad_accum"])
    config = {"train.batch_size": 8, "train.grad_accum": 6, "effective_batch_size": 48}
    assert model.predict(config) == 8_000_000
    model = MemoryModel(lambda c: 1e6 * c["effective_batch_size"])
    assert model.predict({**config, "train.batch_size": 8}) == 8_000_000
    # Without a batch size: the micro-batch, that is what each accumulation step holds.
    assert model.predict({"effective_batch_size": 48, "train.grad_accum": 6}) == 8_000_000
    per_step = MemoryModel(lambda c: 1e6 * c["effective_batch_size"] / c["accumulation_steps"])
    assert per_step.predict({"effective_batch_size": 48, "accumulation_steps": 6}) == 8_000_000


def test_peaks_of_split_trials_count_with_their_micro_batch():
    one = study()
    for micro in (1, 2, 4, 8, 16):
        record(one, {"effective_batch_size": 64}, 1e6 + 1e5 * micro, micro_batch_size=micro)
    assert MemoryModel().fit(one).predict({"batch_size": 1}) == pytest.approx(1.1e6)


def test_thresholds_follow_the_errors():
    config = {"model": "a", "batch_size": 1}
    one = study()
    model = MemoryModel(lambda c: 100)
    assert model.fit(one).threshold(config) == 1.25
    for _ in range(5):
        record(one, config, 100, memory_predicted_bytes=104)
    assert model.fit(one).threshold(config) == pytest.approx(1.06)
    assert model.error("a") == pytest.approx(
        {"count": 5, "median": 0.04, "largest": 0.04, "bias": 0.04}
    )
    record(one, config, 100, memory_predicted_bytes=180)
    assert model.fit(one).threshold(config) == 1.25
    assert "largest 80.0%" in model.report()


@pytest.mark.parametrize(
    "model",
    [MemoryModel(), MemoryModel(features=lambda c: [1, c["batch_size"]])],
    ids=["by name", "features"],
)
def test_it_learns_from_trials_that_nothing_was_predicted_for(model, limit):
    """By what their check was told, for it is not among the parameters."""
    limit(20)
    one = study()
    one.optimize(prune_on_oom(lambda trial: float(take(1).numel())), n_trials=1)  # not checked

    @prune_on_oom
    def checked(trial):
        rows = trial.suggest_int("half", 1, 6)
        model.check(trial, {"batch_size": 2 * rows, "max_length": None})
        return float(take(2 * rows).numel())

    n = fixed(one, *({"half": half} for half in (1, 2, 3, 4, 5, 6)))
    one.optimize(checked, n_trials=n)
    assert one.trials[-1].user_attrs["memory_predicted_bytes"] == pytest.approx(12 * MIB, rel=0.02)


def test_trials_that_took_no_memory_tell_nothing():
    one = study()
    for batch in range(1, 8):
        record(one, {"batch_size": batch}, 0, memory_predicted_bytes=10)
        record(one, {"batch_size": batch}, 1000 * batch)
    assert MemoryModel().fit(one).predict({"batch_size": 10}) == 10_000


def test_only_the_hopeless_are_pruned_before_they_begin(limit, caplog):
    limit(100)
    one = study()
    begun = []

    def config(trial):
        return {"rows": trial.suggest_int("rows", 1, 200)}

    @prune_on_oom(config=config, memory=MemoryModel(lambda c: c["rows"] * MIB))
    def searched(trial):
        begun.append(trial.params["rows"])
        take(trial.params["rows"])
        return 1.0

    n = fixed(one, {"rows": 130}, {"rows": 120}, {"rows": 50})
    with caplog.at_level(logging.INFO, "oomkit"):
        one.optimize(searched, n_trials=n)
    hopeless, failed, fits = one.trials
    assert begun == [120, 50]
    assert hopeless.state == failed.state == STATE.PRUNED and fits.state == STATE.COMPLETE
    assert hopeless.user_attrs["oom_predicted"] is True and "oom" not in hopeless.user_attrs
    assert hopeless.user_attrs["memory_constraint"] > failed.user_attrs["memory_constraint"] > 0
    assert fits.user_attrs["memory_predicted_bytes"] == 50 * MIB
    assert "OOM predicted" in caplog.text


def test_a_check_inside_an_objective(limit):
    limit(10)
    model = MemoryModel(lambda c: 40 * MIB)

    def checked(trial):
        trial.suggest_float("lr", 0, 1)
        held = take(1)
        model.check(trial)
        return float(held.numel())

    penalised = prune_on_oom(checked, on_oom="penalize", penalty=3.0)
    trials = []
    for objective_ in (checked, prune_on_oom(checked), penalised):  # also without the wrapper
        one = study()
        one.optimize(objective_, n_trials=1)
        trials += one.trials
    assert [t.state for t in trials] == [STATE.PRUNED, STATE.PRUNED, STATE.COMPLETE]
    assert trials[2].value == 3.0
    assert all(t.user_attrs["oom_predicted"] for t in trials)


@pytest.mark.parametrize("told", [True, False], ids=["law", "learnt"])
@pytest.mark.parametrize("seed", range(20))
def test_with_a_perfectly_known_law_no_feasible_trial_is_pruned(seed, told):
    """Whatever the law, the budget and the trials: also near the border, at any time."""
    random_ = random.Random(seed)
    fixed_part, row, cell = (10 ** random_.uniform(5, 8) for _ in range(3))

    def law(c):
        return fixed_part + row * c["batch_size"] / 9 + cell * c["batch_size"] * c["length"] / 99

    budget = int(law({"batch_size": random_.randint(4, 32), "length": random_.randint(64, 256)}))
    model = MemoryModel(law) if told else MemoryModel()
    one = study()
    wrong = hopeless = 0
    for _ in range(40):
        config = {"batch_size": random_.randint(1, 64), "length": random_.randint(32, 512)}
        trial = one.ask()
        trial.suggest_categorical("x", [0])
        pruned = model.check(trial, config, budget=budget, prune=False)
        needed = law(config)
        wrong += pruned and needed <= budget
        hopeless += pruned
        if needed > budget:
            one.tell(trial, state=STATE.PRUNED)
            continue
        trial.set_user_attr("memory_config", config)
        trial.set_user_attr("peak_memory_bytes", round(needed))
        one.tell(trial, 1.0)
    assert wrong == 0
    assert hopeless or needed <= budget or not told


def test_wrong_options():
    with pytest.raises(ValueError, match="at least 1"):
        MemoryModel(hopeless=0.9)
    with pytest.raises(ValueError, match="got both"):
        MemoryModel(lambda c: 1, features=lambda c: [1])
