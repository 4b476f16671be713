"""Data-parallel and tensor-parallel wrappers around a model that holds a head: exact, or refused with what to do."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.nn.parallel import DistributedDataParallel

from .inputs import COSFACE, Batch, error_of, even, make_head, my_rows, s1
from .ranks import run_ranks


class Model(nn.Module):
    """A backbone that starts as the identity, and a head."""

    def __init__(self, batch: Batch, **options: Any) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.eye_(self.backbone.weight)
        self.head = make_head(batch, **COSFACE, **options)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(x), labels)
        return loss


def of_classes(num_classes: int) -> Batch:
    batch = s1()
    batch.weight, batch.labels = batch.weight[:num_classes], batch.labels % num_classes
    return batch


def alone() -> dist.ProcessGroup | None:
    """A group of this rank alone, which every rank must ask for at once."""
    group, _ = dist.new_subgroups(1)
    return group


def refusals(num_classes: int) -> dict[str, tuple[str, str]]:
    """What each wrapper says to a model whose head it was not told to leave alone."""
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = of_classes(num_classes)

    def step_of_replicate() -> None:  # it takes the parameters in at the first step
        replicate(Model(batch))(batch.embeddings, batch.labels)

    wrappers: dict[str, Callable[[], Any]] = {
        "fully_shard": lambda: fully_shard(Model(batch)),
        "fully_shard, nested": lambda: fully_shard(nn.Sequential(nn.Sequential(Model(batch)))),
        "fully_shard of the head": lambda: fully_shard(Model(batch).head, mesh=mesh),
        "FullyShardedDataParallel": lambda: FullyShardedDataParallel(Model(batch), device_id=cpu),
        "FullyShardedDataParallel, original parameters": lambda: FullyShardedDataParallel(
            Model(batch), device_id=cpu, use_orig_params=True
        ),
        "DistributedDataParallel": lambda: DistributedDataParallel(Model(batch)),
        "replicate": step_of_replicate,
    }
    return {name: error_of(wrap) for name, wrap in wrappers.items()}


REMEDY = {
    "fully_shard": "ignored_params={head.weight}",
    "fully_shard, nested": "ignored_params={head.weight}",
    "fully_shard of the head": "ignored_params={head.weight}",
    "FullyShardedDataParallel": "ignored_states=[head.weight]",
    "FullyShardedDataParallel, original parameters": "ignored_states=[head.weight]",
    "DistributedDataParallel": "_ddp_params_and_buffers_to_ignore",
    "replicate": "ignored_modules=[head]",
}


@pytest.mark.parametrize("num_classes", [10, 3, 1], ids="C={}".format)
def test_a_wrapper_that_would_mix_shards_is_refused_on_every_rank(num_classes: int) -> None:
    """PB-21, PB-22: also where shards differ in size, or one is empty."""
    for answers in run_ranks(2, refusals, num_classes):
        for name, remedy in REMEDY.items():
            kind, message = answers[name]
            assert kind == "RuntimeError" and remedy in message, (name, kind, message)


def distribute() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return error_of(lambda: distribute_module(Model(s1()).head, mesh))


def test_distribute_module_is_refused_on_every_rank() -> None:
    for kind, message in run_ranks(2, distribute):
        assert kind == "RuntimeError" and "leave the head out of distribute_module" in message, (kind, message)


def ignoring_fully_shard(model: Model) -> nn.Module:
    fully_shard(model.backbone)
    fully_shard(model, ignored_params={model.head.weight})
    return model


def ignoring_fsdp(model: Model, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


IGNORING: dict[str, Callable[[Model], nn.Module]] = {
    "fully_shard": ignoring_fully_shard,
    "FSDP, states": lambda model: ignoring_fsdp(model, ignored_states=[model.head.weight]),
    "FSDP, modules": lambda model: ignoring_fsdp(model, ignored_modules=[model.head], use_orig_params=True),
    "replicate": lambda model: replicate(model, ignored_modules=[model.head]),
}


def train(model: Any, parameters: Iterable[nn.Parameter], batch: Batch, counts: list[int]) -> list[float]:
    """The losses of three steps on this rank's rows, each on what the ones before have learnt."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = model(my_rows(batch.embeddings, counts), my_rows(batch.labels, counts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_wrapped(name: str, num_classes: int) -> tuple[list[float], Tensor]:
    batch = of_classes(num_classes)
    model = Model(batch)
    weight = model.head.weight
    wrapped = IGNORING[name](model)
    assert model.head.weight is weight and type(weight) is nn.Parameter
    losses = train(wrapped, wrapped.parameters(), batch, even(8, dist.get_world_size()))
    return losses, weight.detach()


