"""auto_batch on functions that need no gradient: parts are kept, sizes remembered."""

import collections
import dataclasses

import pytest
import torch
from helpers.seen import Seen
from transformers.modeling_outputs import CausalLMOutput

import oomkit

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

KIB = 1024


class Evaluation:
    """A model under no_grad that notes the rows of each of its calls."""

    def __init__(self, width=64):
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, 8)
        )
        self.rows: Seen[int] = Seen()

    @torch.no_grad()
    def __call__(self, x):
        self.rows.append(len(x))
        return self.model(x)


@pytest.fixture
def batch():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def forced(function, batch, slices):
    with oomkit.testing.force_slices(slices):
        return oomkit.auto_batch(function)(batch)


def test_finished_parts_are_not_computed_again(batch):
    evaluation = Evaluation()
    step = oomkit.auto_batch(evaluation, accumulation_steps=4)
    with oomkit.testing.inject_oom(nth=3 * 2 + 2) as fault:  # in the third part of 8
        result = step(batch)
    assert fault.fired == 1
    failed = evaluation.rows
    assert failed[:3] == [8, 8, 8] and sum(failed) == 32 + 8
    slices = failed[:2] + failed[3:]
    assert torch.equal(result, forced(Evaluation(), batch, slices))


@pytest.mark.filterwarnings("ignore:oomkit. the batch is split and BatchNorm1d")
@pytest.mark.parametrize("module", [torch.nn.BatchNorm1d(64), torch.nn.Dropout()])
def test_parts_that_moved_a_buffer_or_a_stream_are(batch, module):
    rows: Seen[int] = Seen()

    @torch.no_grad()
    def step(x):
        rows.append(len(x))
        y = module(x)
        if len(rows) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return y

    oomkit.auto_batch(step, accumulation_steps=2)(batch)
    assert rows[:2] == [16, 16] and sum(rows[2:]) == 32  # from the start


@pytest.mark.parametrize("times", [1, 2])
def test_putting_the_results_together_is_tried_once_more(batch, times):
    rows: Seen[int] = Seen()

    @oomkit.auto_batch(accumulation_steps=4)
    def step(x):
        rows.append(len(x))
        return x * 2

    with oomkit.testing.inject_oom(min_bytes=batch.nbytes, times=times) as fault:
        if times == 1:
            assert torch.equal(step(batch), batch * 2)
        else:
            with pytest.raises(oomkit.OutOfMemory) as caught:
                step(batch)
            text = str(caught.value).splitlines()[0]
            assert "results of its 4 micro-batches, which needs twice" in text
            assert 'oomkit.map(..., to="cpu")' in text
            assert not caught.value.committed
    assert fault.fired == times
    assert rows == [8, 8, 8, 8]  # no smaller parts: they would not help
    assert step.records[-1].ooms == times
    rows.clear()
    step(batch)
    assert rows == [8, 8, 8, 8]  # and nothing was learned about sizes from it


def test_sizes_are_remembered_and_grow_back(batch):
    evaluation = Evaluation()
    step = oomkit.auto_batch(evaluation)
    oomkit.limit_memory(None, device="cpu")  # from now on bytes are counted
    base = oomkit.memory("cpu").allocated or 0
    with oomkit.limit_memory(base + 40 * KIB, device="cpu"):
        want = step(batch)
        first = list(evaluation.rows)
        evaluation.rows.clear()
        assert torch.equal(step(batch), want) or torch.allclose(step(batch), want)
        assert evaluation.rows and 32 not in evaluation.rows
        assert len(evaluation.rows) < len(first)
    with oomkit.limit_memory(base + 4000 * KIB, device="cpu"):
        for _ in range(40):
            evaluation.rows.clear()
            step(batch)
            if evaluation.rows == [32]:
                break
    assert evaluation.rows == [32]


# --- outputs ---

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Scores:
    values: torch.Tensor
    name: str = "scores"


OUTPUTS = {
    "tensor": lambda y: y,
    "dict": lambda y: {"y": y, "best": y.argmax(1), "none": None},
    "tuple": lambda y: (y, [y[:, 0]]),
    "namedtuple": lambda y: Pair(y, y.argmax(1)),
    "dataclass": lambda y: Scores(y),
    "ModelOutput": lambda y: CausalLMOutput(logits=y),
    "list of rows": lambda y: [row[: 1 + int(row[0] > 0)] for row in y],
    "texts": lambda y: [str(float(value)) for value in y[:, 0]],
    "numpy": lambda y: y.numpy(),
}


def flat(value):
    if isinstance(value, (dict, CausalLMOutput)):
        return [(key, flat(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        return flat(dataclasses.asdict(value))
    if isinstance(value, (tuple, list)):
        return [flat(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_joined_in_order(kind, batch):
    def step(x):
        return OUTPUTS[kind](x * 3)

    want = step(batch)
    with oomkit.testing.inject_oom(nth=1, min_bytes=32 * 64 * 4) as fault:
        got = oomkit.auto_batch(step)(batch)
    assert fault.fired == 1
    assert type(got) is type(want) and flat(got) == flat(want)
