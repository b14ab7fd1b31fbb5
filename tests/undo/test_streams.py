"""The state of the CPU generator is taken again only when the generator has moved."""

import ctypes

import pytest
import torch
from helpers.bridge_table import api
from torch import nn

import oomkit
from oomkit import testing

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

ROOM = 8192


def read(generator):
    buffer = ctypes.create_string_buffer(ROOM)
    size = api.generator_read(generator._cdata, buffer, ROOM)
    return buffer.raw[:size]


DRAWS = {
    "rand": lambda g: torch.rand(1, generator=g),
    "randn": lambda g: torch.randn(1, generator=g),
    "randn double": lambda g: torch.randn(1, dtype=torch.float64, generator=g),
    "many": lambda g: torch.rand(624 * 3, generator=g),
    "once round the engine": lambda g: torch.randint(2**31, (624,), generator=g),
    "randperm": lambda g: torch.randperm(2, generator=g),
    "bernoulli": lambda g: torch.zeros(2).bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.ones(3).multinomial(2, generator=g),
    "another seed": lambda g: g.manual_seed(7),
    "another state": lambda g: g.set_state(torch.Generator().manual_seed(7).get_state()),
}


@pytest.mark.parametrize("before", [0, 1, 2, 623, 624])
@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_is_seen(draw, before):
    generator = torch.Generator().manual_seed(3)
    for _ in range(before % 3):
        torch.randn(1, generator=generator)  # the second one comes out of a store
    torch.randint(2**31, (before,), generator=generator)
    known = read(generator)
    assert known, "the bytes cannot be read here"
    assert api.generator_same(generator._cdata, known, len(known)) == 1
    DRAWS[draw](generator)
    assert api.generator_same(generator._cdata, known, len(known)) == 0


def test_reading_moves_nothing():
    generator = torch.Generator().manual_seed(3)
    torch.randn(1, generator=generator)
    state, known = generator.get_state(), read(generator)
    assert read(generator) == known
    assert torch.equal(generator.get_state(), state)
    assert api.generator_same(generator._cdata, known, len(known)) == 1


def test_a_small_buffer_is_left_alone():
    generator = torch.Generator()
    buffer = ctypes.create_string_buffer(b"untouched", 16)
    assert api.generator_read(generator._cdata, buffer, 16) > 16
    assert buffer.value == b"untouched"


BETWEEN = {
    "nothing": lambda: None,
    "a seed": lambda: torch.manual_seed(11),
    "a draw": lambda: torch.rand(1),
    "half of a pair": lambda: torch.randn(1),
    "a state": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("noisy", [False, True])
def test_what_is_put_back_is_where_the_stream_was(between, noisy):
    """Calls that draw and calls that do not, one of them failed, with the stream moved
    before it: the same values as with the slices from the start."""

    def train(failing):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
        drawn = []

        @oomkit.auto_batch
        def step(batch):
            out = model(batch)
            if noisy or len(drawn) > 2:
                noise = torch.randn(3, dtype=torch.float64)
                drawn.append(noise)
                out = out + noise[:2]
            else:
                drawn.append(None)
            out.square().mean().backward()
            return out.detach()

        for number in range(4):
            batch = torch.ones(4, 3, dtype=torch.float64)
            if number != 3:
                step(batch)
                continue
            BETWEEN[between]()
            start = torch.get_rng_state()
            if failing:
                with testing.inject_oom(nth=failing):
                    step(batch)
            else:
                with testing.force_slices([2, 2]):
                    step(batch)
        values = [p.grad for p in model.parameters()]
        return start, drawn[-2:], values, torch.get_rng_state()

    expected = train(0)
    for nth in (1, 3, 6):
        found = train(nth)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))
        assert torch.equal(found[3], expected[3])


def test_a_draw_between_the_call_and_its_backward_is_seen():
    """The caller's own stream goes on where the caller had it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    expected = torch.randn(1), torch.randn(1)

    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    step = oomkit.auto_batch(lambda batch: model(batch).square().mean())
    step(torch.ones(4, 3, dtype=torch.float64)).backward()
    loss = step(torch.ones(4, 3, dtype=torch.float64))
    first = torch.randn(1)
    with testing.inject_oom(nth=2, phase="backward") as fault:
        loss.backward()
    assert fault.fired == 1
    assert (first, torch.randn(1)) == expected


def test_it_has_the_size_that_is_believed():
    assert 2500 < len(read(torch.default_generator)) < ROOM
