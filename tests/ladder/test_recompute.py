"""Modules that repeat are computed again in the backward: the same numbers, bit by bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled

import oomkit
from ladder.twice import LENGTH, ROWS, WIDTH, Block, Model, Ran, both, model_of, plain, worn
from oomkit._ladder.choice import refusal
from oomkit._ladder.recompute import LeftOut, recompute_begin


def test_blocks_with_dropout(again: Counter[str]) -> None:
    ran = both(model_of())
    assert again["Block"] == 4 * 3
    assert ran.handle.names == "4 x Block in Model.blocks" and ran.handle.count == 4
    assert len(ran.left_out) == 0 and ran.left_out.reasons() == []


def test_without_the_rung_nothing_is_computed_again(again: Counter[str]) -> None:
    Ran(model_of(), plain, None, 1)
    assert not again


def test_a_difference_is_found() -> None:
    class Drawn(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * next(scale)

    scale = iter([1.0] * 12 + [1.01] * 24)
    with pytest.raises(AssertionError):
        both(model_of(Drawn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(again: Counter[str], dtype: torch.dtype) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    both(model_of(), step)
    assert again["Block"] == 12


def test_tied_weights(again: Counter[str]) -> None:
    def tie(model: Any) -> None:
        model.blocks[2].wide.weight = model.blocks[0].wide.weight
        model.embed.weight = model.blocks[1].out.weight

    both(model_of(), but=tie)
    assert again["Block"] == 12


def test_a_block_that_stands_at_three_places(again: Counter[str]) -> None:
    block = Block()
    ran = both(Model([block, block, block]))
    assert again["Block"] == 9
    assert ran.handle.names == "3 x Block in Model.blocks"


def test_blocks_called_several_times_in_a_forward(again: Counter[str]) -> None:
    both(model_of(), lambda model, x: plain(_Around(model), x))
    assert again["Block"] == 12 * 3


class _Around(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.model.blocks:
                x = block(x)
        return self.model(x)


class Pair(NamedTuple):
    values: torch.Tensor
    mask: torch.Tensor | None


class Many(Block):
    """All kinds of arguments and of results."""

    def forward(
        self,
        pair: Any,
        factor: float,
        *,
        shift: Any = None,
        nested: Any = None,
        mode: str = "a",
        activation: Any = torch.tanh,
    ) -> Any:
        assert type(pair) is Pair and mode == "b" and type(nested["list"]) is list
        y = activation(super().forward(pair.values)) * factor
        y = y + nested["list"][1] + nested["pair"].values.sin()
        return Pair(y if shift is None else y + shift, None), {"rows": torch.ones(2)}, None, 3


def test_arguments_and_results_of_all_kinds(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.embed(x)
        shift = model.embed(x.flip(0))
        for i, block in enumerate(model.blocks):
            nested = {"list": [1, y.cos()], "pair": Pair(shift, None)}
            given = shift if i % 2 else None
            pair, rows, nothing, three = block(
                Pair(y, None), 0.5, shift=given, nested=nested, mode="b", activation=torch.sin
            )
            assert nothing is None and three == 3 and not rows["rows"].requires_grad
            y = pair.values
        loss: torch.Tensor = model.head(y).square().mean()
        loss.backward()
        return loss

    both(model_of(Many), step)
    assert again["Many"] == 12


def test_inputs_that_need_no_gradient_and_frozen_blocks(again: Counter[str]) -> None:
    def freeze(model: Any) -> None:
        for module in (model.embed, model.blocks[0], model.blocks[1].wide, model.blocks[3]):
            module.requires_grad_(False)

    both(model_of(), but=freeze)
    assert again["Block"] == 9  # the first one has nothing to compute again


def test_blocks_replaced_between_calls(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = plain(model, x)
        torch.manual_seed(int(loss.detach() * 1e6) % 1000)
        model.blocks[1] = Block()
        model.blocks.append(Block())
        return loss

    ran = both(model_of(), step)
    assert again["Block"] == 4 + 5 + 6
    assert ran.handle.count == 6
    assert all("forward" not in vars(block) for block in ran.model.blocks)


def test_a_list_that_no_longer_repeats(again: Counter[str]) -> None:
    model = model_of()
    handle = recompute_begin([model], LeftOut())
    del model.blocks[:2]
    with worn(handle):
        plain(model, torch.randn(ROWS, LENGTH, WIDTH))
    assert not again and handle.count == 0 and handle.names == ""


def test_torchs_encoder(again: Counter[str]) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(WIDTH, 1))

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        mask[:, -1] = True
        loss = model[1](model[0](x, src_key_padding_mask=mask)).square().mean()
        loss.backward()
        model.eval()
        with torch.no_grad():
            loss = loss + model(x).sum()  # the fast path
        model.train()
        return loss

    ran = both(model, step)
    assert again["TransformerEncoderLayer"] == 12
    assert ran.handle.names == "4 x TransformerEncoderLayer in Sequential.0.layers"


def test_a_sequential_of_blocks_and_other_layers(again: Counter[str]) -> None:
    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    model = nn.Sequential(part(), nn.Tanh(), part(), nn.Tanh(), part(), nn.Linear(WIDTH, 1))

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    ran = both(model, step)
    assert again["Sequential"] == 9
    assert ran.handle.names == "3 x Sequential in Sequential"


def test_layers_of_torchs_that_keep_their_input_are_not_worth_it() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert recompute_begin([model], LeftOut()) is None
    assert recompute_begin([nn.ModuleList([Block(), Block()])], LeftOut()) is None


def test_recurrent_layers(again: Counter[str]) -> None:
    model = model_of(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), 3)

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x, _ = block(x)
        loss: torch.Tensor = x.square().mean()
        loss.backward()
        return loss

    both(model, step)
    assert again["GRU"] == 9


def test_a_generator_of_cudnns_cannot_be_put_back() -> None:
    """Dropout between layers of an RNN: on a device a second forward would draw another one."""

    def reason(device: str, **options: Any) -> str | None:
        return refusal(nn.LSTM(WIDTH, WIDTH, device=device, **options))

    assert "state of cuDNN" in str(reason("meta", num_layers=2, dropout=0.1))
    assert reason("cpu", num_layers=2, dropout=0.1) is None
    assert reason("meta", num_layers=2) is None
    assert refusal(nn.LSTM(4, 4, 2, dropout=0.1, device="meta").eval()) is None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_only_the_outermost_level(again: Counter[str]) -> None:
    model = model_of(Stage, 3)
    both(model)
    assert again == {"Stage": 9}
    left_out = LeftOut()
    for stage in model.blocks:
        left_out.add(stage, "said so")
    handle = recompute_begin([model], left_out)
    assert handle.count == 9 and handle.names.startswith("3 x Block in Model.blocks.0.parts, ")
    assert left_out.reasons() == ["a Stage said so"]


def test_modules_given_one_by_one_count_as_what_they_are_part_of() -> None:
    model = model_of(Stage, 3)
    handle = recompute_begin([*model.blocks[0].modules(), *model.modules()], LeftOut())
    assert handle.names == "3 x Stage in Model.blocks"


def test_evaluation_and_no_grad_are_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = model(x)
        model.eval()
        total = loss + plain(model, x)
        model.train()
        return total

    both(model_of(), step)
    assert not again


def test_hooks_of_the_block_itself_run_once(again: Counter[str]) -> None:
    calls: list[str] = []
    model = model_of()
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda *_: calls.append("pre"))
    block.register_forward_hook(lambda *_: calls.append("forward"))
    block.register_full_backward_pre_hook(lambda *_: calls.append("backward pre"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    both(model, calls=1)
    assert again["Block"] == 4
    assert calls == ["pre", "forward", "backward pre", "backward"] * 2  # plainly, and with it


def test_hooks_on_tensors_in_a_forward_run_once(again: Counter[str]) -> None:
    class Hooked(Block):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient * 2)
            return y

    both(model_of(Hooked))
    assert again["Hooked"] == 12


def test_a_forward_of_the_instances_own_is_called_and_put_back(again: Counter[str]) -> None:
    def twice(block: Block, x: torch.Tensor) -> torch.Tensor:
        return type(block).forward(block, x) * 2

    def own(model: Any) -> None:
        model.blocks[0].forward = partial(twice, model.blocks[0])

    ran = both(model_of(), but=own)
    assert again["Block"] == 12
    assert type(vars(ran.model.blocks[0])["forward"]) is partial
    assert all("forward" not in vars(block) for block in ran.model.blocks[1:])


def test_leave_leaves_what_somebody_else_has_put_there() -> None:
    model = model_of()
    handle = recompute_begin([model], LeftOut())
    handle.enter()
    handle.enter()
    before = vars(model.blocks[0])["forward"]
    model.blocks[0].forward = partial(before)
    handle.leave()
    handle.leave()
    assert type(vars(model.blocks[0]).pop("forward")) is partial
    assert all("forward" not in vars(block) for block in model.blocks)


def test_two_calls_at_once(again: Counter[str]) -> None:
    model = model_of()
    inner, outer = (recompute_begin([model], LeftOut()) for _ in range(2))
    with worn(outer):
        with worn(inner):
            plain(model, torch.randn(ROWS, LENGTH, WIDTH))
        assert again["Block"] == 4
        plain(model, torch.randn(ROWS, LENGTH, WIDTH))
    assert again["Block"] == 8
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor) -> Any:
            super().forward(x)
            raise torch.OutOfMemoryError("no memory for it")

    model = model_of(Failing)
    handle = recompute_begin([model], LeftOut())
    with pytest.raises(torch.OutOfMemoryError, match="no memory for it"), worn(handle):
        plain(model, torch.randn(ROWS, LENGTH, WIDTH))
    assert all("forward" not in vars(block) for block in model.blocks)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Stubborn(Block):
    """Cannot be computed twice, so that all that it saves is kept."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Block, Stubborn])
