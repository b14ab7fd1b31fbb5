"""prune_on_oom: what an out-of-memory trial leaves, in the study and in memory."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import weakref

import numpy
import optuna
import pytest
import torch
from searches import MIB, STATE, allocated, sizes, study, take

import oomkit
from oomkit.optuna import MemoryModel, constraints, prune_on_oom, tell

# --- what is recorded ---


def test_attributes_of_a_trial_in_every_storage(storage, limit):
    limit(10)
    params = {
        "model": "bert-large",
        "train.batch_size": 48,
        "train.grad_accum": 4,
        "tok.max_length": 480,
    }

    def objective(trial):
        for name, value in params.items():
            trial.suggest_categorical(name, [value])
        take(4)
        return take(20).sum()

    more = {
        "rate": numpy.float32(0.5),
        "flag": numpy.bool_(True),
        "count": numpy.int64(3),
        "tensor": torch.tensor(2.5),
        "dtype": torch.float16,
        "rows": (1, 2),
        "inf": float("inf"),
        3: "three",
    }
    one = study(storage)
    one.optimize(prune_on_oom(objective, config=more), n_trials=1)
    (trial,) = one.get_trials()
    attributes = trial.user_attrs
    assert trial.state == STATE.PRUNED
    assert attributes == json.loads(json.dumps(attributes))
    assert attributes["oom"] is True and attributes["oom_kind"] == "capacity"
    assert attributes["oom_config"] == {
        **params,
        "rate": 0.5,
        "flag": True,
        "count": 3,
        "tensor": 2.5,
        "dtype": "torch.float16",
        "rows": [1, 2],
        "inf": "inf",
        "3": "three",
        "effective_batch_size": 192,
    }
    assert attributes["peak_memory_bytes"] >= 4 * MIB
    assert attributes["peak_memory_gb"] == attributes["peak_memory_bytes"] / 1e9
    assert attributes["memory_constraint"] > 0.9
    assert attributes["oom_location"].endswith("in take")


def test_peaks_of_a_trial_that_finishes(storage, limit):
    limit(10)
    one = study(storage)
    one.optimize(prune_on_oom(sizes(4)), n_trials=1)
    (trial,) = one.get_trials()
    assert trial.state == STATE.COMPLETE
    assert trial.user_attrs["peak_memory_bytes"] - trial.user_attrs["memory_budget_bytes"] < 0
    assert "oom" not in trial.user_attrs
    assert trial.user_attrs["memory_constraint"] < 0


def test_the_message_is_that_of_the_error(limit, caplog):
    limit(10)
    caught = []

    def catching(trial):
        try:
            return protected(trial)
        except optuna.TrialPruned as error:
            caught.append((str(error), error.__context__, error.__cause__))
            raise

    protected = prune_on_oom(sizes(20))
    with caplog.at_level(logging.WARNING, "oomkit"):
        study().optimize(catching, n_trials=1)
    text, context, cause = caught[0]
    assert text.startswith("OOM: CPU out of memory. Tried to allocate 10.00 MiB")
    assert context is None and cause is None
    assert "oom_kind=capacity" in caplog.text


@pytest.mark.parametrize(
    ("params", "effective"),
    [
        ({"batch_size": 8, "accumulation_steps": 3}, 24),
        ({"batch_size": 8}, None),
        ({"train/batch_size": 8, "gradient_accumulation_steps": 2}, 16),
        ({"batch_size": 8, "eval.batch_size": 4, "grad_accum": 2}, None),
    ],
)
def test_the_effective_batch_where_it_is_known(params, effective, limit):
    limit(1)
    one = study()

    def objective(trial):
        for name, value in params.items():
            trial.suggest_categorical(name, [value])
        take(9)

    one.optimize(prune_on_oom(objective), n_trials=1)
    assert one.trials[0].user_attrs["oom_config"].get("effective_batch_size") == effective


def test_a_callable_configuration(limit):
    limit(1)
    one = study()
    wrapped = prune_on_oom(sizes(9), config=lambda trial: {"model": f"m{trial.number}"})
    one.optimize(wrapped, n_trials=1)
    assert one.trials[0].user_attrs["oom_config"]["model"] == "m0"


# --- what stays alive ---


class Model:
    """Holds memory in a cycle, as real models with hooks do."""

    def __init__(self, mebibytes):
        self.weight = take(mebibytes)
        self.me = self


def keeps_alive(fail):
    """(objective, list of bytes alive over the baseline at the start of each trial)."""
    base, alive = allocated(), []

    def objective(trial):
        alive.append(allocated() - base)
        model, activation = Model(3), take(2)
        return fail(trial, model, activation)

    return objective, alive


def oom_plain(trial, model, activation):
    return take(50).sum()


def oom_in_backward(trial, model, activation):
    x = torch.ones(2**18, requires_grad=True)
    for _ in range(8):
        x = x.exp()
    with oomkit.testing.inject_oom(nth=3, min_bytes=2**18, phase="backward", times=None):
        x.sum().backward()


def oom_chained(trial, model, activation):
    try:
        take(50)
    except RuntimeError as error:
        raise oomkit.OutOfMemory("it did not fit") from error


def pruned_by_user(trial, model, activation):
    raise optuna.TrialPruned("bad")


def finished(trial, model, activation):
    return 1.0


@pytest.mark.parametrize(
    "fail", [oom_plain, oom_in_backward, oom_chained, pruned_by_user, finished]
)
@pytest.mark.parametrize("on_oom", ["prune", "penalize"])
def test_nothing_is_alive_at_the_next_trial(fail, on_oom, limit, no_gc):
    limit(24)
    objective, alive = keeps_alive(fail)
    study().optimize(prune_on_oom(objective, on_oom=on_oom, retries=0), n_trials=4)
    assert alive == [0, 0, 0, 0]


def test_a_handler_by_hand_keeps_memory_alive(limit, no_gc):
    """The measurement can fail: what the case did keeps the model at the next trial."""
    limit(24)
    objective, alive = keeps_alive(oom_plain)

    def by_hand(trial):
        try:
            return objective(trial)
        except torch.OutOfMemoryError:
            raise optuna.TrialPruned("OOM") from None

    study().optimize(by_hand, n_trials=2)
    gc.collect()
    assert alive[1] >= 5 * MIB


@pytest.mark.parametrize("on_oom", ["prune", "raise"])
def test_nothing_is_alive_after_an_error_that_was_caught(on_oom, limit, no_gc):
    limit(24)

    def fail(trial, model, activation):
        raise ValueError("bad")

    objective, alive = keeps_alive(fail)
    study().optimize(prune_on_oom(objective, on_oom=on_oom), n_trials=3, catch=ValueError)
    assert alive == [0, 0, 0]


def test_nothing_is_alive_after_raise(limit, no_gc):
    limit(24)
    objective, alive = keeps_alive(oom_plain)
    wrapped = prune_on_oom(objective, on_oom="raise")
    one = study()
    one.optimize(wrapped, n_trials=3, catch=torch.OutOfMemoryError)
    assert alive == [0, 0, 0]
    assert [t.state for t in one.trials] == [STATE.FAIL] * 3
    assert all(t.user_attrs["oom"] for t in one.trials)


# --- what passes ---


def test_other_errors_pass_untouched():
    error = ValueError("bad")

    def objective(trial):
        here = "local"  # noqa: F841
        raise error

    one = study()
    with pytest.raises(ValueError) as caught:
        one.optimize(prune_on_oom(objective), n_trials=1)
    assert caught.value is error and error.__context__ is None
    assert caught.traceback[-1].frame.f_locals["here"] == "local"
    assert one.trials[0].state == STATE.FAIL
    assert "oom" not in one.trials[0].user_attrs


def test_an_interrupt_passes():
    def objective(trial):
        raise KeyboardInterrupt

    one = study()
    with pytest.raises(KeyboardInterrupt):
        one.optimize(prune_on_oom(objective), n_trials=3)
    assert [t.state for t in one.trials] == [STATE.FAIL]


def test_pruned_by_the_user_stays_so(limit):
    limit(10)
    error = optuna.TrialPruned("bad")

    def objective(trial):
        trial.report(3.0, 0)
        take(2)
        raise error

    one = study()
    one.optimize(prune_on_oom(objective, on_oom="penalize"), n_trials=1)
    (trial,) = one.trials
    assert trial.state == STATE.PRUNED and trial.value == 3.0
    assert "oom" not in trial.user_attrs
    assert trial.user_attrs["peak_memory_bytes"] >= 2 * MIB
    assert trial.user_attrs["memory_constraint"] < 0


def test_a_study_ends_at_its_timeout_and_when_it_is_stopped():
    one = study()
    one.optimize(prune_on_oom(lambda trial: 1.0), n_trials=5, timeout=0)
    assert one.trials == []

    def stops(trial):
        one.stop()
        return 1.0

    one.optimize(prune_on_oom(stops), n_trials=5)
    assert len(one.trials) == 1


def test_callbacks_and_values_that_are_no_numbers():
    seen = []
    one = study()
    one.optimize(
        prune_on_oom(lambda trial: None), n_trials=1, callbacks=[lambda s, t: seen.append(t.state)]
    )
    assert seen == [STATE.FAIL]


def test_a_half_made_update_is_the_trials_own_memory(limit):
    def objective(trial):
        raise oomkit.PartialUpdate("CUDA out of memory in Adam.step")

    limit(1)
    one = study()
    one.optimize(prune_on_oom(objective), n_trials=1)
    assert one.trials[0].state == STATE.PRUNED and one.trials[0].user_attrs["oom"] is True


def test_a_lost_device_passes():
    def objective(trial):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        study().optimize(prune_on_oom(objective), n_trials=1)


class HungrySampler(optuna.samplers.RandomSampler):
    def sample_independent(self, *args):
        take(50)
        return super().sample_independent(*args)


def test_out_of_memory_in_the_sampler_is_not_the_trials(limit):
    limit(10)
    one = study(sampler=HungrySampler())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        one.optimize(prune_on_oom(sizes(1)), n_trials=2)
    assert "not in the objective" in caught.value.__notes__[-1]
    (trial,) = one.trials
    assert trial.state == STATE.FAIL and trial.user_attrs == {}


# --- what it wraps ---


def test_signature_and_name_are_kept():
    @prune_on_oom
    def objective(trial: optuna.Trial) -> float:
        """The objective."""
        return 1.0

    assert objective.__name__ == "objective" and objective.__doc__ == "The objective."
    assert str(inspect.signature(objective)).startswith("(trial:")
    assert objective.__wrapped__.__name__ == "objective"


def test_methods_objects_and_partials(limit):
    limit(10)

    class Search:
        @prune_on_oom(on_oom="penalize", penalty=7.0)
        def objective(self, trial):
            return take(50)

        def __call__(self, trial):
            return take(50)

    def two(size, trial):
        return take(size)

    for objective in (
        Search().objective,
        prune_on_oom(Search(), on_oom="penalize", penalty=7.0),
        prune_on_oom(functools.partial(two, 50), on_oom="penalize", penalty=7.0),
    ):
        one = study()
        one.optimize(objective, n_trials=1)
        assert one.trials[0].value == 7.0


def test_a_study_and_its_objects_are_not_kept_alive():
    wrapped = prune_on_oom(sizes(0, 0))
    one = study()
    reference = weakref.ref(one)
    one.optimize(wrapped, n_trials=1)
    del one
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_oom": "skip"}, "expected on_oom to be 'prune'"),
        ({"threads": "many"}, "expected threads to be 'wait' or 'refuse'"),
        ({"retries": -1}, "expected retries"),
        ({"budget": "two"}, "budget"),
        ({"memory": MemoryModel()}, "expected config to be a callable"),
    ],
)
def test_wrong_options_say_what_is_expected(options, text):
    with pytest.raises(ValueError, match=text):
        prune_on_oom(**options)


def test_what_cannot_be_wrapped():
    async def later(trial):
        return 1.0

    class Objective:
        pass

    for wrong, text in ((3, "callable"), (later, "async"), (Objective, "class")):
        with pytest.raises(TypeError, match=text):
            prune_on_oom(wrong)
    with pytest.raises(TypeError, match="with a trial"):
        prune_on_oom(lambda trial: 1.0)(3)


def test_a_fixed_trial_has_no_study(limit):
    limit(10)
    trial = optuna.trial.FixedTrial({"lr": 0.5})
    with pytest.raises(optuna.TrialPruned):
        prune_on_oom(sizes(50))(trial)
    assert trial.user_attrs["oom"] is True
    assert constraints(trial)[0] > 0


# --- ask and tell ---


def test_ask_and_tell(storage, limit):
    limit(10)
    one = study(storage)
    objective = sizes(4, 50, 4)
    frozen = tell(one, one.ask(), objective)
    assert frozen.state == STATE.COMPLETE and frozen.value == 0
    frozen = tell(one, one.ask(), objective)
    assert frozen.state == STATE.PRUNED and frozen.user_attrs["oom"] is True
    frozen = tell(one, one.ask(), prune_on_oom(objective, on_oom="penalize"))
    assert frozen.state == STATE.COMPLETE
    frozen = tell(one, one.ask(), lambda trial: float("nan"))
    assert frozen.state == STATE.FAIL
    with pytest.raises(ZeroDivisionError):
        tell(one, one.ask(), lambda trial: 1 / 0)
    assert one.trials[-1].state == STATE.FAIL


def test_ask_and_tell_of_a_trial_that_was_told_already():
    one = study()

    def objective(trial):
        one.tell(trial, 3.0)
        return 4.0

    trial = one.ask()
    assert tell(one, trial, lambda trial: one.tell(trial, 3.0) and 4.0).value == 3.0


# --- the ladder ---


@pytest.mark.parametrize("where", ["study", "step"])
@pytest.mark.parametrize("ladder", [None, (), ("update",), ("update", "state"), "auto"], ids=str)
def test_a_trial_climbs_no_ladder_unless_asked(limit, ladder, where):
    """AdamW's state does not fit: such a trial would be slow, and is pruned."""
    limit(13)  # 4 MiB of parameters, as much of gradients, twice that of state
    given = {} if ladder is None else {"ladder": ladder}
    rungs = []

    def objective(trial):
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())

        @oomkit.auto_batch(**(given if where == "step" else {}))
        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(2):
            step(torch.ones(4, 512))
        rungs.append(step.records[-1].rung)
        return 1.0

    one = study()
    one.optimize(prune_on_oom(objective, **(given if where == "study" else {})), n_trials=1)
    climbs = ladder in ("auto", ("update", "state"))
    assert one.trials[0].state == (STATE.COMPLETE if climbs else STATE.PRUNED)
    assert rungs == ([2] if climbs else [])
