"""Whole compiled train steps as users write them: DDP, fully_shard, autocast, accumulation, compiled autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from .ranks import run_ranks

WORLD_SIZE, NUM_CLASSES, STEPS = 2, 40, 3


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    labels = torch.randint(NUM_CLASSES, (6,), generator=generator)
    return torch.randn(6, 5, generator=generator), labels, torch.tensor(step)


def plain(backbone: nn.Module) -> nn.Module:
    return backbone


def ddp(backbone: nn.Module) -> nn.Module:
    return DistributedDataParallel(backbone)


def fsdp(backbone: nn.Module) -> nn.Module:
    fully_shard(backbone)
    return backbone


def averaged(parameters: list[Tensor]) -> None:
    """What DDP and fully_shard do to a replicated parameter's gradient, by hand."""
    for parameter in parameters:
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train(wrap: Callable, backend: str | None, autocast: bool = False, micro_batches: int = 1, sparse: bool = False):
    """Losses and final parameters after a few steps; the step is compiled where a backend is named."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
    model = wrap(backbone)
    head = torch_pfc.PartialFC(8, NUM_CLASSES, scale=16.0, sample_rate=0.3, sparse_grad=sparse)
    optimizer = torch.optim.SGD([*model.parameters(), head.weight], lr=0.1)

    def loss_of(features: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return head(model(features), labels, key=key) / micro_batches

    if backend is not None:
        # DDP's and fully_shard's own hooks break the graph around the backbone; the head has no break of its own.
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=wrap is plain)
    losses = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = loss_of(*batch(step * micro_batches + micro, head.group.rank))
            loss.backward()
            losses.append(loss.detach())
        if wrap is plain:
            averaged(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), [full(p) for p in [*backbone.parameters(), head.weight]]


def train_with(wrap: Callable, backend: str | None, options: dict[str, Any]):
    return train(wrap, backend, **options)


@pytest.fixture(scope="module")
def expected() -> Any:
    """The plain eager steps, gradients averaged by hand."""
    return run_ranks(WORLD_SIZE, train, plain, None)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("wrap", [plain, ddp, fsdp], ids=lambda wrap: wrap.__name__)
def test_every_wrapper_and_backend_takes_the_same_steps(expected, wrap, backend):
    torch.testing.assert_close(run_ranks(WORLD_SIZE, train, wrap, backend, timeout=240), expected)


@pytest.mark.parametrize("options", [{"autocast": True}, {"micro_batches": 2}, {"micro_batches": 2, "sparse": True}])
def test_compiled_steps_equal_eager_ones_under(options):
    compiled = run_ranks(WORLD_SIZE, train_with, ddp, "inductor", options, timeout=240)
    torch.testing.assert_close(compiled, run_ranks(WORLD_SIZE, train_with, ddp, None, options))


def whole_steps(wrap: Callable, backend: str | None) -> tuple[Tensor, list[Tensor]]:
    """Backbone, head, backward and optimizer in one compiled function."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8)))
    head = torch_pfc.PartialFC(8, NUM_CLASSES, scale=16.0, sample_rate=0.3)
    optimizer = torch.optim.AdamW([*model.parameters(), head.weight], lr=0.01, foreach=False)

    def step(features: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        loss = head(model(features), labels, key=key)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if backend is not None:
        step = torch.compile(step, backend=backend)
    losses = [step(*batch(number, head.group.rank)) for number in range(STEPS)]
    return torch.stack(losses), [full(p) for p in [*model.parameters(), head.weight]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("wrap", [ddp, fsdp], ids=lambda wrap: wrap.__name__)
def test_whole_steps_with_backward_and_optimizer_equal_eager_ones(wrap, backend):
    compiled = run_ranks(WORLD_SIZE, whole_steps, wrap, backend, timeout=240)
    torch.testing.assert_close(compiled, run_ranks(WORLD_SIZE, whole_steps, wrap, None))


def compiled_autograd() -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    backbone, head = nn.Linear(5, 8), torch_pfc.PartialFC(8, NUM_CLASSES, scale=16.0, sample_rate=0.3)
    parameters = [*backbone.parameters(), head.weight]
    features, labels, key = batch(0, head.group.rank)

    def backward() -> None:
        head(backbone(features), labels, key=key).backward()

    backward()
    eager = [p.grad.clone() for p in parameters if p.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(backward, backend="aot_eager")()
    torch.testing.assert_close([p.grad for p in parameters], eager)
    return eager


def test_compiled_autograd_gives_the_eager_gradients():
    run_ranks(WORLD_SIZE, compiled_autograd, timeout=120)


def count_compilations() -> list[int]:
    """The number of graphs after each of four steps; scale, margin and learning rate are tensors that change."""
    torch.compiler.reset()
    torch.manual_seed(0)
    scale, m, lr = torch.tensor(16.0), torch.tensor(0.2), torch.tensor(0.1)
    head = torch_pfc.PartialFC(8, NUM_CLASSES, scale=scale, margin=torch_pfc.CosFace(m))
    optimizer = torch.optim.SGD([head.weight], lr=lr)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter)
    def step(features: Tensor, labels: Tensor) -> Tensor:
        loss = head(features, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, counts = [], []
    for number in range(4):
        torch.manual_seed(number)
        losses.append(float(step(torch.randn(6, 8), torch.arange(6))))
        scale += 1
        m += 0.05
        lr *= 0.5
        counts.append(counter.frame_count)
    assert len(set(losses)) == 4
    return counts


def test_scale_margin_and_learning_rate_as_tensors_do_not_recompile():
    (counts,) = run_ranks(1, count_compilations, timeout=120)
    assert counts == counts[:1] * 4