@pytest.mark.parametrize("fails", [True, False])
def test_memory_of_a_graph_that_is_given_up_is_free_without_a_collector(
    kind: type[Block], fails: bool
) -> None:
    model = model_of(kind)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    if fails:  # in the last block's last layer, when everything else is saved
        model.blocks[-1].narrow.register_forward_hook(_fail)  # type: ignore[union-attr]
    handle = recompute_begin([model], LeftOut())
    with worn(recompute_begin([one := model_of(kind)], LeftOut())):
        one(x)  # torch imports more of itself in its first checkpoint
    gc.collect()
    gc.disable()
    try:
        with oomkit.limit_memory(2**40, device="cpu"):
            before = oomkit.memory("cpu").allocated
            with worn(handle):
                try:
                    model(x)
                except torch.OutOfMemoryError as error:
                    error.__traceback__ = None
            assert oomkit.memory("cpu").allocated == before
    finally:
        gc.enable()


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory for it")


# --- the backward ---


def test_gradients_of_gradients(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for block in model.blocks:
            x.retain_grad()
            x = block(x).tanh()
        loss: torch.Tensor = model.head(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads) + loss
        penalty.backward(retain_graph=True)
        penalty.backward()
        return penalty

    with sdpa_kernel(SDPBackend.MATH):
        both(model_of(), step)
    assert again["Block"] == 24


def test_a_gradient_inside_a_forward(again: Counter[str]) -> None:
    class Energy(Block):
        def forward(self, x: torch.Tensor) -> Any:
            x = x if x.requires_grad else x.requires_grad_()
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.tanh()

    with sdpa_kernel(SDPBackend.MATH):
        both(model_of(Energy))
    assert again["Energy"] >= 12


def test_a_backward_after_the_call(again: Counter[str]) -> None:
    losses: list[torch.Tensor] = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        if losses:
            losses.pop().backward()
        losses.append(loss)
        return loss

    model = model_of()
    handle = recompute_begin([model], LeftOut())
    with worn(handle):
        step(model, torch.randn(ROWS, LENGTH, WIDTH))
    assert not again
    losses.pop().backward()
    assert again["Block"] == 4
    assert all("forward" not in vars(block) for block in model.blocks)


def _with_attributes(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    model.eval()
    for block in model.blocks:
        block.heads = 1
    loss.backward()
    assert not model.blocks[0].training and model.blocks[0].heads == 1
    model.train()
    for block in model.blocks:
        block.heads = 2
    return loss


def test_attributes_changed_between_forward_and_backward(again: Counter[str]) -> None:
    both(model_of(), _with_attributes)
    assert again["Block"] == 12


def test_parameters_that_stood_there_in_the_forward_only(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mine = {name: p * 1.5 for name, p in model.named_parameters()}
        loss: torch.Tensor = torch.func.functional_call(model, mine, (x,))
        loss.backward()
        return loss

    both(model_of(), step)
    assert again["Block"] == 12


def test_attention_chosen_around_the_forward_only(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    both(model_of(), step)
    assert again["Block"] == 12


# --- with saved-tensor hooks and checkpoints of others ---


def _outside(step: Any, packed: list[int]) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.detach().clone()

    def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy):
            loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    return hooked


def test_inputs_of_blocks_go_through_the_hooks_of_others(again: Counter[str]) -> None:
    packed: list[int] = []
    both(model_of(), _outside(plain, packed), calls=1)
    whole = len(packed)
    assert again["Block"] == 4
    packed.clear()
    Ran(model_of(), _outside(plain, packed), None, 1)
    assert 4 <= whole - len(packed) < 12  # the inputs, and what is outside the blocks


def test_a_block_that_is_kept_goes_through_the_hooks_of_others(again: Counter[str]) -> None:
    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    packed: list[int] = []
    both(model_of(Counting), _outside(plain, packed), calls=1)
    whole = len(packed)
    packed.clear()
    Ran(model_of(Counting), _outside(plain, packed), None, 1)
    assert not again
    assert whole - len(packed) == len(packed) + 4  # and the inputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_around_blocks(again: Counter[str], reentrant: bool) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.embed(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        loss: torch.Tensor = x.square().mean()
        loss.backward()
        return loss

    both(model_of(), step)
    assert not again


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_in_blocks(again: Counter[str], reentrant: bool) -> None:
    class Inside(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=reentrant) + x

    both(model_of(Inside))
    assert again["Inside"] == 12


def test_a_transform_of_torch_func_is_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        named = dict(model.named_parameters())

        def loss_of(params: Any) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(model, params, (x,))
            return found

        grads = torch.func.grad(loss_of)(named)
        for name, parameter in named.items():
            parameter.grad = grads[name]
        return loss_of(named).detach()

    both(model_of(), step)
    assert not again


def test_vmap_is_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.vmap(model, randomness="different")(x.unsqueeze(1))
        loss: torch.Tensor = rows.sum()
        loss.backward()
        return loss

    with sdpa_kernel(SDPBackend.MATH):
        both(model_of(), step)
    assert not again


def test_a_place_without_saved_tensor_hooks_is_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return plain(model, x)

    both(model_of(), step)
    assert not again


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_forward_mode_is_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            loss: torch.Tensor = model(dual)
            loss = loss + torch.autograd.forward_ad.unpack_dual(loss).tangent
            loss.backward()
        return loss

    both(model_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), step)
    assert not again


def test_a_dispatch_mode_sees_a_plain_forward(again: Counter[str]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops: list[int] = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = plain(model, x)
        flops.append(counter.get_total_flops())
        return loss

    both(model_of(), step)
    assert not again and len(set(flops)) == 1


def test_debugging_torchs_checkpoints_is_plain(again: Counter[str]) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_debug_enabled(True):
            return plain(model, x)

    both(model_of(), step)
    assert not again


# --- copies, pickles, and what is held ---


def test_between_calls_nothing_shows() -> None:
    model = model_of()
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    keys, pickled = list(model.state_dict()), pickle.dumps(model)
    handle = recompute_begin([model], LeftOut())
    with worn(handle):
        assert list(model.state_dict()) == keys
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert pickle.dumps(model) == pickled


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("own", [False, True])
def test_a_copy_made_in_a_call_is_plain(again: Counter[str], how: str, own: bool) -> None:
    model = model_of()
    if own:
        model.blocks[1].forward = Block.forward.__get__(model.blocks[1])
    handle = recompute_begin([model], LeftOut())
    with worn(handle):
        if how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
    for mine, its in zip(model.blocks, other.blocks, strict=True):
        assert its.forward.__self__ is its and its is not mine
        assert its.forward.__func__ is Block.forward
    plain(other, torch.randn(ROWS, LENGTH, WIDTH))
    assert not again


def test_what_stands_there_looks_like_the_forward() -> None:
    import inspect

    model = model_of()
    signature = inspect.signature(model.blocks[0].forward)
    with worn(recompute_begin([model], LeftOut())):
        forward = model.blocks[0].forward
        assert inspect.signature(forward) == signature
        assert forward.__func__ is Block.forward and forward.__name__ == "forward"


# --- transformers ---


def _llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=3, n_head=2)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("make", [_llama, _gpt2])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_models_of_transformers(again: Counter[str], make: Any, cache: bool, own: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = make(transformers).train()
    kind = "LlamaDecoderLayer" if make is _llama else "GPT2Block"
    if own:
        model.gradient_checkpointing_enable()

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        ids = (x[..., 0].abs() * 10).long() % 50
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=cache).loss
        loss.backward()
        return loss

    if own:  # by itself
        assert recompute_begin([model], LeftOut()) is None
        return
    ran = both(model, step)
    assert again[kind] == (0 if cache else 9)
    if cache:
        assert ran.left_out.reasons() == [f"a {kind} is given a DynamicCache"]
