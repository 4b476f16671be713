"""Losses and gradients that people reported wrong elsewhere, with the right values: world sizes, margins, numerics."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_pfc
from torch_pfc import reference

from .inputs import (
    COSFACE,
    S1_COSFACE,
    Batch,
    Step,
    assemble,
    check_step,
    head_step,
    make_head,
    my_rows,
    on_axes,
    relative_error,
    run_head,
    s1,
)
from .ranks import run_ranks
from .tiles import tiles_of

S1_ARCFACE = (17.181427167, 4.088378408, 6.388843029)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@DTYPES
@pytest.mark.parametrize("world_size", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "margin, right",
    [
        (None, (10.292813336, 4.754272089, 7.140362216)),
        (torch_pfc.CosFace(0.35), S1_COSFACE),
        (torch_pfc.ArcFace(0.5), S1_ARCFACE),
        (torch_pfc.CombinedMargin(1.0, 0.5, 0.0), S1_ARCFACE),
    ],
    ids=["none", "cosface", "arcface", "combined"],
)
def test_the_written_down_numbers(
    margin: Any, right: tuple[float, float, float], world_size: int, dtype: torch.dtype
) -> None:
    """S1; a world size of 0 is a process without a process group."""
    check_step(run_head(world_size, s1(), options={"margin": margin}, dtype=dtype), *right)


@DTYPES
def test_gradients_come_from_every_shard(dtype: torch.dtype) -> None:
    """PB-02: shard 0 alone would give |gX| = 2.62208980."""
    step = run_head(2, s1(), options=COSFACE, dtype=dtype)
    check_step(step, *S1_COSFACE)
    assert abs(float(step.embeddings_grad.norm()) - 2.62208980) > 1


def scaled_step() -> Step:
    return head_step(s1(), [4, 4], objective=lambda loss: (1 + dist.get_rank()) * loss, **COSFACE)


def test_a_factor_of_each_ranks_own_averages_over_the_ranks() -> None:
    """PB-02: rank r's loss times (1 + r) is 1.5 times everything."""
    step, plain = assemble(run_ranks(2, scaled_step)), run_head(2, s1(), options=COSFACE)
    check_step(step, S1_COSFACE[0], 1.5 * S1_COSFACE[1], 1.5 * S1_COSFACE[2])
    torch.testing.assert_close(step.embeddings_grad, 1.5 * plain.embeddings_grad)
    torch.testing.assert_close(step.weight_grad, 1.5 * plain.weight_grad)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_loss_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    """PB-04: 8 rows and 10 classes on 3 ranks are 3, 3, 2 and 4, 4, 2."""
    options = COSFACE | {"uneven_batches": world_size == 3}
    step = run_head(world_size, s1(), options=options)
    check_step(step, *S1_COSFACE)
    alone = run_head(0, s1(), options=COSFACE)
    torch.testing.assert_close(step.embeddings_grad, alone.embeddings_grad)
    torch.testing.assert_close(step.weight_grad, alone.weight_grad)


@pytest.mark.parametrize("sample_rate", [1.0, 0.5, 0.0])
def test_a_rank_without_classes_takes_part(sample_rate: float) -> None:
    """PB-04: C = 3 on 4 ranks; every class is in the batch, so sampling changes nothing."""
    step = run_head(4, on_axes(3, [0, 1, 2, 0]), options={"margin": None, "sample_rate": sample_rate})
    assert float(step.loss) == pytest.approx(0.03597630, rel=1e-6)
    assert step.weight_grad.shape == (3, 3)


def test_arcface_past_pi_in_the_head() -> None:
    """PB-11: the margined cosine -1.210671 shows in the loss against one class at a right angle."""
    x = torch.tensor([[math.cos(2.9), math.sin(2.9)]], dtype=torch.float64)
    batch = Batch(x, torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0]), 4.0)
    loss = float(run_head(0, batch, options={"margin": torch_pfc.ArcFace(0.5)}).loss)
    assert loss == pytest.approx(math.log1p(math.exp(4 * (math.sin(2.9) + 1.210671))), abs=1e-5)


@pytest.mark.parametrize("world_size", [0, 2])
@pytest.mark.parametrize("straight_through, embeddings_grad", [(False, 4.088378408), (True, 4.773233794)])
def test_arcface_gradient_exact_and_straight_through(
    straight_through: bool, embeddings_grad: float, world_size: int
) -> None:
    """PB-12: the two differ in the gradient alone."""
    options = {"margin": torch_pfc.ArcFace(0.5, straight_through=straight_through)}
    step = run_head(world_size, s1(), options=options)
    assert float(step.loss) == pytest.approx(17.181427167, rel=1e-5)
    assert float(step.embeddings_grad.norm()) == pytest.approx(embeddings_grad, rel=1e-5)


@pytest.mark.parametrize("key", [0, 1, 12345, -7])
@pytest.mark.parametrize("rate, loss", [(0.1, 1.03433978), (1.0, 2.95996639)])
def test_sampling_takes_exactly_its_number_of_negatives(rate: float, loss: float, key: int) -> None:
    """PB-14: two shards of 500; at rate 0.1 each scores 50 classes, the positive among them: 99 negatives."""
    weight = torch.zeros(1000, 2, dtype=torch.float64)
    weight[0, 0] = weight[1:, 1] = 1
    batch = Batch(weight[[0, 0]], weight, torch.tensor([0, 0]), 4.0)
    step = run_head(2, batch, options={"margin": None, "sample_rate": rate}, key=key)
    assert float(step.loss) == pytest.approx(loss, rel=1e-6)


