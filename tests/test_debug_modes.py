"""PyTorch's debugging modes see into the operators: collectives counted, many ranks simulated in one process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_pfc
import torch_pfc.debug
from torch_pfc import reference
from torch_pfc.optim import SparseAdamW, SparseSGD

from .inputs import IGNORE, random_batch
from .ranks import run_ranks
from .test_collectives import collectives_of_a_step

DIM, ROWS, SCALE = 4, 3, 8.0
SAMPLED = {"sample_rate": 0.3}


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def counts_of_a_step(options: dict[str, Any]) -> dict[str, int]:
    head = torch_pfc.PartialFC(8, 1000, **{name: value for name, value in options.items() if name != "fused"})
    if options.get("fused"):
        head.fuse(SparseAdamW(head.parameters()))
    mode = CommDebugMode()
    with mode:
        head(torch.randn(ROWS, 8, requires_grad=True), torch.arange(ROWS)).sum().backward()
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


def counts(step: list[str]) -> dict[str, int]:
    names = [event.split()[0] for event in step]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(
    "options",
    [
        {},
        SAMPLED,
        {"sample_rate": 0.1, "sparse_grad": True},
        {"uneven_batches": True},
        {"saved_logits_bytes": 1000},
        {"fused": True},
    ],
    ids=str,
)
def test_comm_debug_mode_counts_what_is_issued(options: dict[str, Any]) -> None:
    issued = {name: value for name, value in options.items() if name != "fused"}  # a fused step issues the same
    expected = [counts(step) for step in run_ranks(2, collectives_of_a_step, issued, [], [])]
    assert run_ranks(2, counts_of_a_step, options) == expected


def per_rank(tensor: Tensor, world_size: int) -> Tensor:
    return rank_map(lambda rank: tensor.chunk(world_size)[rank].clone())


def parts(tensor: Any) -> list[Tensor]:
    return [part.to_dense() for _, part in sorted(tensor._local_tensors.items())]


def simulated_head(weight: Tensor, options: dict[str, Any], world_size: int) -> torch_pfc.PartialFC:
    num_classes = len(weight)
    shards = reference.shards(num_classes, world_size)
    head = torch_pfc.debug.all_ranks(
        lambda: torch_pfc.PartialFC(
            DIM, num_classes, scale=SCALE, dtype=torch.float64, **({"margin": torch_pfc.CosFace(0.35)} | options)
        )
    )
    with torch.no_grad():
        head.weight.copy_(rank_map(lambda rank: weight[list(shards[rank])]))
    return head


def sampled_by(head: torch_pfc.PartialFC, labels: Tensor, key: Tensor, world_size: int) -> Tensor | None:
    """`[C]` bool, or None for all."""
    index, _ = head.sample(rank_map(lambda rank: labels.clone()), key=key)
    if index is None:
        return None
    sampled = torch.zeros(head.num_classes, dtype=torch.bool)
    for shard, ids in zip(reference.shards(head.num_classes, world_size), parts(index), strict=True):
        sampled[ids[ids < len(shard)] + shard.start] = True
    return sampled


@pytest.mark.parametrize("fake_world", [2, 3, 4], indirect=True)
@pytest.mark.parametrize(
    "num_classes, options",
    [
        (12, {}),
        (13, {}),
        (12, SAMPLED),
        (13, SAMPLED),
        (5, {"sample_rate": 0.0, "reduction": "sum"}),
        (12, SAMPLED | {"sparse_grad": True}),
        (13, {"saved_logits_bytes": 200}),
        (12, SAMPLED | {"sparse_grad": True, "saved_logits_bytes": 200}),
        (12, {"uneven_batches": True}),
    ],
    ids=str,
)
def test_a_simulated_step_is_that_of_the_reference(num_classes: int, options: dict[str, Any], fake_world: int) -> None:
    """Also where ranks hold different numbers of classes, or none."""
    batch = random_batch(fake_world * ROWS, num_classes, DIM, scale=SCALE, seed=0)
    batch.labels[1] = IGNORE
    key = torch.tensor(5)
    comm = CommDebugMode()
    with LocalTensorMode(fake_world):
        head = simulated_head(batch.weight, options, fake_world)
        embeddings = per_rank(batch.embeddings, fake_world).requires_grad_()
        with comm:
            loss = head(embeddings, per_rank(batch.labels, fake_world), key=key)
            loss.backward()
        sampled = sampled_by(head, batch.labels, key, fake_world)
    assert comm.get_total_counts() == (8 if options.get("uneven_batches") else 7)

    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    expected = reference.partial_fc_loss(
        x,
        w,
        batch.labels,
        margin=reference.cosface(0.35),
        scale=SCALE,
        reduction=options.get("reduction", "mean"),
        sampled=sampled,
    )
    expected.backward()
    assert embeddings.grad is not None and head.weight.grad is not None
    torch.testing.assert_close(parts(loss), [expected.detach()] * fake_world)
    torch.testing.assert_close(torch.cat(parts(head.weight.grad)), w.grad)
    # A bare embeddings gradient is W times that of the mean over ranks.
    torch.testing.assert_close(torch.cat(parts(embeddings.grad)) / fake_world, x.grad)


@pytest.mark.parametrize("fake_world", [3], indirect=True)
def test_simulated_initial_weights_and_topk_are_those_of_one_process(fake_world: int) -> None:
    batch = random_batch(fake_world * ROWS, 10, DIM, scale=SCALE, seed=1)
    torch.manual_seed(0)
    with LocalTensorMode(fake_world):
        head = torch_pfc.debug.all_ranks(lambda: torch_pfc.PartialFC(DIM, 10, dtype=torch.float64))
        cosines, classes = head.topk(per_rank(batch.embeddings, fake_world), k=4)
    torch.manual_seed(0)
    alone = torch_pfc.PartialFC(DIM, 10, dtype=torch.float64, group=dist.new_group([0]))
    assert torch.equal(torch.cat(parts(head.weight.detach())), alone.weight)
    expected = alone.topk(batch.embeddings, k=4)
    torch.testing.assert_close((torch.cat(parts(cosines)), torch.cat(parts(classes))), expected)


@pytest.mark.parametrize("fake_world", [3], indirect=True)
@pytest.mark.parametrize(
    "make_optimizer", [lambda params: SparseSGD(params, lr=0.1, momentum=0.9), SparseAdamW], ids=["momentum", "adamw"]
)
@pytest.mark.parametrize("saved_logits_bytes", [0, 200])
def test_a_simulated_update_in_the_backward_is_that_of_one_process(
    saved_logits_bytes: int, make_optimizer: Any, fake_world: int
) -> None:
    """Where ranks hold different numbers of classes; the count of steps included, of which each rank has its own."""
    batch = random_batch(fake_world * ROWS, 13, DIM, scale=SCALE, seed=4)
    alone = torch_pfc.PartialFC(DIM, 13, scale=SCALE, dtype=torch.float64, group=dist.new_group([0]))
    with torch.no_grad():
        alone.weight.copy_(batch.weight)
    optimizer = make_optimizer(alone.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        alone(batch.embeddings, batch.labels).backward()
        optimizer.step()

    comm = CommDebugMode()
    with LocalTensorMode(fake_world):
        options = {"saved_logits_bytes": saved_logits_bytes, "margin": torch_pfc.CosFace(0.4)}
        head = simulated_head(batch.weight, options, fake_world)
        head.fuse(make_optimizer(head.parameters()))
        embeddings = per_rank(batch.embeddings, fake_world).requires_grad_()
        head(embeddings, per_rank(batch.labels, fake_world)).backward()
        with comm:
            head(embeddings, per_rank(batch.labels, fake_world)).backward()
    assert comm.get_total_counts() == 7
    assert head.weight.grad is None
    torch.testing.assert_close(torch.cat(parts(head.weight.detach())), alone.weight.detach())


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_an_operator_does_not_start_the_counters_afresh(fake_world: int) -> None:
    name = torch_pfc.ops._group.resolve(None).name
    with LocalTensorMode(fake_world), CommDebugMode() as comm:
        ranks: Any = rank_map(lambda rank: torch.tensor([rank]))
        for calls in (1, 2):
            gathered = torch.ops.pfc.gather(ranks, name, group_size=fake_world, group_rank=ranks.tolist()[0])
            assert comm.get_total_counts() == calls
    assert torch.equal(gathered.reconcile(), torch.arange(fake_world))


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_gradients_may_be_taken_outside_the_mode(fake_world: int) -> None:
    batch = random_batch(fake_world * ROWS, 6, DIM, scale=SCALE, seed=2)
    with LocalTensorMode(fake_world):
        head = simulated_head(batch.weight, {}, fake_world)
        losses = [head(per_rank(batch.embeddings, fake_world), per_rank(batch.labels, fake_world)) for _ in range(2)]
        (expected,) = torch.autograd.grad(losses[0], head.weight)
    (found,) = torch.autograd.grad(losses[1], head.weight)
    torch.testing.assert_close(parts(found), parts(expected))


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_what_cannot_be_simulated_is_refused(fake_world: int) -> None:
    batch = random_batch(fake_world * ROWS, 5, DIM, scale=SCALE, seed=3)
    with LocalTensorMode(fake_world):
        embeddings, labels = per_rank(batch.embeddings, fake_world), per_rank(batch.labels, fake_world)
        one_rank = torch_pfc.PartialFC(DIM, 5, dtype=torch.float64, group=dist.group.WORLD)
        with pytest.raises(RuntimeError, match=r"built for rank 0 of 2 .* but runs as rank 1 of 2"):
            one_rank(embeddings, labels)
        for options in ({"sparse_grad": True}, {"sparse_grad": True, "saved_logits_bytes": 200}):
            sparse = simulated_head(batch.weight, options, fake_world)
            with pytest.raises(NotImplementedError, match="sparse_grad under LocalTensorMode needs shards of equal"):
                sparse(embeddings, labels)
    with pytest.raises(RuntimeError, match="all_ranks must be called under LocalTensorMode"):
        torch_pfc.debug.all_ranks(lambda: one_rank)


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_ranks_that_issue_different_collectives_are_named(fake_world: int) -> None:
    group = torch_pfc.ops._group.resolve(None)

    def kernel(rank_of: Tensor) -> Tensor:
        collective = torch_pfc.ops._group.all_to_all if rank_of.item() else torch_pfc.ops._group.all_gather
        return collective(rank_of.reshape(1).expand(2), group)

    with LocalTensorMode(fake_world) as mode:
        ranks = rank_map(lambda rank: torch.tensor(rank))
        assert isinstance(ranks, LocalTensor)
        with pytest.raises(RuntimeError, match=r"same collectives, got \{.*all_gather_into.*all_to_all_single.*\}"):
            torch_pfc.debug._simulate(kernel, mode.ranks, (ranks,))


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_without_the_rules_a_kernel_refuses_to_run_under_local_tensor_mode(fake_world: int) -> None:
    with LocalTensorMode(fake_world), pytest.raises(RuntimeError, match=r"LocalTensorMode.* import torch_pfc\.debug"):
        torch_pfc.ops._group.check(torch_pfc.ops._group.resolve(None))


def test_a_name_that_pytorch_moved_is_named() -> None:
    with pytest.raises(ImportError, match=rf"_local_tensor\.Moved .* which PyTorch {re.escape(torch.__version__)}"):
        torch_pfc.debug._private("torch.distributed._local_tensor", "Moved")
    with pytest.raises(ImportError, match=r"torch\.moved\.LocalTensor"):
        torch_pfc.debug._private("torch.moved", "LocalTensor")


def test_importing_the_package_imports_neither_mode() -> None:
    script = (
        "import sys, torch_pfc; print(*(name for name in sys.modules if '_local_tensor' in name or 'debug' in name))"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert not {"torch.distributed._local_tensor", "torch_pfc.debug"} & set(output.split())


def compiled_mean_and_std() -> tuple[Tensor, Tensor]:
    values = torch.arange(3.0) + 3 * dist.get_rank()
    return torch.compile(torch_pfc.group_mean_std, backend="aot_eager", fullgraph=True)(values)


def test_finding_the_rank_still_traces() -> None:
    """What stands in for a rank is a context variable, which Dynamo does not trace."""
    values = torch.arange(6.0)
    for found in run_ranks(2, compiled_mean_and_std):
        torch.testing.assert_close(found, (values.mean(), values.std()))
