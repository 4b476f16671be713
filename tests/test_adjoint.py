"""A gradcheck across ranks: each operator's backward is the adjoint of its forward over all ranks together.

Every rank r has inputs of its own and a fixed cotangent v_r for its outputs; the function is Phi = sum_r <v_r, out_r>.
Its derivative by every entry of every rank's inputs is taken by central differences, in which all ranks run forward
while one entry on one rank is moved, and compared with what backward gives.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators
from torch_pfc import reference

from .inputs import IGNORE
from .ranks import run_ranks
from .test_ops_gather import world
from .tiles import tiles_of

DIM, NUM_CLASSES, ROWS = 3, 7, 2
STEP = 1e-5


def central_differences(fn: Callable[..., Sequence[Tensor]], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """This rank's gradients, and its summand of Phi's derivative by every entry of every rank, in rank order."""
    leaves = [t.requires_grad_() for t in inputs]
    outputs = fn(*leaves)
    cotangents = [torch.randn_like(t) for t in outputs]
    gradients = [g.to_dense() for g in torch.autograd.grad(outputs, leaves, cotangents)]

    def summand(owner: int, which: int, entry: int, step: float) -> Tensor:
        moved = [t.detach().clone() for t in inputs]
        if owner == dist.get_rank():
            moved[which].view(-1)[entry] += step
        return sum(((v * out).sum() for v, out in zip(cotangents, fn(*moved), strict=True)), torch.zeros(()))

    sizes: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(sizes, [t.numel() for t in inputs])
    entries = [(r, i, e) for r, counts in enumerate(sizes) for i, count in enumerate(counts) for e in range(count)]
    derivative = [(summand(*entry, STEP) - summand(*entry, -STEP)) / (2 * STEP) for entry in entries]
    return gradients, torch.stack(derivative)


def probe(op: str, rate: float | None, normalize: bool, sparse_grad: bool) -> tuple[list[Tensor], Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(17 * size)
    labels = torch.randint(NUM_CLASSES, (ROWS * size,), generator=generator)
    labels[1] = IGNORE
    torch.manual_seed(rank)
    if op == "gather":
        rows = torch.randn(ROWS, DIM, dtype=torch.float64)
        return central_differences(lambda x: [torch.ops.pfc.gather(x, *world())], [rows])

    shard = reference.shards(NUM_CLASSES, size)[rank]
    if rate is None:
        index, target = None, torch.tensor([label - shard.start if label in shard else -1 for label in labels.tolist()])
    else:
        index, target = torch.ops.pfc.sample(
            labels, torch.tensor(5), shard.start, len(shard), int(rate * len(shard)), IGNORE
        )
    # Embeddings differ between the ranks on purpose: the adjoint must not lean on their being copies.
    inputs = [torch.randn(ROWS * size, DIM, dtype=torch.float64), torch.randn(len(shard), DIM, dtype=torch.float64)]

    def forward(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        if op == "sharded_lse":
            return torch.ops.pfc.sharded_lse(x, w, index, target, normalize, *world(), sparse_grad)
        # A cosine beyond 1 has no angle: the scale is one that no logit reaches.
        margins = (1.35, 0.4, 0.1)
        return [torch.ops.pfc.sharded_ce(x, w, index, target, normalize, *world(), 20.0, *margins, sparse_grad)]

    with tiles_of(2 * ROWS * size):
        return central_differences(forward, inputs)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "op, rate, normalize, sparse_grad",
    [
        ("gather", None, True, False),
        ("sharded_lse", None, True, False),
        ("sharded_lse", None, False, True),
        ("sharded_lse", 0.4, True, True),
        ("sharded_lse", 0.4, False, False),
        ("sharded_ce", None, True, False),
        ("sharded_ce", 0.4, True, True),
    ],
)
def test_backward_is_the_adjoint_over_all_ranks(
    world_size: int, op: str, rate: float | None, normalize: bool, sparse_grad: bool
) -> None:
    answers = run_ranks(world_size, probe, op, rate, normalize, sparse_grad)
    numeric = torch.stack([summands for _, summands in answers]).sum(0)
    # The weight's gradient carries the one factor 1/W: the objective is the mean over ranks, and nobody averages it.
    factors = [1.0, 1 / world_size]
    expected = [
        factor * part
        for (gradients, _), mine in zip(answers, _by_rank(numeric, answers), strict=True)
        for factor, part in zip(factors, mine.split([g.numel() for g in gradients]), strict=False)
    ]
    found = [g.reshape(-1) for gradients, _ in answers for g in gradients]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def _by_rank(numeric: Tensor, answers: list[tuple[list[Tensor], Tensor]]) -> Sequence[Tensor]:
    return numeric.split([sum(g.numel() for g in gradients) for gradients, _ in answers])