def expected(num_classes: int = 10) -> tuple[list[float], Tensor]:
    """One process, all rows, no wrapper."""
    batch = of_classes(num_classes)
    model = Model(batch)
    return train(model, model.parameters(), batch, [8]), model.head.weight.detach()


@pytest.mark.parametrize("name", IGNORING)
@pytest.mark.parametrize("num_classes", [10, 1], ids="C={}".format)
def test_told_to_leave_the_shard_alone_training_is_exact(name: str, num_classes: int) -> None:
    """PB-22: the losses of three steps and the weights after them, also with an empty shard."""
    losses, weight = expected(num_classes)
    answers = run_ranks(2, train_wrapped, name, num_classes)
    for found, _ in answers:
        assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(torch.cat([shard for _, shard in answers]), weight)


def train_replicated_head(wrapper: str) -> tuple[list[float], Tensor]:
    """Every rank holds all classes and scores its own rows; the wrapper averages the head's gradient, too."""
    model = Model(s1(), group=alone())
    wrapped: Any = DistributedDataParallel(model) if wrapper == "DDP" else fully_shard(model)
    losses = train(wrapped, wrapped.parameters(), s1(), even(8, dist.get_world_size()))
    weight = model.head.weight
    return losses, weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()


@pytest.mark.parametrize("wrapper", ["DDP", "fully_shard"])
def test_a_head_of_one_rank_may_be_wrapped_like_any_module(wrapper: str) -> None:
    losses, weight = expected()
    answers = run_ranks(2, train_replicated_head, wrapper)
    means = [sum(step) / 2 for step in zip(*(found for found, _ in answers), strict=True)]
    assert means == pytest.approx(losses, rel=1e-9)
    for _, found in answers:
        torch.testing.assert_close(found, weight)


def train_replicas_of_shards(wrapper: str) -> tuple[list[float], int, Tensor]:
    """On 4 ranks: classes over ranks {0, 1} and again over {2, 3}, the same classes averaged over {0, 2} and {1, 3}."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Model(s1(), group=mesh["shards"])
    backbone = DistributedDataParallel(model.backbone)
    head: Any
    if wrapper == "DDP":
        head = DistributedDataParallel(model.head, device_mesh=mesh["replicas"])
    else:
        head = fully_shard(model.head, mesh=mesh["replicas"])
    parameters = [*backbone.parameters(), *head.parameters()]
    losses = train(lambda x, labels: head(backbone(x), labels), parameters, s1(), even(8, 4))
    weight = model.head.weight
    return losses, model.head.class_start, weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


@pytest.mark.parametrize("wrapper", ["DDP", "fully_shard"])
def test_a_wrapper_over_ranks_with_the_same_classes_is_exact(wrapper: str) -> None:
    losses, weight = expected()
    answers = run_ranks(4, train_replicas_of_shards, wrapper)
    means = [sum(step) / 4 for step in zip(*(found for found, *_ in answers), strict=True)]
    assert means == pytest.approx(losses, rel=1e-9)
    for _, start, shard in answers:
        torch.testing.assert_close(shard.detach(), weight[start:][: len(shard)])
