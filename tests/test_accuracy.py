"""How far the loss and its gradients are from float64: at size, in the extremes of the scale, and for small losses."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_pfc
from torch_pfc import reference

from .inputs import relative_error
from .test_ops_gather import ALONE
from .tiles import tiles_of

N, C, D = 64, 100_000, 128


def exact_losses(x: Tensor, w: Tensor, labels: Tensor, scale: float, margin: float) -> Tensor:
    """`[N]` float64, in the form whose small values are exact: the reference's loses what is below 2⁻⁵³."""
    lse, logit = reference.negative_lse_and_target(scale * reference.unit(x), w, labels)
    return torch.nn.functional.softplus(lse - logit + scale * margin)


@functools.cache
class Case:
    """Rows near their centres, as they come to be in training; loss and gradients in float64."""

    def __init__(self, num_classes: int, spread: float, scale: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.weight = torch.randn(num_classes, D, generator=generator)
        self.labels = torch.randint(num_classes, (N,), generator=generator)
        self.embeddings = self.weight[self.labels] + spread * torch.randn(N, D, generator=generator)
        self.exact = self.expected(self.embeddings)
        self.head = torch_pfc.PartialFC(D, num_classes, scale=scale)
        with torch.no_grad():
            self.head.weight.copy_(self.weight)

    def expected(self, embeddings: Tensor) -> list[Tensor]:
        x, w = embeddings.double().requires_grad_(), self.weight.double().requires_grad_()
        loss = exact_losses(x, w, self.labels, self.scale, 0.4).mean()
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    def found(self, embeddings: Tensor, saved_bytes: int) -> list[Tensor]:
        self.head.saved_logits_bytes = saved_bytes
        x = embeddings.clone().requires_grad_()
        loss = self.head(x, self.labels)
        assert loss.dtype == torch.float32
        return [loss.detach(), *torch.autograd.grad(loss, (x, self.head.weight))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of the loss and of the gradients by embeddings and weight."""
    return [relative_error(a.detach(), b.detach()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    "saved_bytes, tile_elements",
    [(0, 1 << 20), (0, 1 << 17), (1 << 30, 1 << 20), (1 << 24, 1 << 18)],
)
def test_float32_at_size(saved_bytes: int, tile_elements: int) -> None:
    """Logits made again, saved, or in part, in few tiles or many."""
    case = Case(C, spread=1.0, scale=64.0)
    with tiles_of(tile_elements):
        assert max(errors(case.found(case.embeddings, saved_bytes), case.exact)) < 1e-5


@pytest.mark.parametrize("saved_bytes", [0, 1 << 30])
def test_bfloat16_embeddings(saved_bytes: int) -> None:
    """Against float64 of the same rounded embeddings: the matmul rounds x̂ and ŵ to eight bits, nothing else."""
    case = Case(10_000, spread=1.0, scale=64.0)
    rounded = case.embeddings.bfloat16()
    assert max(errors(case.found(rounded, saved_bytes), case.expected(rounded))) < 1e-2


@pytest.mark.parametrize("scale", [1.0, 256.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("saved_bytes", [0, 1 << 30])
def test_float32_at_extreme_scales(scale: float, spread: float, saved_bytes: int) -> None:
    """Rows on their centres, near them, and anywhere."""
    case = Case(1000, spread=spread, scale=scale)
    found = errors(case.found(case.embeddings, saved_bytes), case.exact)
    # An error of half a unit in the logits, which are up to 256, is one of 256 · 2⁻²⁴ in exp of them; and where rows
    # are on their centres, what is left of the gradient is 3 % of what it is the difference of.
    assert max(found) < max(2e-5, 4 * scale * 2**-24), found


@pytest.mark.parametrize("saved_bytes", [0, 1 << 30])
def test_small_losses_keep_their_relative_accuracy(saved_bytes: int) -> None:
    """Well-trained rows: each loss is near e⁻⁶⁰, far below the last bit of a probability of 1."""
    num_classes, scale = 32, 64.0
    weight = torch.eye(num_classes, D)
    # Not on the axes, so that logits are rounded.
    weight[:, num_classes:] = 0.01 * torch.linspace(-1, 1, num_classes * (D - num_classes)).view(num_classes, -1)
    labels = torch.arange(num_classes)
    options: Any = {"margin": None, "reduction": "none", "saved_logits_bytes": saved_bytes}
    head = torch_pfc.PartialFC(D, num_classes, scale=scale, **options)
    with torch.no_grad():
        head.weight.copy_(weight)
    x, w = weight[labels].double().requires_grad_(), weight.double().requires_grad_()
    exact = exact_losses(x, w, labels, scale, 0.0)
    rows = weight[labels].requires_grad_()
    losses = head(rows, labels)
    assert (exact.log() < -59).all() and (exact.log() > -64).all()
    # Logits near 64 are known to some units of 64 · 2⁻²⁴.
    torch.testing.assert_close(losses.detach().double(), exact.detach(), rtol=16 * 64 * 2**-24, atol=0)
    found = torch.autograd.grad(losses.sum(), (rows, head.weight))
    right = torch.autograd.grad(exact.sum(), (x, w))
    assert max(errors([*found], [*right])) < 1e-4


@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("saved_bytes", [0, 1 << 30])
def test_centres_that_are_not_normalised(length: float, saved_bytes: int) -> None:
    """Logits from 10⁻² to 10⁵, of the operator: no overflow, and an error of the order of their last bit."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, D, generator=generator), length * torch.randn(1000, D, generator=generator)
    labels = torch.randint(1000, (N,), generator=generator)
    leaves = (x.requires_grad_(), w.requires_grad_())
    wide = (x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
    *found, _ = torch.ops.pfc.sharded_lse_saving(*leaves, None, labels, False, *ALONE, False, saved_bytes)
    exact = reference.negative_lse_and_target(*wide, labels, normalize=False)
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), leaves)
    right = torch.autograd.grad(exact[0].sum() + exact[1].sum(), wide)
    largest = (wide[0] @ wide[1].T).abs().max().item()
    assert max(errors([*found], [*exact])) < 1e-5
    assert max(errors([*gradients], [*right])) < max(1e-5, 4 * largest * 2**-24) and math.isfinite(largest)


@pytest.mark.parametrize("scale", [64.0, 256.0])
@pytest.mark.parametrize("saved_bytes", [0, 1 << 30])
def test_centres_of_any_length(scale: float, saved_bytes: int) -> None:
    """Row by row, as gradients go with 1 / ‖w‖; rows without a direction are in some tiles and not in others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(60, D, generator=generator))
    weight *= torch.logspace(-11, 18, 60).unsqueeze(1)
    weight[[3, 40]] *= torch.tensor([[0.0], [1e-30]])
    labels = torch.randint(60, (N,), generator=generator)
    x = scale * torch.nn.functional.normalize(torch.randn(N, D, generator=generator))
    leaves = (x.requires_grad_(), weight.requires_grad_())
    wide = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    with tiles_of(8 * D):
        outputs = torch.ops.pfc.sharded_lse_saving(*leaves, None, labels, True, *ALONE, False, saved_bytes)[:2]
        found = torch.autograd.grad(outputs[0].sum() - 0.5 * outputs[1].sum(), leaves)
    exact = reference.negative_lse_and_target(*wide, labels)
    right = torch.autograd.grad(exact[0].sum() - 0.5 * exact[1].sum(), wide)
    torch.testing.assert_close([t.double() for t in outputs], [*exact], rtol=1e-5, atol=1e-5)
    assert (found[1][[3, 40]] == 0).all()
    right[1][[3, 40]] = 0  # which has the gradient of a row of length 10⁻¹² in their place
    for a, b in zip(found, right, strict=True):
        # In float64, where the squares of 10¹⁸ are finite.
        assert ((a.double() - b).norm(dim=1) <= 1e-4 * b.norm(dim=1)).all()
