"""Steps over DistributedDataParallel of other shapes than those that are swept."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import equal, gradients, prepare, raised
from .ddp import Again


def _undecorated(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor
) -> list[list[float]]:
    """Gradients that torch alone gives; parameters stay."""
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    found = gradients(model)
    optimizer.zero_grad()
    return found


def split_from_the_start(rank: Rank) -> list[Any]:
    """accumulation_steps= on one rank, another number on the other, with the proof."""
    model, optimizer, x, y = prepare(rank)
    expected = _undecorated(model, optimizer, x, y)

    @oomkit.auto_batch(accumulation_steps=2 + 2 * rank.rank)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    step(x, y)
    return [equal(gradients(model), expected), step.records[-1].accumulation_steps]


def synchronised_in_part(rank: Rank) -> list[float]:
    """Steps with two backwards, of which the first one synchronises nothing; one rank fails."""
    _, _, x, y = prepare(rank)
    found = []
    for phase, nth in (("forward", 2), ("backward", 2), ("backward", 6)):
        trained = []
        for decorated in (False, True):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(
                x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer
            ) -> None:
                optimizer.zero_grad()
                with model.no_sync():
                    F.mse_loss(model(x), y).backward()
                F.mse_loss(model(2 * x), y).backward()
                optimizer.step()

            if decorated:
                step = oomkit.auto_batch(step, verify=False)
            for index in range(3):
                fails = decorated and index == 1 and rank.rank == 1
                with inject_oom(nth=nth, phase=phase) if fails else contextlib.nullcontext():
                    step(x, y)
            trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        found.append(float((trained[0] - trained[1]).abs().max()))
    return found


def fails_after_its_flag(rank: Rank) -> list[str]:
    """An error in a step that has set its model's mode itself, and one of the step after it."""
    model, _, x, y = prepare(rank)
    ddp: Any = model

    @oomkit.auto_batch(verify=False, model=model)
    def step(x: torch.Tensor, y: torch.Tensor, fails: bool) -> None:
        ddp.require_backward_grad_sync = True
        if fails:
            raise ValueError("a label that there is not")
        F.mse_loss(model(x), y).backward()

    found = []
    for fails in (rank.rank == 1, False):
        ddp.require_backward_grad_sync = False
        found.append(raised(lambda fails=fails: step(x, y, fails)))
    return found


def said_of_a_split(rank: Rank) -> list[str]:
    """Warnings of the first and of a later step, where the batch is split."""
    _, _, x, y = prepare(rank)
    found = []
    for static, fails, verify in itertools.product((False, True), (0, 1), (None, False)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model = DistributedDataParallel(net, static_graph=static)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(
            x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        decorated = oomkit.auto_batch(step, verify=verify)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(2):
                with inject_oom(nth=1) if index == fails else contextlib.nullcontext():
                    decorated(x, y)
        found += [str(warning.message) for warning in caught]
    return found


def fails_at_entry(rank: Rank) -> list[Any]:
    """Calls whose first collectives fail, of one of two models: the other is left as it was."""
    _, _, x, y = prepare(rank)
    models = [
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))) for _ in range(2)
    ]
    nets: Any = [model.module for model in models]
    found: list[Any] = []

    @oomkit.auto_batch(model=models)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(models[0](x) + models[1](x), y).backward()

    for broken, other in ((0, 1), (1, 0)):
        mean = nets[broken][1].running_mean
        nets[broken][1].running_mean = torch.zeros(2).to_sparse()  # torch broadcasts none
        found.append(raised(lambda: step(x, y)))
        nets[broken][1].running_mean = mean
        nets[other][1].running_mean.fill_(100.0 * rank.rank)
        models[other](x)  # which broadcasts what rank 0 has
        found.append(float(nets[other][1].running_mean.abs().max()) < 10.0)
    return found


def _own(model: nn.Module) -> list[list[float]]:
    """This rank's part of gradients and parameters."""
    found = [t for p in model.parameters() for t in (p.grad, p.detach()) if t is not None]
    return [getattr(t, "to_local", lambda t=t: t)().flatten().tolist() for t in found]