def test_one_row_in_the_whole_group() -> None:
    """PB-14 as written: the other rank has no row at all."""
    weight = torch.zeros(1000, 2, dtype=torch.float64)
    weight[0, 0] = weight[1:, 1] = 1
    batch = Batch(weight[:1], weight, torch.tensor([0]), 4.0)
    options = {"margin": None, "sample_rate": 0.1, "uneven_batches": True}
    assert float(run_head(2, batch, counts=[1, 0], options=options).loss) == pytest.approx(1.03433978, rel=1e-6)


@pytest.mark.parametrize("entry", [12.0, 60_000.0])
def test_squares_that_overflow_half_precision(entry: float) -> None:
    """PB-25 (a): fp16, D = 512, all 12.0: each normalised entry is 0.0442. At 60000 the length overflows too."""
    seen = []

    def margin(cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        seen.append(cosine.detach())
        return cosine

    weight = torch.zeros(2, 512)
    weight[0, 0] = weight[1, 1] = 1
    batch = Batch(torch.full((1, 512), entry), weight, torch.tensor([0]), 64.0)
    step = run_head(0, batch, options={"margin": margin}, dtype=torch.float16, weight_dtype=torch.float32)
    assert float(seen[0]) == pytest.approx(0.0442, abs=5e-5)
    assert step.loss.isfinite() and step.embeddings_grad.isfinite().all()


@pytest.mark.parametrize("world_size", [0, 2])
def test_many_rows_of_one_class_add_up_in_low_precision(world_size: int) -> None:
    """PB-25 (b): 2000 identical bf16 rows; a sum in bf16 would stop growing after a few hundred."""
    batch = Batch(torch.tensor([[0.5, -1.0, 2.0, 0.25]]).repeat(2000, 1), s1().weight, torch.zeros(2000).long(), 4.0)
    step = run_head(world_size, batch, options=COSFACE, dtype=torch.bfloat16, weight_dtype=torch.float32)
    weight = batch.weight.clone().requires_grad_()
    reference.partial_fc_loss(
        batch.embeddings, weight, batch.labels, margin=reference.cosface(0.35), scale=batch.scale
    ).backward()
    assert weight.grad is not None
    assert relative_error(step.weight_grad, weight.grad) < 0.01


@pytest.mark.parametrize("tile_elements", [1, 8, 12, 1 << 20])
@pytest.mark.parametrize("sample_rate", [1.0, 0.0])
def test_all_labels_on_the_other_rank(sample_rate: float, tile_elements: int) -> None:
    """PB-36: each rank's rows have their classes on the other one; shards of 3 and 2 against tiles of 1, 2, 3."""
    step = assemble(run_ranks(2, step_in_tiles, tile_elements, [3, 4, 0, 1], sample_rate))
    others = 4 if sample_rate else 3  # class 2 is nobody's label
    assert float(step.loss) == pytest.approx(math.log1p(others * math.exp(-4)), rel=1e-6)
    assert step.embeddings_grad.isfinite().all() and step.weight_grad.isfinite().all()


@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
def test_all_labels_on_one_rank(sample_rate: float) -> None:
    """PB-36: the other shard has no positive, and at rate 0 no class at all."""
    step = assemble(run_ranks(2, step_in_tiles, 4, [3, 4, 3, 4], sample_rate))
    others = 4 if sample_rate == 1 else 1
    assert float(step.loss) == pytest.approx(math.log1p(others * math.exp(-4)), rel=1e-6)
    assert step.embeddings_grad.isfinite().all() and step.weight_grad.isfinite().all()


def step_in_tiles(tile_elements: int, labels: list[int], sample_rate: float) -> Step:
    with tiles_of(tile_elements):
        return head_step(on_axes(5, labels), [2, 2], margin=None, sample_rate=sample_rate)


def losses_through_cat(batch: Batch) -> Step:
    """Two losses of a transposed view's rows, joined before the mean."""
    head = make_head(batch, reduction="none", **COSFACE)
    own = my_rows(batch.embeddings, [4, 4])
    storage = own.t().contiguous().requires_grad_()
    labels = my_rows(batch.labels, [4, 4])
    x = storage.t()
    assert not x.is_contiguous()
    loss = torch.cat([head(x, labels)[:3], head(x, labels)[3:]]).mean()
    loss.backward()
    assert storage.grad is not None and head.weight.grad is not None
    return Step(loss.detach().reshape(1), storage.grad.t(), head.weight.grad)


def test_transposed_embeddings_and_losses_through_cat() -> None:
    """PB-30."""
    step = assemble(run_ranks(2, losses_through_cat, s1()), reduction="none")
    check_step(Step(step.loss.mean(), step.embeddings_grad, step.weight_grad), *S1_COSFACE)


def weighted(loss: Tensor) -> Tensor:
    counts = [len(loss)] * (4 // len(loss))
    return loss @ my_rows(torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=loss.dtype), counts)


@pytest.mark.parametrize("world_size", [0, 2])
@DTYPES
def test_row_weights(world_size: int, dtype: torch.dtype) -> None:
    """PB-29: reduction "none", the caller weights the rows; a weight of 0 leaves no gradient."""
    batch = on_axes(4, [0, 1, 2, 3])
    batch.embeddings = batch.embeddings[[0, 1, 2, 0]]
    options = {"margin": None, "reduction": "none"}
    step = run_head(world_size, batch, options=options, objective=weighted, dtype=dtype)
    total = float(step.loss @ torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=dtype))
    assert total == pytest.approx(2.18721657, rel=1e-5)
    assert not step.embeddings_grad[1].any() and step.embeddings_grad[3].any()
