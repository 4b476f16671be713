"""A compiled train step equals the eager one, on one rank and on several."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import torch_pfc

from .ranks import run_ranks

DIM, NUM_CLASSES = 8, 50


def make(group=None, **options):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, DIM))
    head = torch_pfc.PartialFC(DIM, NUM_CLASSES, scale=16.0, group=group, **options)
    return backbone, head


def batch(size: int, rank: int):
    generator = torch.Generator().manual_seed(100 * size + rank)
    images = torch.randn(size, 6, generator=generator)
    labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
    labels[0] = -100
    return images, labels


def train(backend: str | None, sizes: tuple[int, ...], options: dict):
    """A step of SGD for each batch size; the losses and the final parameters of this rank."""
    torch.compiler.reset()
    backbone, head = make(**options)
    optimizer = torch.optim.SGD([*backbone.parameters(), head.weight], lr=0.1)

    def eager_loss(images: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        return head(backbone(images), labels, key=key)

    loss_of: Callable[..., Tensor] = eager_loss
    if backend is not None:
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=True)
    losses = []
    for step, size in enumerate(sizes):
        loss = loss_of(*batch(size, head.group.rank), torch.tensor(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in [*backbone.parameters(), head.weight]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": 0.2, "margin": torch_pfc.ArcFace(0.5)},
        {"sample_rate": 0.2, "sparse_grad": True},
        {"sample_rate": 1.0, "margin": torch_pfc.SphereFace(1.5)},
    ],
    ids=["sampled", "sparse", "full"],
)
def test_train_step_equals_eager_with_batches_that_change_size(world_size, backend, options):
    """PB-02, PB-33: (8, 8), (8, 8), (7, 7), (8, 8) and more finishes, and every parameter stays equal."""
    sizes = (8, 8, 7, 8, 3)
    eager = run_ranks(world_size, train, None, sizes, options)
    compiled = run_ranks(world_size, train, backend, sizes, options, timeout=240)
    torch.testing.assert_close(compiled, eager)


def count_compilations(sizes: tuple[int, ...]) -> int:
    torch.compiler.reset()
    backbone, head = make(sample_rate=0.2)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @functools.partial(torch.compile, backend=counter, fullgraph=True)
    def loss_of(images, labels):
        return head(backbone(images), labels)

    for size in sizes:
        loss_of(*batch(size, head.group.rank)).backward()
    return counter.frame_count


@pytest.mark.parametrize("world_size", [1, 2])
def test_ten_batch_sizes_compile_at_most_twice(world_size):
    assert max(run_ranks(world_size, count_compilations, (8, 7, 6, 12, 30, 4, 9, 80, 100, 2), timeout=240)) <= 2


def check_checkpointing(backend: str | None) -> None:
    """The recomputed head draws the sample that the forward pass drew."""
    torch.compiler.reset()
    backbone, head = make(sample_rate=0.3)
    images, labels = batch(8, head.group.rank)

    def loss_of(checkpointed):
        embeddings = backbone(images)
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(head, embeddings, labels, use_reentrant=False)
        return head(embeddings, labels)

    if backend is not None:
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=True)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        parameters = [*backbone.parameters(), head.weight]
        loss = loss_of(checkpointed)
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpointing_replays_the_sample(world_size, backend):
    run_ranks(world_size, check_checkpointing, backend, timeout=120)


def scaled_by_rank(backend: str | None):
    torch.compiler.reset()
    backbone, head = make()
    images, labels = batch(8, head.group.rank)

    def loss_of():
        return head(backbone(images), labels) * (1 + head.group.rank)

    if backend is not None:
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=True)
    loss_of().backward()
    return [p.grad for p in [*backbone.parameters(), head.weight]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_losses_that_differ_by_rank_equal_eager(backend):
    """PB-02, the part with rank r's loss times (1 + r)."""
    torch.testing.assert_close(run_ranks(2, scaled_by_rank, backend, timeout=240), run_ranks(2, scaled_by_rank, None))


def check_draws_differ(backend: str) -> None:
    """Without a key, every compiled step samples anew, and torch.manual_seed replays the draw."""
    torch.compiler.reset()
    _, head = make(sample_rate=0.2)
    labels = torch.tensor([3, 4])
    sample = torch.compile(lambda: head.sample(labels)[0], backend=backend, fullgraph=True)
    torch.manual_seed(1)
    first, second = sample(), sample()
    torch.manual_seed(1)
    assert torch.equal(sample(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_draws_follow_the_seed(backend):
    run_ranks(1, check_draws_differ, backend, timeout=120)


def test_compiled_head_on_one_rank_warns_of_no_alias():
    """PB-31: one rank, rate 1, compiled: no operator's output aliases an input, of which PyTorch would warn.

    Warnings are errors in this test run; opcheck looks at the aliases themselves.
    """
    torch.compiler.reset()
    backbone, head = make()
    images, labels = batch(8, 0)
    torch.compile(lambda: head(backbone(images), labels), fullgraph=True)().backward()
    torch.library.opcheck(torch.ops.pfc.gather, (images, "", 1, 0), test_utils="test_schema")