def later_rows(rank: Rank) -> list[Any]:
    """A term that one rank's rows have, in micro-batch `at` of 4: its split is proven for them."""
    given = rank.arguments
    _, _, x, y = prepare(rank)
    marked = x[2 * given["at"]] if rank.rank == 1 else torch.full((4,), 9.0)

    def train(**options: Any) -> tuple[str, list[list[float]]]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        if given["sharded"]:
            from torch.distributed.fsdp import fully_shard

            model = fully_shard(model)
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=0.0002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(x: torch.Tensor, y: torch.Tensor) -> None:
            out = model(x)
            loss = F.mse_loss(out, y)
            here = (x == marked).all(1)
            if here.any() and given["coupled"]:
                loss = loss + (out - out.mean(0)).square().sum().sqrt()
            elif here.any():
                loss = loss + (here.double() * out.square().mean(1)).mean()
            loss.backward()
            if given["updates"]:
                optimizer.step()

        step = oomkit.auto_batch(body, model=model, **options) if options else body
        said = raised(lambda: step(x, y))
        return said, _own(model)

    said, ours = train(accumulation_steps=4)
    return [said, given["coupled"] or equal(ours, train()[1])]


def returned_loss(rank: Rank) -> list[Any]:
    """The caller runs backward: as torch alone; and refused by name once memory lacks."""
    model, optimizer, x, y = prepare(rank)
    expected = _undecorated(model, optimizer, x, y)

    @oomkit.auto_batch
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    right = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        right.append(equal(gradients(model), expected))

    def fails() -> None:
        with inject_oom(nth=2):
            loss_of(x, y)

    return [right, raised(fails)]


def own_collective(rank: Rank) -> list[Any]:
    """A metric that is reduced before the update: fine while all are well, else an error on all."""
    model, optimizer, x, y = prepare(rank)
    expected = _undecorated(model, optimizer, x, y)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        loss.backward()
        return mean

    optimizer.zero_grad()
    step(x, y)
    right = equal(gradients(model), expected)

    def fails() -> None:
        if rank.rank == rank.arguments["fails"]:
            with inject_oom(nth=rank.arguments["nth"], phase=rank.arguments["phase"]):
                step(x, y)
        else:
            step(x, y)

    return [right, raised(fails)]


def buckets(rank: Rank) -> list[Any]:
    """In what order torch has made its buckets anew, of the bare step and of a decorated one."""
    prepare(rank)
    made = []
    for decorate in (lambda step: step, oomkit.auto_batch):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.0015)

        def step(x: torch.Tensor, model: nn.Module = model) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        step = decorate(step)
        for _ in range(3):
            step(torch.ones(8, 8))
        made.append(model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return made


def waiting(rank: Rank) -> list[Any]:
    """An error of one rank while the other one is in a collective of the step's own."""
    model, _, x, y = prepare(rank)
    if rank.arguments["sharded"]:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, waits, bad = dist.new_group(), rank.arguments["waits"], False

    def collective(loss: torch.Tensor) -> None:
        if bad and rank.rank == 1:
            dist.all_reduce("a loss", group=group)
        elif waits.startswith("later"):
            work: Any = dist.all_reduce(loss.detach().clone(), group=group, async_op=True)
            work.wait(*[datetime.timedelta(seconds=20)] * waits.endswith("limit"))
        else:
            dist.all_reduce(loss.detach().clone(), group=group)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        collective(loss)
        loss.backward()
        optimizer.step()

    found = [raised(lambda: step(x, y))]
    bad = True
    found.append(raised(lambda: step(x, y)))
    dist.all_reduce(torch.zeros(()))  # in the default group: nobody has ended
    return found


def after_the_update(rank: Rank) -> list[Any]:
    """A collective after the update is nobody's affair, in a step that is split, too."""
    model, optimizer, x, y = prepare(rank)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if oomkit.current().is_last:
            mean = loss.detach().clone()
            dist.all_reduce(mean)

    step(x, y)
    if rank.rank == 0:
        with inject_oom(nth=1):
            step(x, y)
    else:
        step(x, y)
    return [step.records[-1].accumulation_steps]


def hidden_optimizer(rank: Rank) -> list[Any]:
    """An optimizer that the search does not find: nobody updates before all are there."""
    model, optimizer, x, y = prepare(rank)
    box = iter([optimizer] * 3)
    start = [p.detach().clone() for p in model.parameters()]

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        clip()
        next(box).step()

    step = oomkit.auto_batch(body, verify=False, model=model)

    def fails() -> None:
        if rank.rank == 1:  # in clip(): the others have their gradients
            with inject_oom(nth=1, phase="backward"):
                step(x, y)
        else:
            step(x, y)

    said = raised(fails)
    moved = any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    return [said, moved]


def out_of_ways(rank: Rank) -> list[Any]:
    """One rank has no memory for anything: an error on all, and parameters as they were."""
    model, optimizer, x, y = prepare(rank)
    start = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch(verify=False, ladder=())
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def fails() -> None:
        if rank.rank == 1:
            with inject_oom(nth=1, times=None, phase="backward"):
                step(x, y)
        else:
            step(x, y)

    said = raised(fails)
    return [said, all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))]


