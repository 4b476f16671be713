"""Sparse training of a head: what a step changes, over micro-batches, ranks and optimizers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import torch_pfc
from torch_pfc.optim import SparseAdamW, SparseSGD

from .inputs import IGNORE, even, make_head, my_rows, random_batch
from .ranks import run_ranks
from .tiles import tiles_of

SGD_OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
ADAM_OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}

Make = Callable[..., Optimizer]


def one_row(optimizer: Optimizer, param: nn.Parameter, row: int) -> float:
    """A step with a unit gradient of that row; returns where row 0 is then."""
    ones = torch.ones(1, 1, dtype=param.dtype)
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([[row]]), ones, param.shape, is_coalesced=True, check_invariants=True
    )
    optimizer.step()
    return param[0].item()


def test_momentum_does_not_move_a_row_that_is_not_sampled() -> None:
    """PB-17."""
    param = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    optimizer = SparseSGD([param], lr=0.1, momentum=0.9)
    assert [one_row(optimizer, param, row) for row in (0, 1, 1)] == [-0.1] * 3
    assert optimizer.state[param]["momentum_buffer"].tolist() == [[1.0], [1.9]]


def test_the_bias_correction_counts_the_parameters_steps() -> None:
    """PB-17."""
    param = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    optimizer = SparseAdamW([param], lr=0.1, weight_decay=0)
    moves = [one_row(optimizer, param, row) for row in (0, 1, 0)]
    assert moves == pytest.approx([-0.1, -0.1, -0.185846], abs=1e-6)
    assert optimizer.state[param]["step"] == 3


def micro_batch(head: torch_pfc.PartialFC, step: int, part: int) -> set[int]:
    """Adds the gradient of one; returns the rows of the weight that took part."""
    world_size = head.group.size
    batch = random_batch(4 * world_size, head.num_classes, 3, scale=8.0, seed=10 * step + part)
    labels = batch.labels.clone()
    labels[0] = IGNORE
    key, counts = torch.tensor(7 * step + part), even(4 * world_size, world_size)
    (head(my_rows(batch.embeddings, counts), my_rows(labels, counts), key=key) / 2).backward()
    index, _ = head.sample(labels, key=key)
    rows = range(head.num_local_classes) if index is None else index.tolist()
    return {row for row in rows if row < head.num_local_classes}


def state_of(optimizer: Optimizer, weight: nn.Parameter) -> list[Tensor]:
    return [value for value in optimizer.state[weight].values() if value.shape == weight.shape]


def against_frozen_rows(
    ours: Make, theirs: Make, options: dict[str, Any], num_classes: int, sample_rate: float
) -> None:
    """Sparse steps, and torch.optim's dense ones after which rows that took no part are put back, state and all."""
    batch = random_batch(1, num_classes, 3, scale=8.0, seed=0)
    found = make_head(batch, sample_rate=sample_rate, sparse_grad=True)
    expected = make_head(batch, sample_rate=sample_rate)
    optimizer, reference = ours([found.weight], **options), theirs([expected.weight], foreach=False, **options)
    for step in range(4):
        rows = micro_batch(found, step, 0) | micro_batch(found, step, 1)
        with tiles_of(6):
            optimizer.step()
        assert micro_batch(expected, step, 0) | micro_batch(expected, step, 1) == rows
        frozen = torch.tensor([row not in rows for row in range(found.num_local_classes)], dtype=torch.bool)
        before = [t.detach().clone() for t in (expected.weight, *state_of(reference, expected.weight))]
        reference.step()
        after = [expected.weight.detach(), *state_of(reference, expected.weight)]
        for new, old in itertools.zip_longest(after, before):
            new[frozen] = 0 if old is None else old[frozen]  # state that the first step made starts from 0
        torch.testing.assert_close([found.weight.detach(), *state_of(optimizer, found.weight)], after, rtol=0, atol=0)
        optimizer.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize(
    "ours, theirs, options", [(SparseSGD, torch.optim.SGD, SGD_OPTIONS), (SparseAdamW, torch.optim.AdamW, ADAM_OPTIONS)]
)
@pytest.mark.parametrize("num_classes, sample_rate", [(40, 0.3), (9, 0.0), (7, 1.0), (2, 0.5)])
def test_a_step_is_a_dense_one_with_the_other_rows_frozen(
    ours: Make, theirs: Make, options: dict[str, Any], num_classes: int, sample_rate: float
) -> None:
    """In float64, over micro-batches of different sets, with padding at rate 0, and an empty shard of 2 classes."""
    for world_size in (1, 2, 3):
        run_ranks(world_size, against_frozen_rows, ours, theirs, options, num_classes, sample_rate)


