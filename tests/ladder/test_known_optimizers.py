"""Other packages' optimizers that are known by name: in parts they make the whole update."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.sample import sampled

import oomkit
from ladder.known import CONFIGS, Config, Program, class_of
from ladder.optimizers import same
from oomkit._ladder.known import KNOWN
from oomkit.testing import inject_oom

BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(11 + i)) for i in range(4)]
NAMES = [(module, name) for module, classes in KNOWN.items() for name in classes]

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def in_parts(config: Config) -> Program:
    """The program, whose update may be made in parts."""
    program = Program(config)
    assert oomkit.optim.is_independent(program.optimizer)
    return program


def pictures(config: Config) -> list[Any]:
    program = Program(config)
    return [(program.step(x), program.picture())[1] for x in BATCHES]


def protected(program: Program, **options: Any) -> Any:
    return oomkit.auto_batch(
        optimizer=program.optimizer, batch="x", optimizer_safety="parts", **options
    )(lambda x: program.step(x))


@pytest.mark.parametrize("module, name", NAMES)
def test_there_is_such_a_class(module: str, name: str) -> None:
    """A renamed one would no longer be known."""
    assert issubclass(class_of(module, name), torch.optim.Optimizer)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_independent(config: Config, most: int) -> None:
    """oomkit has no part in this: what is shown is what the table says of the class."""
    program = in_parts(config)
    for x, picture in zip(BATCHES, pictures(config), strict=True):
        program.step_in_parts(x, most)
        assert same(program.picture(), picture)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_oomkits_update_in_parts_is_bitwise_the_whole(config: Config) -> None:
    program = in_parts(config)
    step = protected(program)
    for x, picture in zip(BATCHES, pictures(config), strict=True):
        step(x)
        assert same(program.picture(), picture)
    assert [r.rung for r in step.records] == [1] * len(BATCHES)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_failure_anywhere_in_it_is_undone_and_it_is_made(config: Config) -> None:
    program = in_parts(config)
    step = protected(program)
    for x in BATCHES[:2]:
        step(x)
    with inject_oom(nth=10**9, phase="optimizer") as fault:
        step(BATCHES[2])
    expected = pictures(config)[2]
    for nth in sampled(range(1, fault.seen + 1), 4):
        program = in_parts(config)
        step = protected(program)
        for x in BATCHES[:2]:
            step(x)
        with inject_oom(nth=nth, phase="optimizer") as fault:
            step(BATCHES[2])
        assert fault.fired == 1, nth
        assert same(program.picture(), expected), nth


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_with_its_state_on_the_host_as_well(config: Config) -> None:
    """Parts are halved, tried again, and then each brings its own state."""
    program = in_parts(config)
    step = protected(program)
    hosted = 0
    for x, picture in zip(BATCHES, pictures(config), strict=True):
        if program.optimizer.state:
            with inject_oom(nth=1, times=3, phase="optimizer"):
                step(x)
        else:
            step(x)
        hosted += step.records[-1].rung == 2
        assert same(program.picture(), picture)
    values = [v for state in program.optimizer.state.values() for v in state.values()]
    assert hosted == 3 or not any(isinstance(v, torch.Tensor) for v in values)


@pytest.mark.parametrize(
    "module, name, options",
    [
        ("timm.optim", "Lamb", {}),
        ("timm.optim", "Adan", {}),
        ("timm.optim", "AdaBelief", {"foreach": True}),
        ("timm.optim", "LaProp", {"foreach": True}),
    ],
)
def test_what_parts_would_change_is_not_known(
    module: str, name: str, options: dict[str, Any]
) -> None:
    config = Config(module, name, options)
    program = Program(config)
    assert not oomkit.optim.is_independent(program.optimizer)
    for x in BATCHES:
        program.step_in_parts(x, 1)
    assert not same(program.picture(), pictures(config)[-1])


class TestOptions:
    """With some options a known class is not independent."""

    @pytest.mark.parametrize("version", ["1.0.22", "0.9.16", "unknown", None])
    def test_an_earlier_version(self, version: str | None, monkeypatch: Any) -> None:
        program = Program(Config("timm.optim", "RAdamLegacy", {}))
        monkeypatch.setattr(importlib.import_module("timm"), "__version__", version)
        assert not oomkit.optim.is_independent(program.optimizer)
        monkeypatch.setattr(importlib.import_module("timm"), "__version__", "1.1.0.dev0")
        assert oomkit.optim.is_independent(program.optimizer)

    def test_lists_of_several_types(self) -> None:
        program = Program(Config("timm.optim", "Lion", {"foreach": True}))
        assert oomkit.optim.is_independent(program.optimizer)
        program.params[0].data = program.params[0].data.double()
        assert not oomkit.optim.is_independent(program.optimizer)

    def test_norms_of_lists(self) -> None:
        program = Program(Config("timm.optim", "NAdamW", {"foreach": True}))
        program.optimizer.param_groups[0]["clipping_threshold"] = 1.0
        assert not oomkit.optim.is_independent(program.optimizer)

    def test_options_by_the_place_of_a_parameter(self) -> None:
        program = Program(Config("bitsandbytes.optim", "Adam8bit", {}))
        manager = program.optimizer.mng
        manager.index2config[0, 1] = {"optim_bits": 32}
        try:
            assert not oomkit.optim.is_independent(program.optimizer)
        finally:
            manager.index2config.clear()
        assert oomkit.optim.is_independent(program.optimizer)

    @pytest.mark.parametrize("name, options", [("PagedAdam", {}), ("Adam", {"is_paged": True})])
    def test_paged_state(self, name: str, options: dict[str, Any]) -> None:
        program = Program(Config("bitsandbytes.optim", name, options))
        assert not oomkit.optim.is_independent(program.optimizer)

    def test_it_can_be_taken_back(self) -> None:
        program = Program(Config("transformers.optimization", "Adafactor", {}))
        cls = type(program.optimizer)
        assert oomkit.optim.is_independent(program.optimizer)
        oomkit.register_optimizer(cls, independent=False)
        try:
            assert not oomkit.optim.is_independent(program.optimizer)
        finally:
            importlib.import_module("oomkit.optim")._registered.pop(cls)

    def test_a_subclass_is_not_known(self) -> None:
        base = class_of("transformers.optimization", "Adafactor")

        class Adafactor(base):  # type: ignore[misc]
            pass

        program = Program(Config("transformers.optimization", "Adafactor", {}))
        for module in (__name__, base.__module__):
            Adafactor.__module__ = module
            optimizer = Adafactor(program.params)
            assert not oomkit.optim.is_independent(optimizer)