class _Rows(nn.Module):
    """Sums of rows, whatever is in it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).sum(1)
        return out


def _tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = _Rows()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"layers.0": ColwiseParallel()})


class DeepSpeedEngine(_Rows):
    """By its name: DeepSpeed itself wants a compiler and a device."""


class MegatronModule(_Rows):
    """By its name, too: Megatron wants a device."""


def _refused_ddp(how: str) -> Any:
    if how == "tensor parallel":
        return _tensor_parallel()
    if how in ("deepspeed", "megatron"):
        return DeepSpeedEngine() if how == "deepspeed" else MegatronModule()
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(_Rows(), device_id=torch.device("cpu"))
    if how == "sparse":
        return DistributedDataParallel(nn.EmbeddingBag(10, 2, sparse=True))
    given: dict[str, Any] = {"static_graph": how.startswith("static")}
    if how == "subgroup":
        given["process_group"] = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    rows = _Rows()
    if how == "delayed":
        weight, bias = rows.named_parameters()
        given |= {"delay_all_reduce_named_params": [weight], "param_to_hook_all_reduce": bias[1]}
    model = DistributedDataParallel(rows, **given)
    if how in ("static, joined", "joined, another torch"):
        model.join()
    elif how == "joined second":
        Join([DistributedDataParallel(_Rows()), model])
    elif how == "static, built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif how == "buffer hook":
        model._register_buffer_comm_hook(None, lambda state, buffers: None)
    elif how == "sync batch norm":  # torch lets it in on CPUs in no other way
        model.module.layers.append(nn.SyncBatchNorm(2).eval())
    elif how == "updates":
        _update_in_backward(model)
    return model


def _update_in_backward(model: nn.Module) -> None:
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def update(p: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)


def _needs(how: str, needed: bool) -> None:
    """Whether oomkit uses one more private name of torch's."""
    from oomkit._ranks import joins, reducer, sharded
    from oomkit._ranks.private import REDUCER

    used: tuple[dict[Any, str], Any] = {
        "fsdp, another torch": (sharded._NAMES, "FSDPParam"),
        "another torch": (reducer._USED, REDUCER),
        "static, another torch": (reducer._USED_BY_STATIC, REDUCER),
        "joined, another torch": (joins._USED, Join),
    }[how]
    of, kind = used
    name = f"a_name_of_{how.partition(',')[0].replace(' ', '_')}"
    of[kind] = " ".join([of[kind].partition(" a_name")[0], *[name][:needed]])


