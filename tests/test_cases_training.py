"""Training loops that people reported broken elsewhere: DDP, mixed precision, accumulation, frozen parts, margins."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from .inputs import (
    COSFACE,
    S1_COSFACE,
    Step,
    check_step,
    error_of,
    even,
    head_step,
    make_head,
    my_rows,
    relative_error,
    run_head,
    s1,
)
from .ranks import run_ranks
from .tiles import tiles_of


class Model(nn.Module):
    """A backbone that starts as the identity, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.eye_(self.backbone.weight)
        self.head = make_head(s1(), **COSFACE)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.backbone(x), labels)


def step_under_ddp() -> tuple[tuple[str, str], tuple[str, str], Tensor, Tensor, Tensor]:
    """What wrapping says; then, told to leave the head alone, the loss, the shard and both gradients."""
    model = Model()
    refused = error_of(lambda: DistributedDataParallel(model))
    nested = error_of(lambda: DistributedDataParallel(nn.Sequential(nn.Sequential(model.backbone, model.head))))
    model._ddp_params_and_buffers_to_ignore = ["head.weight"]  # type: ignore[assignment]
    batch, counts = s1(), even(8, dist.get_world_size())
    wrapped = DistributedDataParallel(model)
    loss = wrapped(my_rows(batch.embeddings, counts), my_rows(batch.labels, counts))
    loss.backward()
    assert model.backbone.weight.grad is not None and model.head.weight.grad is not None
    return refused, nested, model.head.weight.detach(), model.backbone.weight.grad, model.head.weight.grad


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_around_a_head(world_size: int) -> None:
    """PB-21: refused with what to do; told to leave the head alone, shards stay different and gradients exact."""
    answers = run_ranks(world_size, step_under_ddp)
    for refused, nested, *_ in answers:
        for (kind, message), name in ((refused, "head.weight"), (nested, "0.1.weight")):
            assert kind == "RuntimeError"
            assert name in message and "_ddp_params_and_buffers_to_ignore" in message
    batch = s1()
    assert torch.equal(torch.cat([shard for _, _, shard, _, _ in answers]), batch.weight)
    alone = run_head(0, batch, options=COSFACE)
    for _, _, _, backbone_grad, _ in answers:
        torch.testing.assert_close(backbone_grad, alone.embeddings_grad.T @ batch.embeddings)
    torch.testing.assert_close(torch.cat([grad for *_, grad in answers]), alone.weight_grad)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_small_step_of_half_precision_embeddings_moves_the_weight(optimizer: Any) -> None:
    """PB-26: fp32 head, fp16 embeddings, lr 1e-5: lost if the weight or its update were fp16."""
    batch = s1()
    head = make_head(batch, torch.float32, **COSFACE)
    before = head.weight.detach().clone()
    update = optimizer(head.parameters(), lr=1e-5)
    head(batch.embeddings.half().requires_grad_(), batch.labels).backward()
    update.step()
    assert head.weight.dtype == torch.float32
    assert 0 < relative_error(head.weight.detach(), before) < 1e-3


