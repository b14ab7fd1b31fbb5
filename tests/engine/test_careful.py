"""A step that updates at several places is not left half done where that can be helped."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:oomkit")


class Gan:
    def __init__(self, every: int = 1, **options: Any) -> None:
        """The second network is stepped in each so many-th call."""
        torch.manual_seed(0)
        middle = [m for _ in range(6) for m in (nn.Linear(128, 128), nn.ReLU())]
        self.judges = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.makes = nn.Sequential(nn.Linear(32, 128), *middle, nn.Linear(128, 32))
        judges, makes = self.judges, self.makes
        first = torch.optim.Adam(judges.parameters())
        second = torch.optim.Adam(makes.parameters())
        self.optimizers = first, second

        def step(x: torch.Tensor, z: torch.Tensor, number: int = 0) -> tuple[float, float]:
            first.zero_grad()
            loss = judges(x).relu().mean() + (1 - judges(makes(z).detach())).relu().mean()
            loss.backward()
            first.step()
            if number % every:
                return loss.item(), 0.0
            second.zero_grad()
            other = -judges(makes(z)).mean()
            other.backward()
            second.step()
            return loss.item(), other.item()

        self.plain = step
        self.step = oomkit.auto_batch(step, **options)

    def state(self) -> list[torch.Tensor]:
        params = [*self.judges.parameters(), *self.makes.parameters()]
        states = [
            values[name]
            for optimizer in self.optimizers
            for values in optimizer.state.values()
            for name in sorted(values)
        ]
        return [each.detach().clone() for each in (*params, *states)]


DRAWN = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(1024, 32, generator=DRAWN), torch.randn(1024, 32, generator=DRAWN))
    for _ in range(3)
]


def _same(a: Gan, b: Gan) -> bool:
    pairs = zip(a.state(), b.state(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def _alive() -> int:
    gc.collect()
    return oomkit.memory("cpu").allocated or 0


@pytest.fixture(scope="module")
def plain() -> tuple[list[Any], Gan, int]:
    """Results, the trained program, and the bytes that its first call needs."""
    gan = Gan()
    results = [gan.plain(*batch) for batch in BATCHES]
    measured = Gan()
    begin = _alive()
    measured.step(*BATCHES[0])
    return results, gan, (measured.step.records[-1].peak_allocated or 0) - begin


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_what_does_not_fit_behind_the_first_update_trains(plain: Any, share: float) -> None:
    results, trained, bytes_ = plain
    gan = Gan()
    with oomkit.limit_memory(_alive() + int(share * bytes_), device="cpu"):
        assert [gan.step(*batch) for batch in BATCHES] == results
    assert _same(gan, trained)
    assert gan.step.records[0].ooms > 0


def test_where_nothing_has_room_all_is_as_before(plain: Any) -> None:
    gan = Gan()
    before = gan.state()
    with oomkit.limit_memory(_alive() + plain[2] // 2, device="cpu"):
        with pytest.raises(oomkit.SplitError):
            gan.step(*BATCHES[0])
    assert all(torch.equal(x, y) for x, y in zip(before, gan.state(), strict=True))


def _failing_late(gan: Gan, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """In the second backward."""
    with inject_oom(nth=10**9, phase="backward") as counted:
        gan.step(*batch)
    nth = counted.seen - 2
    with inject_oom(nth=nth, phase="backward"):
        gan.step(*batch)


def test_a_call_that_is_like_one_that_has_worked_keeps_no_copies() -> None:
    gan = Gan()
    gan.step(*BATCHES[0])
    with pytest.raises(oomkit.PartialUpdate, match="after an optimizer had stepped"):
        _failing_late(gan, BATCHES[1])


def test_one_of_another_shape_does_once_the_step_has_run_out_of_memory(plain: Any) -> None:
    gan, other = Gan(), Gan()
    small = [tuple(x[:512] for x in batch) for batch in BATCHES]
    large = [BATCHES[2], BATCHES[1]]
    for batch in (small[0], small[1], *large):
        other.plain(*batch)
    gan.step(*small[0])
    with inject_oom(nth=1, phase="forward"):
        gan.step(*small[1])
    with inject_oom(nth=10**9, phase="backward") as counted:
        Gan().plain(*large[0])
    with inject_oom(nth=counted.seen - 2, phase="backward") as fault:
        gan.step(*large[0])
    assert fault.fired == 1
    gan.step(*large[1])
    assert _same(gan, other)


def _second_backward_fails(gan: Gan, number: int, *batch: torch.Tensor) -> Any:
    with inject_oom(nth=10**9, phase="backward") as counted:
        Gan().plain(*batch)
    with inject_oom(nth=counted.seen - 2, phase="backward") as fault:
        result = gan.step(*batch, number)
    assert fault.fired == 1
    return result


def test_a_second_update_that_comes_in_each_third_call_only() -> None:
    """The calls before have worked, but without that update."""
    gan, other = Gan(every=3), Gan(every=3)
    x, z = BATCHES[0]
    results = [other.plain(x, z, number) for number in (1, 2, 3, 4, 6)]
    found = [gan.step(x, z, 1), gan.step(x, z, 2), _second_backward_fails(gan, 3, x, z)]
    found += [gan.step(x, z, 4), gan.step(x, z, 6)]
    assert found == results
    assert _same(gan, other)


def test_a_shape_is_known_to_fit_when_both_updates_have_worked() -> None:
    gan, other = Gan(every=3), Gan(every=3)
    x, z = BATCHES[0]
    small = x[:512], z[:512]
    results = [other.plain(*small, 0), other.plain(*small, 1), other.plain(x, z, 2)]
    results.append(other.plain(x, z, 3))
    found = [gan.step(*small, 0)]
    with inject_oom(nth=1, phase="optimizer"):  # repeated: nothing has moved
        found.append(gan.step(*small, 1))
    found += [gan.step(x, z, 2), _second_backward_fails(gan, 3, x, z)]
    assert found == results
    assert _same(gan, other)


def test_updates_one_behind_the_other_are_no_places() -> None:
    """They are made together, and what they need is predicted."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(part.parameters()) for part in (model[0], model[2])]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    x = torch.randn(16, 8)
    step(x)
    with inject_oom(nth=1, phase="forward"):
        step(x)
    with inject_oom(nth=10**9, phase="optimizer") as counted:
        step(x[:8])
    with pytest.raises(oomkit.PartialUpdate):
        with inject_oom(nth=counted.seen, phase="optimizer"):
            step(x[:4])


