"""The module on 1 to 4 ranks, and without a process group, against the dense form: losses and gradients."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, example, given, settings
from torch import Tensor

import torch_pfc
from torch_pfc import reference

from .inputs import IGNORE, Batch, Step, assemble, head_step, make_head, my_rows, random_batch, relative_error
from .ranks import run_ranks

MARGINS = {
    "none": (None, None),
    "cosface": (torch_pfc.CosFace(0.35), reference.cosface(0.35)),
    "arcface": (torch_pfc.ArcFace(0.5), reference.arcface(0.5)),
    "straight": (torch_pfc.ArcFace(0.5, straight_through=True), reference.arcface(0.5, straight_through=True)),
    "sphereface": (torch_pfc.SphereFace(1.7), reference.sphereface(1.7)),
    "combined": (torch_pfc.CombinedMargin(1.35, 0.4, 0.1), reference.combined(1.35, 0.4, 0.1)),
}
# float32's cosines are 1e-7 off, which the scale and the slope of the margin enlarge.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}


@dataclass
class Case:
    """A world size of 0 is this process without a process group. `counts` are the rows of each rank."""

    world_size: int
    counts: list[int]
    batch: Batch
    dtype: torch.dtype
    margin: str
    key: int
    options: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(0, 4))
    size = max(world_size, 1)
    uneven = draw(st.booleans())
    rows = st.integers(0, 4) if uneven else st.just(draw(st.integers(1, 4)))
    counts = draw(st.lists(rows, min_size=size, max_size=size))
    batch = random_batch(
        sum(counts),
        draw(st.integers(1, 24)),
        draw(st.integers(2, 6)),
        scale=draw(st.sampled_from([1.0, 16.0, 64.0])),
        seed=draw(st.integers(0, 10_000)),
    )
    ignored = draw(st.lists(st.integers(0, 7), max_size=2))
    # Next to a pole an angle's slope enlarges any rounding error without bound: see test_margins for the poles.
    cosine = torch.cosine_similarity(batch.embeddings, batch.weight[batch.labels])
    assume(bool((cosine.abs() < 0.99).all()))
    batch.labels[[row for row in ignored if row < len(batch.labels)]] = IGNORE
    options = {
        "uneven_batches": uneven,
        "sample_rate": draw(st.sampled_from([1.0, 0.5, 0.2, 0.0])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "sparse_grad": draw(st.booleans()),
    }
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    return Case(
        world_size, counts, batch, dtype, draw(st.sampled_from(list(MARGINS))), draw(st.integers(0, 2**62)), options
    )


def step_and_set(case: Case) -> tuple[Step, Tensor]:
    """One step of this rank, and the global ids of the classes that it scored. A job for `run_ranks`."""
    options = case.options | {"margin": MARGINS[case.margin][0]}
    weights = torch.arange(1.0, len(case.batch.labels) + 1, dtype=torch.float64)

    def objective(loss: Tensor) -> Tensor:
        return loss @ my_rows(weights, case.counts).to(loss.dtype) if case.options["reduction"] == "none" else loss

    step = head_step(case.batch, case.counts, case.dtype, objective=objective, key=case.key, **options)
    head = make_head(case.batch, case.dtype, **options)
    index, _ = head.sample(case.batch.labels, key=torch.tensor(case.key))
    if index is None:
        return step, head.class_start + torch.arange(head.num_local_classes)
    return step, head.class_start + index[index < head.num_local_classes]


def dense(case: Case, sampled: Tensor) -> Step:
    x = case.batch.embeddings.to(case.dtype).double().requires_grad_()
    w = case.batch.weight.to(case.dtype).double().requires_grad_()
    loss = reference.partial_fc_loss(
        x,
        w,
        case.batch.labels,
        margin=MARGINS[case.margin][1],
        scale=case.batch.scale,
        reduction=case.options["reduction"],
        sampled=torch.zeros(len(w), dtype=torch.bool).index_fill(0, sampled, True),
    )
    # Each rank back-propagates its own rows' weighted sum: the objective is the mean over ranks.
    rows = torch.arange(1.0, len(x) + 1, dtype=torch.float64) / len(case.counts)
    objective = loss @ rows if case.options["reduction"] == "none" else loss
    return Step(loss.detach(), *torch.autograd.grad(objective, (x, w)))


@settings(max_examples=100)
@given(cases())
@example(
    Case(
        4,
        [0, 3, 0, 1],
        random_batch(4, 3, 3, scale=16.0, seed=0),
        torch.float64,
        "arcface",
        1,
        {"uneven_batches": True, "sample_rate": 0.0, "reduction": "mean", "sparse_grad": True},
    )
)
def test_loss_and_gradients_match_the_dense_form(case: Case) -> None:
    answers = run_ranks(case.world_size, step_and_set, case) if case.world_size else [step_and_set(case)]
    step = assemble([s for s, _ in answers], case.options["reduction"])
    right = dense(case, torch.cat([members for _, members in answers]))
    assert step.loss.dtype == step.embeddings_grad.dtype == step.weight_grad.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    # The dense form loses what is small against its logits; losses of 1e-12 are looked at below.
    torch.testing.assert_close(step.loss.double(), right.loss, rtol=tolerance, atol=1e-10)
    for found, expected in [
        (step.embeddings_grad, right.embeddings_grad),
        (step.weight_grad, right.weight_grad),
    ]:
        assert (found.double() - expected).norm() <= tolerance * expected.norm() + 1e-10


def test_bfloat16_embeddings_on_a_float32_weight() -> None:
    batch = random_batch(8, 30, 16, scale=4.0, seed=3)
    case = Case(2, [4, 4], batch, torch.bfloat16, "cosface", 0, {"reduction": "mean", "weight_dtype": torch.float32})
    steps = run_ranks(2, low_precision_step, case)
    step = assemble(steps)
    batch.embeddings = batch.embeddings.bfloat16().double()
    right = dense(case, torch.arange(30))
    assert (step.loss.dtype, step.embeddings_grad.dtype) == (torch.float32, torch.bfloat16)
    assert step.weight_grad.dtype == torch.float32
    assert abs(float(step.loss / right.loss) - 1) < 0.01
    assert relative_error(step.embeddings_grad, right.embeddings_grad) < 0.02
    assert relative_error(step.weight_grad, right.weight_grad) < 0.02


def low_precision_step(case: Case) -> Step:
    return head_step(case.batch, case.counts, case.dtype, margin=MARGINS[case.margin][0], **case.options)


def initial(num_classes: int) -> tuple[int, int, Tensor]:
    torch.manual_seed(11)
    head = torch_pfc.PartialFC(3, num_classes, dtype=torch.float64)
    return head.class_start, head.num_local_classes, head.weight.detach()


@pytest.mark.parametrize("num_classes", [10, 3, 1500])
def test_shards_and_initial_values_do_not_depend_on_the_world(num_classes: int) -> None:
    whole = initial(num_classes)[2]
    assert whole.std() > 0 and len(whole.unique(dim=0)) == num_classes
    for world_size in (1, 2, 3, 4):
        shards = run_ranks(world_size, initial, num_classes)
        expected = reference.shards(num_classes, world_size)
        assert [range(start, start + size) for start, size, _ in shards] == expected
        assert torch.equal(torch.cat([weight for _, _, weight in shards]), whole)


def test_initial_values_follow_the_seed() -> None:
    torch.manual_seed(1)
    one, two = torch_pfc.PartialFC(3, 5).weight, torch_pfc.PartialFC(3, 5).weight
    torch.manual_seed(1)
    assert torch.equal(torch_pfc.PartialFC(3, 5).weight, one)
    assert not torch.equal(one, two)
