"""pfc::sharded_ce: sharded_lse with the combined margin and the softplus in one operator."""

import pytest
import torch

import torch_pfc  # noqa: F401  registers the operators
from torch_pfc import reference

from .inputs import random_batch, s1
from .ranks import run_ranks
from .test_ops_gather import ALONE, world
from .test_ops_sharded_lse import draw

sharded_ce = torch.ops.pfc.sharded_ce
MARGINS = [(1.0, 0.0, 0.0), (1.0, 0.0, 0.35), (1.0, 0.5, 0.0), (1.7, 0.0, 0.0), (1.35, 0.4, 0.1)]


@pytest.mark.parametrize("margins", MARGINS, ids=str)
@pytest.mark.parametrize("num_sampled", [None, 2])
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_loss_and_gradients(margins: tuple[float, float, float], num_sampled: int | None, sparse_grad: bool) -> None:
    batch = s1()
    index, target, mask = draw(batch.labels, 10, num_sampled)
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    scaled = batch.scale * torch.nn.functional.normalize(x)
    loss = sharded_ce(scaled, w, index, target, True, *ALONE, batch.scale, *margins, sparse_grad)
    found = torch.autograd.grad(loss.mean(), (x, w))
    expected = reference.partial_fc_loss(
        x, w, batch.labels, margin=reference.combined(*margins), scale=batch.scale, sampled=mask, reduction="none"
    )
    # softplus is the identity past 20, which leaves exp(-20) of the loss.
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        (found[0], found[1].to_dense()), torch.autograd.grad(expected.mean(), (x, w)), rtol=1e-7, atol=1e-8
    )


def test_gradcheck() -> None:
    batch = random_batch(4, 7, 3, scale=2.0, seed=0)
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: sharded_ce(
            2 * torch.nn.functional.normalize(x), w, None, batch.labels, True, *ALONE, 2.0, 1.35, 0.4, 0.1
        ),
        (x, w),
    )


def check_operator(group: tuple[str, int, int] | None = None) -> None:
    group = group or world()
    for num_rows in (1, 8):
        labels = torch.arange(num_rows * group[1]) % 10
        w = torch.randn(10, 4, requires_grad=True)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(len(labels), 4).to(dtype).requires_grad_()
            for index, target, _ in (draw(labels, 10, None), draw(labels, 10, 2)):
                torch.library.opcheck(sharded_ce.default, (x, w, index, target, True, *group, 4.0, 1.0, 0.5, 0.1))


def test_opcheck_alone() -> None:
    """PB-32."""
    check_operator(ALONE)


def test_opcheck_on_two_ranks() -> None:
    """PB-32."""
    run_ranks(2, check_operator)