def step_under_autocast(dtype: torch.dtype) -> Step:
    with torch.autocast("cpu", torch.bfloat16):
        return head_step(s1(), even(8, dist.get_world_size()), dtype, weight_dtype=torch.float32, **COSFACE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """PB-27: the loss is fp32 and within 2%, gradients come in their inputs' dtypes."""
    for step in run_ranks(2, step_under_autocast, dtype):
        assert float(step.loss) == pytest.approx(15.8665, rel=0.02)
        dtypes = (step.loss.dtype, step.embeddings_grad.dtype, step.weight_grad.dtype)
        assert dtypes == (torch.float32, dtype, torch.float32)


def accumulate(options: dict[str, Any], keys: tuple[int, int]) -> Tensor:
    """The weight's gradient after two micro-batches, each loss halved."""
    batch, counts = s1(), even(4, dist.get_world_size() if dist.is_initialized() else 1)
    head = make_head(batch, **options)
    for key, x, labels in zip(keys, batch.embeddings.split(4), batch.labels.split(4), strict=True):
        (head(my_rows(x, counts), my_rows(labels, counts), key=torch.tensor(key)) / 2).backward()
    assert head.weight.grad is not None
    return head.weight.grad


@pytest.mark.parametrize("sparse_grad", [False, True])
def test_accumulation_over_micro_batches(sparse_grad: bool) -> None:
    """PB-40."""
    options = COSFACE | {"sparse_grad": sparse_grad}
    assert float(accumulate(options, (0, 0)).to_dense().norm()) == pytest.approx(7.25412815, rel=1e-5)
    shards = run_ranks(2, accumulate, options, (0, 0))
    assert float(torch.cat([g.to_dense() for g in shards]).norm()) == pytest.approx(7.25412815, rel=1e-5)


@pytest.mark.parametrize("sample_rate", [0.6, 0.0])
def test_accumulation_of_sparse_gradients_of_different_sets(sample_rate: float) -> None:
    """PB-40: equals the dense one; at rate 0 on 2 ranks one of the sets has padding."""
    for keys in [(1, 2), (3, 4)]:
        dense = run_ranks(2, accumulate, COSFACE | {"sample_rate": sample_rate}, keys)
        sparse = run_ranks(2, accumulate, COSFACE | {"sample_rate": sample_rate, "sparse_grad": True}, keys)
        assert all(g.is_sparse for g in sparse)
        torch.testing.assert_close([g.to_dense() for g in sparse], dense)


def norms_that_a_margin_sees(lengths: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seen = []

    def margin(cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        norms = embeddings.norm(dim=1)
        seen.extend([norms.detach(), labels, *torch_pfc.group_mean_std(norms.detach())])
        return cosine

    rows = torch.eye(4)[: len(lengths)] * torch.tensor(lengths)[:, None]
    counts = [len(lengths) // 2] * 2
    head = torch_pfc.PartialFC(4, 10, margin=margin)
    head(my_rows(rows, counts), my_rows(torch.tensor([7, 1, 2, 9]), counts))
    norms, labels, mean, std = seen
    return norms, labels, mean, std


def test_a_margin_gets_this_ranks_embeddings_and_the_groups_statistics() -> None:
    """PB-41."""
    answers = run_ranks(2, norms_that_a_margin_sees, [10.0, 20.0, 30.0, 40.0])
    for (norms, labels, mean, std), own, ids in zip(answers, ([10, 20], [30, 40]), ([7, 1], [2, 9]), strict=True):
        assert norms.tolist() == own and labels.tolist() == ids
        assert float(mean) == pytest.approx(25) and float(std) == pytest.approx(12.909944)


def uneven_statistics(values: list[list[float]]) -> tuple[float, float]:
    mean, std = torch_pfc.group_mean_std(torch.tensor(values[dist.get_rank()]))
    return float(mean), float(std)


def test_statistics_over_ranks_with_different_numbers_of_rows() -> None:
    """PB-41."""
    for mean, std in run_ranks(3, uneven_statistics, [[10.0, 20.0, 30.0], [], [40.0]]):
        assert mean == pytest.approx(25) and std == pytest.approx(12.909944)


def step_with_frozen(ranks: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weight is frozen on some of the ranks."""
    batch, counts = s1(), even(8, dist.get_world_size())
    head = make_head(batch, **COSFACE)
    head.weight.requires_grad_(dist.get_rank() not in ranks)
    x = my_rows(batch.embeddings, counts).requires_grad_()
    loss = head(x, my_rows(batch.labels, counts))
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("frozen", [[], [0, 1], [1]], ids=str)
def test_a_frozen_weight(frozen: list[int]) -> None:
    """PB-42: on all ranks or on one, the loss and the embeddings' gradient are the same and nothing hangs."""
    answers = run_ranks(2, step_with_frozen, frozen, timeout=20)
    assert float(torch.cat([x_grad for _, x_grad, _ in answers]).norm()) / 2 == pytest.approx(S1_COSFACE[1], rel=1e-5)
    for rank, (loss, _, weight_grad) in enumerate(answers):
        assert float(loss) == pytest.approx(S1_COSFACE[0], rel=1e-5)
        assert (weight_grad is None) == (rank in frozen)


def test_frozen_embeddings_still_train_the_weight() -> None:
    batch = s1()
    head = make_head(batch, **COSFACE)
    head(batch.embeddings, batch.labels).backward()
    assert head.weight.grad is not None
    assert float(head.weight.grad.norm()) == pytest.approx(S1_COSFACE[2], rel=1e-5)


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_loss_is_the_same(inference: Any) -> None:
    """PB-42."""
    batch = s1()
    head = make_head(batch, **COSFACE)
    with inference():
        loss = head(batch.embeddings, batch.labels)
    assert not loss.requires_grad and float(loss) == pytest.approx(S1_COSFACE[0], rel=1e-5)


def largest_allocation(frozen: bool, grad: bool) -> int:
    """Bytes of the largest buffer that a step of 4096 classes of 64 takes, in small tiles."""
    head = torch_pfc.PartialFC(64, 4096)
    head.weight.requires_grad_(not frozen)
    x = torch.randn(4, 64, requires_grad=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tiles_of(4096), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        with torch.set_grad_enabled(grad):
            loss = head(x, torch.arange(4))
        if grad:
            loss.backward()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_no_buffer_of_the_weights_size_unless_its_gradient_is_wanted() -> None:
    """PB-42."""
    weight_bytes = 4096 * 64 * 4
    assert largest_allocation(frozen=False, grad=True) >= weight_bytes
    assert largest_allocation(frozen=True, grad=True) < weight_bytes / 8
    assert largest_allocation(frozen=False, grad=False) < weight_bytes / 8


def test_backward_twice_gives_the_same_gradients() -> None:
    """The seed's softmax was edited in place by the first backward."""
    batch = s1()
    head = make_head(batch, **COSFACE)
    x = batch.embeddings.requires_grad_()
    loss = head(x, batch.labels)
    first = torch.autograd.grad(loss, (x, head.weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, head.weight)), first, rtol=0, atol=0)
    check_step(Step(loss.detach(), *first), *S1_COSFACE)
