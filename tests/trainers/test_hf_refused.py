"""What `protect` refuses, by name, and versions of which names are missing.

No test here has several devices: there the attribute that transformers sets is set by hand, and
the test says which. DeepSpeed is in neither environment; its test runs where somebody has
installed it, and needs no accelerator.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import ParallelismConfig
from hf_models import lm, tokens, trainer
from test_trl_sweep import dpo, online, reward, sft

from oomkit._trainers import kept_state, names
from oomkit.transformers import protect

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _made(**more: Any) -> Any:
    return trainer(lm, tokens(), **more)


def _refused(made: Any, text: str) -> None:
    before = dict(vars(made))
    with pytest.raises(ValueError, match=rf"protect\(\) cannot protect Trainer with {text}"):
        protect(made)
    assert vars(made) == before


@pytest.mark.parametrize(
    "name", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"]
)
def test_updates_inside_the_backward(name: str) -> None:
    """Their packages are needed when the optimizer is made, not before."""
    _refused(_made(optim=name, optim_target_modules=["c_fc"]), f"optim='{name}': its updates are")


def test_sequence_parallelism() -> None:
    """A real configuration, which accelerate takes in several processes alone."""
    made = _made()
    made.accelerator.state.parallelism_config = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    try:
        _refused(made, "sequence parallelism")
    finally:
        made.accelerator.state.parallelism_config = None


def _started(program: str, *args: str) -> subprocess.Popen[str]:
    """A program that is in a group of processes.

    Args:
        program: of which the tests' own modules can be imported.
        args: of the program.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here)])
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    options = {"MASTER_PORT": "0", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env={**os.environ, **group, **options},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _alone(program: str) -> str:
    """What a program prints that is the only process of its group."""
    started = _started(program)
    said, wrong = started.communicate(timeout=300)
    assert started.returncode == 0, wrong
    return said


_SAYS = """
import sys
from hf_models import lm, tokens, trainer
from oomkit.transformers import protect
def says(made):
    before = dict(vars(made))
    try:
        protect(made)
    except ValueError as error:
        print(error)
    assert vars(made) == before
"""


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (DS_BUILD_OPS=0 pip install deepspeed)",
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed(stage: int) -> None:
    options = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": stage},
    }
    said = _alone(f"{_SAYS}\nsays(trainer(lm, tokens(), deepspeed={options}))")
    assert "protect() cannot protect Trainer with DeepSpeed" in said


def test_a_model_that_is_sharded_by_torch() -> None:
    program = """
import torch
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
made = trainer(lm, tokens())
fully_shard(made.model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
says(made)
torch.distributed.destroy_process_group()
"""
    assert "protect() cannot protect Trainer with FSDP" in _alone(_SAYS + program)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="accelerate shards a model on an accelerator alone"
)
def test_fsdp() -> None:
    said = _alone(
        f"{_SAYS}\nsays(trainer(lm, tokens(), use_cpu=False, fsdp=True,"
        'fsdp_config={"version": 2}))'
    )
    assert "protect() cannot protect Trainer with FSDP" in said


@pytest.mark.parametrize(
    ("attribute", "text"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")]
)
def test_what_transformers_says_of_itself(attribute: str, text: str) -> None:
    """The attribute is set by hand, for environments without the real ones."""
    made = _made()
    setattr(made, attribute, True)
    _refused(made, text)


def test_several_devices() -> None:
    """transformers counts the devices that it sees when it needs the first one."""
    made = _made()
    made.args._n_gpu = 2
    _refused(made, "n_gpu=2: DataParallel; set CUDA_VISIBLE_DEVICES")


def _mixture(kind: str, coefficient: str, **more: Any) -> torch.nn.Module:
    config = getattr(hf, f"{kind}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        output_router_logits=True,
        **{coefficient: 0.5},
        **more,
    )
    return getattr(hf, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("kind", "coefficient", "more"),
    [
        ("Mixtral", "router_aux_loss_coef", {}),
        ("JetMoe", "aux_loss_coef", {"kv_channels": 8, "num_experts_per_tok": 1}),
    ],
)
def test_losses_of_routers(kind: str, coefficient: str, more: dict[str, Any]) -> None:
    made = trainer(lambda: _mixture(kind, coefficient, **more), tokens())
    _refused(made, f"{coefficient}: the auxiliary loss")
    made.model.config.output_router_logits = False
    protect(made)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_losses_that_sort_the_pairs_of_a_batch(kind: str) -> None:
    """While the model is its reference, such a loss is a mean over pairs; later it is not."""
    with pytest.raises(ValueError, match=rf'DPOTrainer with loss_type="{kind}": it sorts the pai'):
        protect(dpo(loss_type=["sigmoid", kind]))


def test_a_quantile_of_the_tokens_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"GRPOTrainer with top_entropy_quantile=0\.5: a quantile"):
        protect(online(top_entropy_quantile=0.5))


def test_a_coefficient_that_changes_from_call_to_call() -> None:
    with pytest.raises(ValueError, match="GRPOTrainer with use_adaptive_entropy"):
        protect(online(use_adaptive_entropy=True))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_steps_that_generate(kind: str) -> None:
    """Their batch is a list of prompts, whose answers are compared within a group."""
    made = online(kind)
    with pytest.raises(ValueError, match=rf'{kind}Trainer with at="training_step": it generates'):
        protect(made, at="training_step")
    assert "training_step" not in vars(made)


# --- versions ---


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (sft, "_total_train_tokens"),
        (dpo, "_metrics"),
        (reward, "_metrics"),
        (online, "loss_type"),
    ],
)
def test_a_trainer_of_trl_without_a_name_that_is_used(make: Any, name: str) -> None:
    """Other versions of TRL keep their metrics elsewhere: without the name nothing is protected."""
    made = make()
    delattr(made, name)
    text = (
        rf"uses {type(made).__name__}.{name}, which trl 1\.\S+ does not have: install .* TRL 1.16"
    )
    with pytest.raises(ImportError, match=text):
        protect(made)
    assert "training_step" not in vars(made)


def test_transformers_without_a_name_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _made()
    monkeypatch.delattr(hf.Trainer, "remove_callback")
    with pytest.raises(ImportError, match=r"uses Trainer.remove_callback, which transformers 5\."):
        protect(made)
    kept_state.sizes_class.cache_clear()
    monkeypatch.delattr(sys.modules["transformers.trainer_callback"], "ExportableState")
    with pytest.raises(ImportError, match="uses TrainerCallback and ExportableState, which"):
        kept_state.sizes_class()


def test_an_unknown_version_is_said() -> None:
    assert "which nowhere of an unknown version does not have" in str(names.missing("nowhere", "x"))
