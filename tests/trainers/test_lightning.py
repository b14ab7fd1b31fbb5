"""`oomkit.lightning.AutoBatch`: an error at many places leaves the run as it is without."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_runs import CLASSES, FEATURES, Classifier, fit, loader, run, sweep, trainer
from runs import SINGLE, at_most, differences, listening, peak_of
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.lightning import AutoBatch

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Dict(Classifier):
    """Returns a dictionary, logs several values at once, and metrics of a training batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log_dict({"loss": loss.detach(), "half": loss.detach() / 2}, batch_size=len(x))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


class Twice(Classifier):
    """Logs two values by one name: the later one is shown, both are in the epoch's mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("twice", loss.detach(), on_step=True, on_epoch=True)
        self.log("twice", 3 * loss.detach(), on_step=True, on_epoch=True)
        return loss


class ThroughSuper(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 2 * super().training_step(batch, batch_idx)


class Dropping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        first.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        first.step()
        second.zero_grad()
        self.manual_backward(F.mse_loss(self.other(x), self.net(x).detach()))
        second.step()

    def configure_optimizers(self) -> Any:
        parts = self.net, self.other
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts], []


SETTINGS = {
    "automatic": (Classifier, {}),
    "accumulation": (Classifier, {"accumulate_grad_batches": 2}),
    "dictionary": (Dict, {}),
    "through_super": (ThroughSuper, {}),
    "twice": (Twice, {}),
    "clipping": (Classifier, {"gradient_clip_val": 0.1}),
    "bf16": (Classifier, {"precision": "bf16-mixed", "limit": 2e-2}),
    "dropout": (Dropping, {"exact": False}),
    "manual": (Manual, {"callback": {"optimizer_safety": "parts"}}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", [1, 4])
def test_training_survives(name: str, number: int) -> None:
    kind, options = SETTINGS[name]
    assert sweep(kind, "training_step", number, **options)["split"]


@pytest.mark.parametrize("kind", [Classifier, Dict, ThroughSuper])
def test_the_backward_that_lightning_runs_survives(kind: Any) -> None:
    """Nothing is logged again in the replay that it begins."""
    assert sweep(kind, "optimizer_step", 2, phase="backward")["split"]


def test_validation_survives() -> None:
    assert sweep(Classifier, "validation_step", 1)["split"]


def test_testing_survives() -> None:
    def test(used: Any, module: Any) -> Any:
        (found,) = used.test(module, loader(2, seed=5), verbose=False)
        return torch.tensor([found[name] for name in sorted(found)])

    assert sweep(Classifier, "test_step", 2, work=test)["split"]


def test_prediction_survives() -> None:
    def predict(used: Any, module: Any) -> Any:
        return torch.cat(used.predict(module, loader()))

    assert sweep(Classifier, "predict_step", 2, work=predict)["split"]


@pytest.mark.parametrize("nth", [1, 5, 9])
def test_two_optimizers_run_with_the_whole_batch(nth: int) -> None:
    reference, _, _ = run(TwoOptimizers, False)
    outcome, _, ours = run(TwoOptimizers, number=1, fault={"nth": nth, "min_bytes": 16})
    assert outcome.error is None and not differences(reference, outcome, 0.0)
    assert sum(record.ooms for record in ours.records) == 1
    assert {record.accumulation_steps for record in ours.records} == {1}


class OwnClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, (x, y) = self.optimizers(), batch

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        self.lr_schedulers().step()


def test_a_closure_of_the_users_own_is_refused() -> None:
    reference, _, _ = run(OwnClosure, False)
    healthy, _, _ = run(OwnClosure)
    assert not differences(reference, healthy, 0.0)
    split, _, _ = run(OwnClosure, callback={"accumulation_steps": 2})
    failed, _, _ = run(OwnClosure, number=1, fault={"nth": 1, "min_bytes": 16})
    assert isinstance(split.error, oomkit.SplitError)
    assert "a step that passes a closure to SGD.step()" in str(split.error)
    assert isinstance(failed.error, oomkit.OutOfMemory)
    assert "not retried: an optimizer step with a closure" in str(failed.error)
    for outcome in split, failed:
        for name, value in outcome.begun.items():
            assert torch.equal(value, outcome.parameters[name])


def test_one_call_of_log_for_a_batch() -> None:
    """What a split call logs is the batch's mean, not the last micro-batch's."""
    reference, _, _ = run(Classifier, protect=False)
    outcome, _, ours = run(Classifier, callback={"accumulation_steps": 4})
    assert {record.accumulation_steps for record in ours.records} >= {4}
    assert not differences(reference, outcome, SINGLE)
    assert len(outcome.log) == len(reference.log)


def test_sizes_are_in_checkpoints(tmp_path: Path) -> None:
    def work(used: Any, module: Any) -> None:
        fit(used, module)
        used.save_checkpoint(tmp_path / "last.ckpt")

    run(Classifier, number=1, fault={"nth": 4, "min_bytes": 16}, work=work)
    second = AutoBatch()
    again = trainer([second], max_epochs=2)
    again.fit(Classifier(), loader(), ckpt_path=tmp_path / "last.ckpt")
    steps = [r for r in second.records if r.label == "Classifier.training_step"]
    assert [r.accumulation_steps for r in steps] == [2, 2, 2, 2]


def test_a_step_may_call_another_one() -> None:
    class Same(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

    assert sweep(Same, "validation_step", 1)["split"]


class Wide(Classifier):
    """Has activations that are far larger than its parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (torch.cat([each] * 128) for each in batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_a_run_with_a_third_of_the_memory(options: dict[str, Any]) -> None:
    """The plain program dies; the protected one ends, and what it has learnt is the same."""
    more = {"max_epochs": 3, **options}
    run(Wide, False, **more)
    reference, third = peak_of(lambda: run(Wide, False, **more)[0], 3)
    assert reference.error is None
    with at_most(third):
        died, _, _ = run(Wide, False, **more)
    assert isinstance(died.error, torch.OutOfMemoryError)
    del died
    with at_most(third):
        outcome, _, ours = run(Wide, **more)
    assert outcome.error is None, outcome.error
    assert max(record.accumulation_steps for record in ours.records) > 1
    assert not differences(reference, outcome, 10 * SINGLE)


# --- what it leaves ---


class Broken(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2:
            raise KeyError("broken")
        return loss


def _ended(kind: Any, used: Any) -> Any:
    module = kind()
    if kind is Broken:
        with pytest.raises(KeyError, match="broken"):
            fit(used, module)
    else:
        fit(used, module)
    return module


@pytest.mark.parametrize("kind", [Classifier, Broken])
def test_nothing_is_left_after_a_run_or_an_error(kind: Any) -> None:
    """The module has what it has after the same run without oomkit."""
    plain = _ended(kind, trainer([]))
    module = _ended(kind, trainer([AutoBatch(accumulation_steps=2)]))
    assert vars(module).keys() == vars(plain).keys()
    for name, value in vars(plain).items():
        assert type(vars(module)[name]) is type(value), name


@pytest.mark.parametrize("kind", [Classifier, Broken])
def test_nothing_of_ours_keeps_the_module_alive(kind: Any, no_gc: None) -> None:
    """Lightning's Trainer is a cycle by itself; in what it leaves, only the callback is ours."""
    ours = AutoBatch(accumulation_steps=2)
    used = trainer([ours])
    module = _ended(kind, used)
    alive, kept = weakref.ref(module), weakref.ref(ours)
    assert {record.accumulation_steps for record in ours.records} == {2}
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        del module, used, ours
        gc.collect()
        found = {type(each) for each in gc.garbage if type(each).__module__.startswith("oomkit")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert {each.__qualname__ for each in found} == {"AutoBatch", "_Parts"}
    gc.collect()
    assert alive() is None and kept() is None


# --- what auto_batch alone does ---


class Alone(lightning.Callback):
    """`auto_batch` on a training step, as users write it."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        step = oomkit.auto_batch(pl_module.training_step, batch="batch", accumulation_steps=2)
        object.__setattr__(pl_module, "training_step", step)


def _alone(kind: Any) -> tuple[list[dict[str, Any]], list[str]]:
    used = trainer([Alone()])
    with listening() as said:
        fit(used, kind())
    return used.logger.lines, said


def test_what_super_logs_is_that_of_the_last_micro_batch_without_the_callback() -> None:
    """And nothing is said of it."""
    reference, _, _ = run(ThroughSuper, False)
    outcome, _, ours = run(ThroughSuper, callback={"accumulation_steps": 2})
    assert ours.records[0].accumulation_steps == 2
    assert not differences(reference, outcome, SINGLE)
    lines, said = _alone(ThroughSuper)
    assert abs(lines[0]["train_loss_step"] / reference.log[0]["train_loss_step"] - 1) > 0.01
    assert not [line for line in said if "self.log" in line]


def test_the_closure_of_an_optimizer_needs_the_callback() -> None:
    with pytest.raises(oomkit.SplitError, match="steps an optimizer .* that was not found"):
        _alone(Manual)
    reference, _, _ = run(Manual, False)
    outcome, _, ours = run(Manual, callback={"accumulation_steps": 2})
    assert ours.records[0].accumulation_steps == 2
    assert not differences(reference, outcome, SINGLE)


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"steps": ("train",)}, ValueError, r"steps to be some of \('training_step', .* 'train'"),
        ({"weights": 1}, TypeError, "got weights=, expected steps= or an option"),
        ({"rng": "dice"}, ValueError, "rng"),
    ],
)
def test_options_that_there_are_not(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        AutoBatch(**options)


@pytest.mark.parametrize("kind", [Classifier, Dict])
def test_what_is_logged_once_is_not_warned_of(kind: Any) -> None:
    ours = AutoBatch(accumulation_steps=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(trainer([ours]), kind())
    assert ours.records[0].accumulation_steps == 2
    assert not [w for w in found if "self.log" in str(w.message)]


ONE = AutoBatch()
TWICE = {
    "two": lambda: ([AutoBatch(), AutoBatch()], []),
    "of other steps": lambda: ([AutoBatch(), AutoBatch(steps=("training_step",))], []),
    "one of them twice": lambda: ([ONE, ONE], []),
    "one more later": lambda: ([AutoBatch()], [AutoBatch()]),
    "used before": lambda: ([_used(), _used()], []),
    "used before, and a new one": lambda: ([_used(), AutoBatch()], []),
}


def _used() -> Any:
    ours = AutoBatch()
    fit(trainer([ours]), Classifier())
    return ours


@pytest.mark.parametrize("name", TWICE)
def test_twice_in_one_trainer(name: str) -> None:
    given, later = TWICE[name]()
    used, module = trainer(given), Classifier()
    used.callbacks += later
    with pytest.raises(ValueError, match="AutoBatch is in the callbacks of this trainer twice"):
        fit(used, module)
    assert not {"training_step", "log", "__reduce_ex__"} & vars(module).keys()


class TrainsOnly(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks(lightning.Callback):
    """Notes what stands in the module's dictionary while it trains."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen |= vars(pl_module).keys()


@pytest.mark.parametrize(
    ("steps", "put"),
    [
        (("test_step", "predict_step"), set()),  # the module has none of them
        (("validation_step", "training_step"), {"training_step", "log", "__reduce_ex__"}),
    ],
)
def test_a_module_without_such_a_step(steps: Any, put: set[str]) -> None:
    plain, mine, ours = Looks(), Looks(), AutoBatch(steps=steps)
    trainer([plain]).fit(TrainsOnly(), loader())
    trainer([ours, mine]).fit(TrainsOnly(), loader())
    assert mine.seen - plain.seen == put and not plain.seen - mine.seen
    assert len(ours.records) == (4 if put else 0)


def test_the_finder_of_batch_sizes() -> None:
    class Loading(Classifier):
        batch_size = 8

        def train_dataloader(self) -> Any:
            return loader()

    with pytest.raises(MisconfigurationException, match="BatchSizeFinder in one trainer"):
        trainer([AutoBatch(), BatchSizeFinder()]).fit(Loading())


def test_a_step_that_takes_the_iterator() -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with pytest.raises(MisconfigurationException, match="needs the batch as an argument"):
        fit(trainer([AutoBatch()]), Iterating())


PROCESSES = """
import sys
import lightning_runs
from oomkit.lightning import AutoBatch
class Module(lightning_runs.Classifier):
    def training_step(self, batch, batch_idx):
        print("stepped")
        return super().training_step(batch, batch_idx)
count, *protected = map(int, sys.argv[1:])
callbacks = [AutoBatch() for _ in protected]
used = lightning_runs.trainer(callbacks, strategy="ddp", devices=count)
used.fit(Module(), lightning_runs.loader())
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_strategy_of_several_processes(count: int, tmp_path: Path) -> None:
    """A real one: Lightning begins this program again as often as there are devices."""
    program = tmp_path / "program.py"
    program.write_text(PROCESSES)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(oomkit.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, str(count), "1"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0 and "stepped" not in done.stdout
    text = "works on one device, got DDPStrategy: pass devices=1 and no strategy to the Trainer"
    assert f"MisconfigurationException: AutoBatch {text}" in done.stderr


def test_the_class_is_of_the_package_in_use() -> None:
    assert issubclass(AutoBatch, lightning.pytorch.Callback)


OTHER = """
import pytorch_lightning
import sys
import warnings
assert "lightning" not in sys.modules
from oomkit.lightning import AutoBatch
assert issubclass(AutoBatch, pytorch_lightning.Callback)
import torch
from torch.nn import functional as F
class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
ours = AutoBatch(accumulation_steps=2)
data = torch.utils.data.TensorDataset(torch.ones(8, 4))
trainer = pytorch_lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, callbacks=[ours],
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
print([record.accumulation_steps for record in ours.records])
"""


def test_the_other_package_of_lightning() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[2, 2]"], done.stderr


def test_lightning_without_a_name_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lightning.pytorch.strategies, "SingleDeviceStrategy")
    with pytest.raises(
        ImportError, match=r"a name that Lightning 2\.\S+ does not have .*2.6.6, whi"
    ):
        AutoBatch()


class Copies(lightning.Callback):
    """Keeps a copy and a pickle of the module, as callbacks that average or save modules do."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        saved = io.BytesIO()
        torch.save(pl_module, saved)
        saved.seek(0)
        pickled = pickle.dumps(pl_module)
        assert b"oomkit" not in pickled
        self.kept += [copy.deepcopy(pl_module), pickle.loads(pickled)]
        shallow = copy.copy(pl_module)
        shallow._modules = copy.deepcopy(pl_module._modules)  # else its parameters are the same
        self.kept.append(shallow)
        self.kept.append(torch.load(saved, weights_only=False))


@pytest.mark.parametrize("replaced", [False, True])
def test_copies_and_pickles_of_a_module_in_training_are_their_own(replaced: bool) -> None:
    """Their steps are those of the copy, with its parameters, and hold nothing of ours."""
    module, copies = Classifier(), Copies()
    if replaced:
        module.predict_step = functools.partial(_doubled, module)
    fit(trainer([AutoBatch(accumulation_steps=2), copies]), module)
    (x, y), *_ = loader()
    before = module.predict_step((x, y), 0)
    assert len(copies.kept) == 4
    for each in copies.kept:
        torch.nn.init.zeros_(each.net[2].weight)
        torch.nn.init.zeros_(each.net[2].bias)
        if not replaced:
            assert not each.predict_step((x, y), 0).any()
        assert "oomkit" not in repr([*vars(each).values()])
        trainer([AutoBatch(accumulation_steps=2)]).fit(each, loader())
        assert each.net[2].weight.any()
    assert torch.equal(module.predict_step((x, y), 0), before)


def test_a_class_that_copies_itself() -> None:
    """Its `__deepcopy__` sees what stands in the dictionary of the module."""

    class Copied(Classifier):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            made = memo[id(self)] = type(self)()
            made.__dict__.update(copy.deepcopy({**self.__dict__, "_trainer": None}, memo))
            return made

    module, made = Copied(), []
    keep = lightning.pytorch.callbacks.LambdaCallback(
        on_train_epoch_end=lambda _, it: made.append(copy.deepcopy(it))
    )
    fit(trainer([AutoBatch(accumulation_steps=2), keep]), module)
    (x, y), *_ = loader()
    assert torch.equal(made[0].predict_step((x, y), 0), module.predict_step((x, y), 0))
    torch.nn.init.zeros_(made[0].net[2].weight)
    torch.nn.init.zeros_(made[0].net[2].bias)
    assert not made[0].predict_step((x, y), 0).any()
    assert "oomkit" not in repr([*vars(made[0]).values()])


def test_of_two_that_share_a_dictionary_none_is_copied_as_the_other() -> None:
    made = []

    def share(_: Any, module: Any) -> None:
        clone = Classifier()
        clone.__dict__ = dict(vars(module))
        for each in (clone, module):
            with pytest.raises(TypeError, match="a copy of the dictionary of a Classifier"):
                copy.copy(each)
        del clone
        made.append(copy.copy(module))

    keep = lightning.pytorch.callbacks.LambdaCallback(on_train_epoch_end=share)
    fit(trainer([AutoBatch(accumulation_steps=2), keep]), Classifier())
    assert made


def _doubled(module: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    return 2 * module.net(batch[0])


def test_a_module_that_is_copied_while_it_trains() -> None:
    """As callbacks that average weights do."""

    def average(protect: bool) -> tuple[Any, Any]:
        module = Classifier()
        callbacks = [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]
        ours = AutoBatch(accumulation_steps=2)
        used = trainer([ours, *callbacks] if protect else callbacks, max_epochs=3)
        fit(used, module)
        return module, ours

    (plain, _), (module, ours) = average(False), average(True)
    assert {r.accumulation_steps for r in ours.records} >= {2}
    for one, two in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, two)