def _refused_fsdp(how: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    rows: Any = _Rows()
    if how == "fsdp, sync batch norm":
        rows.layers.append(nn.SyncBatchNorm(2).eval())
    model: Any = fully_shard(rows)
    {
        "fsdp, sync batch norm": lambda: None,
        "fsdp, updates": lambda: _update_in_backward(model),
        "fsdp, kept": lambda: model.set_reshard_after_backward(False),
        "fsdp, replicas": lambda: model.set_requires_all_reduce(False),
        "fsdp, open": lambda: model.set_is_last_backward(False),
        "fsdp, another torch": lambda: None,
        "fsdp, hook": lambda: model.set_all_reduce_hook(lambda tensor: None),
    }[how]()
    return model


def refused(rank: Rank) -> list[str]:
    """What is not agreed on, found at the first call, which runs as it is."""
    from oomkit._ranks import agreement

    rank.votes_by()
    rank.join()
    found = []
    for how in rank.arguments["how"]:
        agreement._said.clear()  # each reason is said once
        torch.manual_seed(0)
        if how.endswith("another torch"):
            _needs(how, True)
        model = _refused_fsdp(how) if how.startswith("fsdp, ") else _refused_ddp(how)
        x = torch.randint(0, 10, (4, 3)) if how == "sparse" else torch.randn(4, 4)
        other = None
        if how == "two joined":
            other = DistributedDataParallel(_Rows())
            Join([model, other])

        @oomkit.auto_batch
        def step(x: torch.Tensor, model: Any = model, also: Any = other) -> None:
            model(x).sum().backward()
            if also is not None:
                also(x).sum().backward()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(x)
        found.append(" ".join(str(w.message) for w in caught if "not retried" in str(w.message)))
        if how.endswith("another torch"):
            _needs(how, False)
    return found


class _Static:
    """A model with static_graph=True, and a step that fails once where it is told."""

    def __init__(self, rank: Rank, fails: str = "") -> None:
        self.rank, self.fails = rank.rank, fails
        self.once = iter([rank.rank == 1])
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Again(), static_graph=True, bucket_cap_mb=0.0003)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _may_fail(self, where: str) -> None:
        if self.fails == where and next(self.once, False):
            if where == "caught":
                raise ValueError("a label that there is not")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x, self.rank), y)
        self._may_fail("forward")
        loss.backward()
        self._may_fail("caught")
        self._may_fail("between")
        self.optimizer.step()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x, self.rank), y)

    def run(self, plain: Any, steps: int, *data: torch.Tensor) -> list[list[float]]:
        """Parameters after steps that are decorated, but for those before."""
        step = oomkit.auto_batch(self.step, verify=False, model=self.model)
        for index in range(steps):
            (plain if plain is not None and index < 1 else step)(*data)
        return _own(self.model)


@contextlib.contextmanager
def _fails_in_reduction(nth: int) -> Iterator[None]:
    """The first reduction of this rank fails once, in one of its backwards that add nothing."""
    from oomkit._ranks import reducer

    real, runs = reducer._run, iter(range(1, 1000))

    def run(root: torch.Tensor) -> None:
        if next(runs) == nth:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        real(root)

    reducer._run = run
    try:
        yield
    finally:
        reducer._run = real


def static_graph(rank: Rank) -> dict[str, float]:
    """How far parameters are from those of torch alone after steps over such a model."""
    prepare(rank)
    x, y = torch.randn(8, 6), torch.randn(8, 3)

    def outside(*data: torch.Tensor) -> None:
        of.step(*data)

    def returned(*data: torch.Tensor) -> None:
        of.optimizer.zero_grad()
        oomkit.auto_batch(of.loss, model=of.model)(*data).backward()
        of.optimizer.step()

    def caught(*data: torch.Tensor) -> None:
        with contextlib.suppress(ValueError, oomkit.RankError):
            oomkit.auto_batch(of.step, verify=False, model=of.model)(*data)
        of.step(*data)

    plain: dict[str, Any] = {"outside": outside, "returned": returned, "caught": caught}
    alone = _Static(rank)
    for _ in range(3):
        alone.step(x, y)
    expected = _own(alone.model)
    found = {}
    for name in ("healthy", "forward", "between", "reduction 1", "reduction 2", *plain):
        of = _Static(rank, name)
        failing = name.startswith("reduction") and rank.rank == 1
        with _fails_in_reduction(int(name[-1])) if failing else contextlib.nullcontext():
            ours = of.run(plain.get(name), 3, x, y)
        found[name] = max(
            abs(a - b)
            for one, other in zip(ours, expected, strict=True)
            for a, b in zip(one, other, strict=True)
        )
    return found