class Own(torch.optim.Optimizer):
    """Of nobody: what its update needs is not known, nor whether it can be cut."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-1e-3)


class Subclass(torch.optim.AdamW):
    pass


class Tight:
    def __init__(self, kind: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        classes = {"own": Own, "subclass": Subclass}
        self.optimizer = classes.get(kind, torch.optim.AdamW)(self.model.parameters())
        model, optimizer = self.model, self.optimizer

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if kind == "closure":
                optimizer.step(lambda: loss)
            else:
                optimizer.step()
            return loss.item()

        def computes(x: torch.Tensor) -> float:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).item()

        self.plain = computes if kind == "computes" else step
        self.step = oomkit.auto_batch(self.plain, **options)

    def state(self) -> list[Any]:
        """By numpy, whose memory is in no budget."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        found = [value for state in states for value in state.values()]
        return [each.detach().numpy().copy() for each in (*self.model.parameters(), *found)]


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all((x == y).all() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("share", [3.8, 4.2, 4.6, 5.0, 5.6])
@pytest.mark.parametrize("kind", ["own", "subclass", "closure", "computes", "ladder=()"])
def test_an_update_that_cannot_be_cut_and_does_not_fit_goes_back(kind: str, share: float) -> None:
    """In sizes of the parameters: they, gradients and state are four."""
    options: dict[str, Any] = {"ladder": ()} if kind == "ladder=()" else {}
    batches = [torch.randn(32, 256, generator=DRAWN) for _ in range(3)]
    plain = Tight(kind)
    results = [plain.plain(x) for x in batches]
    trained = plain.state()
    del plain
    base = _alive()
    tight = Tight(kind, **options)
    size = sum(p.numel() * p.element_size() for p in tight.model.parameters())
    before, found = [], []
    with oomkit.limit_memory(base + int(share * size), device="cpu"):
        try:
            for x in batches:
                before = tight.state()
                found.append(tight.step(x))
        except (oomkit.OutOfMemory, oomkit.SplitError):  # but no PartialUpdate
            assert _equal(tight.state(), before)
            return
    assert found == results
    assert _equal(tight.state(), trained)