def same_steps(make: Make, options: dict[str, Any], sample_rate: float) -> tuple[Tensor, list[Tensor]]:
    """Steps over one batch of the whole group."""
    batch = random_batch(12, 7, 3, scale=8.0, seed=1)
    head = make_head(batch, sample_rate=sample_rate, sparse_grad=True)
    optimizer = make([head.weight], **options)
    counts = even(12, head.group.size)
    for step in range(4):
        part = slice(6 * (step % 2), 6 * (step % 2) + 6)
        labels = torch.full_like(batch.labels, IGNORE)
        labels[part] = batch.labels[part] // 2  # the upper classes take no part
        optimizer.zero_grad()
        head(my_rows(batch.embeddings, counts), my_rows(labels, counts)).backward()
        optimizer.step()
    return head.weight.detach(), state_of(optimizer, head.weight)


@pytest.mark.parametrize("make, options", [(SparseSGD, SGD_OPTIONS), (SparseAdamW, ADAM_OPTIONS)])
@pytest.mark.parametrize("sample_rate", [0.0, 1.0])
def test_state_follows_the_class_whatever_the_ranks(make: Make, options: dict[str, Any], sample_rate: float) -> None:
    """PB-17: at these rates the set does not depend on the shards."""
    (alone,) = run_ranks(1, same_steps, make, options, sample_rate)
    shards = run_ranks(3, same_steps, make, options, sample_rate)
    assert len({weight.shape[0] for weight, _ in shards}) > 1  # 7 classes: 3, 3, 1
    weight = torch.cat([weight for weight, _ in shards])
    state = [torch.cat(parts) for parts in zip(*(state for _, state in shards), strict=True)]
    torch.testing.assert_close((weight, state), alone)
    if sample_rate == 0:
        initial = random_batch(12, 7, 3, scale=8.0, seed=1).weight
        assert torch.equal(weight[4:], initial[4:]) and all((s[4:] == 0).all() for s in state)


def stock_steps(make: Make, sparse_grad: bool, sample_rate: float) -> Tensor:
    head = make_head(random_batch(1, 40, 3, scale=8.0, seed=0), sample_rate=sample_rate, sparse_grad=sparse_grad)
    optimizer = make([head.weight])
    for step in range(4):
        micro_batch(head, step, 0)
        micro_batch(head, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    return head.weight.detach()


# PyTorch's SparseAdam and Adagrad make sparse tensors without saying whether to check them.
stock = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


@stock
@pytest.mark.parametrize("sample_rate", [0.3, 0.0])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)], ids=["SGD", "Adagrad"]
)
def test_stock_optimizers_take_the_sparse_gradient_as_the_dense_one(make: Make, sample_rate: float) -> None:
    """Where a zero gradient moves nothing, a dense optimizer freezes the rows by itself."""
    torch.testing.assert_close(stock_steps(make, True, sample_rate), stock_steps(make, False, sample_rate))


@stock
def test_sparse_adam_is_sparse_adamw_without_decay() -> None:
    """But for where it adds ε; without padding, of which it knows nothing."""
    options: dict[str, Any] = {"lr": 0.1, "eps": 1e-14}
    found = stock_steps(lambda p: torch.optim.SparseAdam(p, **options), True, 0.3)
    torch.testing.assert_close(found, stock_steps(lambda p: SparseAdamW(p, weight_decay=0, **options), True, 0.3))


def one_optimizer(make: Make, wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    """Backbone and head in one optimizer, the head's gradient sparse."""
    torch.manual_seed(0)
    backbone = nn.Linear(5, 3)
    wrap(backbone)
    head = torch_pfc.PartialFC(3, 7, scale=8.0, sample_rate=0.0, sparse_grad=True)
    optimizer = make([*backbone.parameters(), head.weight])
    for step in range(3):
        torch.manual_seed(10 * step + head.group.rank)
        head(backbone(torch.randn(4, 5)), torch.randint(7, (4,))).backward()
        for parameter in backbone.parameters():
            assert parameter.grad is not None
            if not hasattr(parameter, "full_tensor"):
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    values = [*backbone.parameters(), head.weight, *(s["exp_avg"] for s in optimizer.state.values())]
    return [(v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for v in values]


def plain(backbone: nn.Module) -> None:
    pass


def test_a_fully_sharded_backbone_in_the_same_optimizer() -> None:
    for found, expected in zip(
        run_ranks(2, one_optimizer, SparseAdamW, fully_shard),
        run_ranks(2, one_optimizer, SparseAdamW, plain),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