class _Changing(nn.Module):
    """Parts of it from `used` on are used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 2) for _ in range(2)])
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x) for part in self.parts[self.used :]), torch.zeros(()))


def static_that_changes(rank: Rank) -> list[str]:
    """A graph that is not static, in a later step that is split: an error, as with torch alone."""
    prepare(rank)
    x = torch.randn(8, 4)
    found = []
    for first, later in ((1, 0), (0, 1)):
        torch.manual_seed(0)
        net = _Changing()
        model = DistributedDataParallel(net, static_graph=True)
        net.used = first

        @oomkit.auto_batch(verify=False, model=model)
        def step(x: torch.Tensor, model: Any = model) -> None:
            model(x).square().mean().backward()

        step(x)
        net.used = later if rank.rank == 1 else first

        def fails(step: Any = step) -> None:
            with inject_oom(nth=1) if rank.rank == 1 else contextlib.nullcontext():
                step(x)

        found.append(raised(fails))
    return found


class _Pipeline:
    """Two stages of torch's, one on each rank, with what each of them is given."""

    def __init__(self, rank: Rank) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        torch.manual_seed(0)
        self.model = [nn.Linear(4, 8), nn.Linear(8, 2)][rank.rank]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        stage = PipelineStage(self.model, rank.rank, rank.world, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        _ = self.schedule.step(x) if dist.get_rank() == 0 else self.schedule.step(target=y)
        self.optimizer.step()


def pipelined(rank: Rank) -> list[Any]:
    """A pipeline that a step finds in its object, in its closure or in its arguments: as torch
    alone. What is said of it."""
    prepare(rank)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    bare, bound, closed, given = (_Pipeline(rank) for _ in range(4))
    bare.step(x, y)

    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        closed.step(x, y)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        oomkit.auto_batch(bound.step)(x, y)
        oomkit.auto_batch(body)(x, y)
        oomkit.auto_batch(_Pipeline.step, label="given")(given, x, y)
    same = [
        all(map(torch.equal, bare.model.parameters(), one.model.parameters()))
        for one in (bound, closed, given)
    ]
    return [same, [str(w.message) for w in caught if "not retried" in str(w.message)]]


def _counting_hook(state: list[int], bucket: Any) -> Any:
    """Of the user's own, with a state."""
    state.append(bucket.index())
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda found: found.value()[0])


_counting_hook.__annotations__.clear()  # texts, which torch does not take for types


def caught(rank: Rank) -> list[Any]:
    """An error that a program catches on one rank, and goes on: others get theirs at once, and go
    on, too."""
    model, optimizer, x, y = prepare(rank)
    if rank.arguments.get("sharded"):
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bad, early = False, rank.arguments.get("early", False)
    other: Any = None
    if rank.arguments.get("models"):
        other = DistributedDataParallel(nn.Linear(2, 2))
    if rank.arguments.get("hook"):
        model.register_comm_hook([], _counting_hook)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        if bad and early:
            raise ValueError("a label that there is not")
        out = model(x)
        loss = F.mse_loss(out if other is None else other(out), y)
        if bad:
            raise ValueError("a label that there is not")
        loss.backward()
        optimizer.step()

    said, took = [], 0.0
    for index in range(4):
        bad = index == 2 and rank.rank in rank.arguments.get("fail", [1])
        begin = time.monotonic()
        said.append(raised(lambda: step(x, y)))
        if index == 2:
            took = time.monotonic() - begin
    return [said, took]


