"""A fused head under loss scaling: gradients are unscaled, and an overflow on one rank steps no rank's shard."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_pfc
from torch_pfc.optim import SparseSGD

from .inputs import even, my_rows, random_batch
from .ranks import run_ranks
from .test_fuse import RULES, Training, assert_same


def scaled_steps(
    make: Any,
    options: dict[str, Any],
    num_classes: int,
    head_options: dict[str, Any],
    enabled: bool,
    bad: tuple[int, float] | None,
) -> None:
    """Of a head whose loss is scaled, against one whose is not; and, with `bad`, a step that is not to happen."""
    run, twin = (Training(True, make, options, num_classes, torch.float64, **head_options) for _ in range(2))
    scaler = torch_pfc.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    run.head.fuse(run.optimizer, scaler)
    world_size, rank = run.head.group.size, run.head.group.rank
    counts = even(4 * world_size, world_size)
    for number in range(3):
        twin.step(number)
        batch = random_batch(4 * world_size, num_classes, 3, scale=8.0, seed=number)
        batch.labels[0] = -100
        labels, key = my_rows(batch.labels, counts), torch.tensor(number)
        if bad is not None:
            before = run.values()
            x = my_rows(batch.embeddings, counts).clone().requires_grad_()
            factor = bad[1] if rank == bad[0] else 1.0
            (scaler.scale(run.head(x, labels, key=key)) * factor).backward()
            assert_same(run.values(), before)
        x = my_rows(batch.embeddings, counts).clone().requires_grad_()
        scaler.scale(run.head(x, labels, key=key)).backward()
        run.optimizer.step()  # has nothing to do; the scheduler looks out for it
        run.scheduler.step()
        torch.testing.assert_close(run.values(), twin.values(), rtol=1e-12, atol=1e-12)
        if enabled:  # as after a step of a backbone; the next scale is another one
            scaler.update(scaler.get_scale() / 2)


@pytest.mark.parametrize("make, options", RULES)
@pytest.mark.parametrize("num_classes, rate", [(7, 1.0), (40, 0.4), (9, 0.0), (2, 0.5)])
def test_gradients_are_unscaled(make: Any, options: dict[str, Any], num_classes: int, rate: float) -> None:
    """2 classes leave the third rank without."""
    for world_size, enabled in [(1, True), (1, False), (2, True), (3, True)]:
        arguments = (make, options, num_classes, {"sample_rate": rate}, enabled, None)
        run_ranks(world_size, scaled_steps, *arguments)


@pytest.mark.parametrize("make, options", RULES)
@pytest.mark.parametrize("rank, factor", [(0, math.inf), (1, math.nan), (2, -math.inf)])
def test_an_overflow_on_one_rank_changes_nothing_on_any(
    make: Any, options: dict[str, Any], rank: int, factor: float
) -> None:
    """Neither weight nor momentum nor count of steps."""
    for num_classes, rate in [(7, 1.0), (9, 0.0), (2, 0.5)]:
        run_ranks(3, scaled_steps, make, options, num_classes, {"sample_rate": rate}, True, (rank, factor))


def test_without_a_scaler_what_is_not_finite_goes_in() -> None:
    """As with an optimizer that steps by itself: no verdict is waited for."""
    run = Training(True, *RULES[0], 7, torch.float32)
    loss = run.head(torch.randn(4, 3, requires_grad=True), torch.arange(4))
    (loss * math.nan).backward()
    assert run.head.weight.isnan().any()


def half_precision_training(fused: bool) -> tuple[list[float], Tensor]:
    """Losses, the last scale; DDP around the backbone, float16 autocast, an overflow at step 2 of rank 1."""
    torch.manual_seed(0)
    backbone = DistributedDataParallel(nn.Linear(3, 8))
    head = torch_pfc.PartialFC(8, 10, scale=8.0, sample_rate=0.5, sparse_grad=True)
    scaler = torch_pfc.GradScaler("cpu", init_scale=2.0**10)
    optimizer = SparseSGD([*backbone.parameters(), head.weight], lr=0.5, momentum=0.9)
    if fused:
        head.fuse(optimizer, scaler)
    rank, weights, losses = head.group.rank, [], []
    for number in range(6):
        batch = random_batch(8, 10, 3, scale=1.0, seed=rank)
        with torch.autocast("cpu", torch.float16):
            loss = head(backbone(batch.embeddings.float()), batch.labels, key=torch.tensor(number))
        losses.append(loss.item())
        (scaler.scale(loss) * (math.inf if number == 2 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(head.weight.detach().clone())
    assert torch.equal(weights[2], weights[1]) and not torch.equal(weights[3], weights[2])
    assert scaler.get_scale() == 2.0**9
    return losses, torch.cat([weights[-1].flatten(), *(p.detach().flatten() for p in backbone.parameters())])


def test_half_precision_behind_ddp_takes_the_same_steps() -> None:
    """One scaler, and one optimizer whose other parameters `scaler.step` steps."""
    fused, twin = (run_ranks(2, half_precision_training, fused) for fused in (True, False))
    torch.testing.assert_close(fused, twin)
    assert fused[0][0][-1] < fused[0][0][0]


def step_of_the_weight_alone() -> str:
    run = Training(True, *RULES[0], 7, torch.float32)
    scaler = torch_pfc.GradScaler("cpu", init_scale=8.0)
    run.head.fuse(run.optimizer, scaler)
    scaler.scale(run.head(torch.randn(4, 3, requires_grad=True), torch.arange(4))).backward()
    after = run.values()
    try:
        scaler.step(run.optimizer)
    except AssertionError as error:
        return str(error)
    finally:
        assert_same(run.values(), after)
    return ""


def test_scaler_step_of_a_fused_weight_alone_steps_nothing() -> None:
    """Alone, torch says that there was no gradient; ranks of a group cannot know it of each other."""
    assert "No inf checks were recorded" in run_ranks(1, step_of_the_weight_alone)[0]
    assert run_ranks(2, step_of_the_weight_alone) == [""] * 2