def clipped(rank: Rank) -> list[Any]:
    """Norms of gradients that are sharded, in a step that begins again: whole on one rank. The
    other one fails in its forward, or when the first has come to the norm."""
    from torch.distributed.fsdp import fully_shard

    prepare(rank)
    found = []
    for fails in ("nowhere", "forward", "norm"):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank.rank + 1)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        once = iter([rank.rank == 1 and fails == "norm"])

        @oomkit.auto_batch(verify=False, model=model)
        def step(x: torch.Tensor, y: torch.Tensor, opt: Any = optimizer, once: Any = once) -> Any:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()  # noqa: B023
            if next(once, False):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: B023
            opt.step()

        failing = fails == "forward" and rank.rank == 1
        with inject_oom(nth=2) if failing else contextlib.nullcontext():
            step(x, y)
        found.append([p.full_tensor().flatten().tolist() for p in model.parameters()])
    split = step.records[-1].accumulation_steps
    return [equal(found[0], found[1]), equal(found[0], found[2]), split]


def cleared(rank: Rank) -> list[Any]:
    """One rank fails at each place of a backward over parameters that are gathered together:
    gradients of some are there, and are not added to those of the next attempt."""
    from torch.distributed.fsdp import fully_shard

    prepare(rank)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model: Any = fully_shard(nn.Sequential(*layers))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank.rank))

    def body(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    body(x)
    expected = [p.grad.full_tensor() for p in model.parameters()]
    wrong, failed = [], 0
    for nth in range(1, 40):
        step = oomkit.auto_batch(lambda x: body(x), verify=False, model=model)
        with inject_oom(nth=nth, phase="backward") if rank.rank == 1 else contextlib.nullcontext():
            step(x)
        found = [p.grad.full_tensor() for p in model.parameters()]
        if not all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(nth)
        fired = torch.tensor(step.records[-1].ooms)
        dist.all_reduce(fired)
        if not fired:
            break
        failed += 1
    return [wrong, failed > 5]


def first_gather(rank: Rank) -> list[Any]:
    """A rank fails in the first gather that there is, with the others in the end of their
    backward: it takes part in that without a parameter that was gathered."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )

    prepare(rank)
    torch.manual_seed(0)
    store: Any = dist.distributed_c10d._get_default_store()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    expected = [p.detach().clone() for p in net.parameters()]
    model: Any = fully_shard(net)
    failed = []

    class Gather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            done = super().__call__(*args, **kwargs)
            if rank.rank == 1 and not failed:
                failed.append(True)
                store.wait(["in the end"])
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return done

    class Scatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            store.set("in the end", "")
            return super().__call__(*args, **kwargs)

    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Scatter())
    x = torch.randn(8, 4)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    step(x)
    found = [p.full_tensor() for p in model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    again = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for p, kept in zip(again.parameters(), expected, strict=True):
        p.data.copy_(kept)
    again(x).square().mean().backward()
    right = [torch.allclose(g, p.grad) for g, p in zip(gradients, again.parameters(), strict=True)]
    return [same, all(right), step.records[-1].attempts, len(failed)]


def accumulated(rank: Rank) -> list[Any]:
    """Gradients that stay on each rank until those of a later backward: of the next call, or of
    the same one. One rank fails, with a loss that is a sum, which a proof finds out. Largest
    difference of gradients, and micro-batches of the calls."""
    from torch.distributed.fsdp import fully_shard

    prepare(rank)
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    torch.manual_seed(rank.rank + 1)
    x = torch.randn(8, 4)

    def body(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    def both(x: torch.Tensor) -> None:
        for index in range(2):
            model.set_requires_gradient_sync(index == 1)
            body(x)

    def gradients(step: Any, fails: int | None) -> list[torch.Tensor]:
        model.zero_grad()
        for index in range(2):
            model.set_requires_gradient_sync(index == 1)
            failing = fails == index and rank.rank == 1
            with inject_oom(nth=2) if failing else contextlib.nullcontext():
                step(x)
        return [p.grad.full_tensor() for p in model.parameters()]

    found = []
    for plain, fails in ((body, 0), (body, 1), (both, 1)):
        expected = gradients(plain, None)
        step = oomkit.auto_batch(lambda x, plain=plain: plain(x), model=model)
        ours = gradients(step, fails)
        far = max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))
        found.append([far, [record.accumulation_steps for record in step.records]])
    return found
