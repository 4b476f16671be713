"""Where no exponential of a logit can overflow, none is shifted: the rows' factors l·exp(−negative_lse) go onto rows.

What decides is lengths and factors; the values on either side of each bound are the same, to rounding.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_pfc import reference
from torch_pfc.ops.sharded_lse import sharded_lse_backward, sharded_lse_saving
from torch_pfc.plan._kernels import cuda_kernels

from .test_ops_gather import ALONE
from .tiles import tiles_of

pfc = torch.ops.pfc
N, C, D = 12, 40, 16
ALL = 1 << 20


def operands(length: float, normalize: bool = True) -> tuple[Tensor, Tensor, None, Tensor, bool]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(C, D, generator=generator)
    target = torch.randint(C, (N,), generator=generator)
    # Some of their own class, some of the opposite, others of none.
    x = torch.randn(N, D, generator=generator)
    x[:4], x[4:8] = weight[target[:4]], -weight[target[4:8]]
    target[[0, 5]] = -1
    return length * reference.unit(x), weight, None, target, normalize


def sizes(x: Tensor, weight: Tensor, target: Tensor, factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`[N]` and `[C]`: how long the gradients by rows and by classes would be, if nothing in their sums cancelled."""
    z = x @ reference.unit(weight).T
    is_target = torch.arange(C) == target.unsqueeze(1)
    p = z.masked_fill(is_target, -torch.inf).softmax(dim=1)
    dz = (factors[0].unsqueeze(1) * p).where(~is_target, factors[1].unsqueeze(1)).abs()
    return dz.sum(dim=1), dz.T @ x.norm(dim=1) / weight.norm(dim=1)


MODERATE = [0.0, 1.0, -1.0, 1e-3, 65536.0, -1e-6, 0.5, 1.0, -2.0, 1.0, 1e-2, 3.0]


@pytest.mark.parametrize("length", [1e-3, 8.0, 65.9, 66.1, 300.0])
@pytest.mark.parametrize(
    "factors",
    [MODERATE, [1e-33, -1e33, *MODERATE[2:]], [1e-37, *MODERATE[1:]], [1e37, *MODERATE[1:]], [0.0] * N],
    ids=["moderate", "far", "too_small", "too_large", "zero"],
)
@pytest.mark.parametrize("saved_bytes", [0, 4 * (N + 1) * 13, ALL])
def test_gradients_row_by_row(length: float, factors: list[float], saved_bytes: int) -> None:
    """Gradients of both outputs, of either sign and of any size, row by row as accurate as the logits."""
    x, weight, index, target, normalize = operands(length)
    factors = [factor / max(length, 1.0) for factor in factors]  # so that no gradient overflows
    cotangents = torch.tensor(factors), torch.tensor(factors[::-1])
    leaves = (x.requires_grad_(), weight.requires_grad_())
    wide = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    with tiles_of(8 * D):
        outputs = pfc.sharded_lse_saving(*leaves, index, target, normalize, *ALONE, False, saved_bytes)[:2]
        found = torch.autograd.grad(outputs, leaves, cotangents)
    exact = reference.negative_lse_and_target(*wide, target)
    wide_cotangents = cotangents[0].double(), cotangents[1].double()
    right = torch.autograd.grad(exact, wide, wide_cotangents)
    tolerance = 4 * max(length, 1.0) * 2**-24
    torch.testing.assert_close([output.double() for output in outputs], [*exact], rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        possible = sizes(*wide, target, wide_cotangents)
    # Factors are in the exponent, too, where a walk is not plain.
    tolerance *= 8 if max(factors) < 1e5 else 32
    for a, b, size in zip(found, right, possible, strict=True):
        assert ((a - b).norm(dim=1) <= tolerance * size + 1e-30).all()  # p underflows below 1e-38


def backward_matmuls(factor: float, length: float, normalize: bool = True) -> float:
    """In products of [N, D] and [D, C], for the weight's gradient, where all that may be is saved."""
    arguments = operands(length, normalize)
    negative_lse, _, saved = pfc.sharded_lse_saving(*arguments, *ALONE, False, ALL)
    terms = torch.stack([torch.full((N,), factor), torch.ones(N), negative_lse], dim=1)
    with FlopCounterMode(display=False) as counter:  # which does not open operators
        sharded_lse_backward._init_fn(*arguments, terms, 1.0, False, True, False, saved)
    return counter.get_total_flops() / (2 * N * C * D)


def test_what_a_plain_walk_saved_is_read_only_by_another() -> None:
    """Factors beyond its range are rare, and cost the matmul that saving had spared."""
    assert backward_matmuls(1.0, 8.0) == 1
    assert backward_matmuls(1e38, 8.0) == 2
    # Logits are saved as they are, and serve any factor.
    assert backward_matmuls(1e38, 100.0) == backward_matmuls(1e38, 8.0, normalize=False) == 1


@pytest.mark.parametrize("length", [1e-9, 1e-7, 1e-3, 1e3, 1e7, 1e9])
@pytest.mark.parametrize("saved_bytes", [0, ALL])
def test_lengths_of_classes(length: float, saved_bytes: int) -> None:
    """The gradient of a class is that of its direction over its length, to rounding, whichever is divided by it."""
    x, weight, index, target, normalize = operands(64.0)
    results = []
    for scale in (1.0, length):
        w = (scale * reference.unit(weight)).requires_grad_()
        outputs = pfc.sharded_lse_saving(x, w, index, target, normalize, *ALONE, False, saved_bytes)[:2]
        (gradient,) = torch.autograd.grad(outputs[0].sum() - outputs[1].sum(), w)
        results.append((*(output.detach() for output in outputs), gradient.double() * scale))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_sampled", [None, 0, 4, 20])
@pytest.mark.parametrize("saved_bytes", [0, 4 * (N + 1) * 7, ALL])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_accelerators_walk(num_sampled: int | None, saved_bytes: int, normalize: bool) -> None:
    """It asks for no values: neither for lengths, nor for which targets are in a tile. Also where sets have padding."""
    x, weight, index, target, _ = operands(8.0)
    if num_sampled is not None:
        index, target = pfc.sample(target, torch.tensor(0), 0, C, num_sampled, -1)
    operand = (x, weight, index, target, normalize)
    results = []
    for kernels in (nullcontext(), cuda_kernels()):
        with kernels, tiles_of(5 * D):
            *outputs, saved = sharded_lse_saving._init_fn(*operand, *ALONE, True, saved_bytes)
            terms = torch.stack([torch.linspace(-1, 1, N), torch.linspace(2, -1, N), outputs[0]], dim=1)
            results.append((*outputs, *sharded_lse_backward._init_fn(*operand, terms, 0.5, True, True, True, saved)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0)) for a, b in zip(*results, strict=True))


def test_a_row_without_another_class() -> None:
    """One class in all, and it is the target: nothing but the target's own gradient."""
    x, weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    leaves = (x.requires_grad_(), weight.requires_grad_())
    for saved_bytes in (0, ALL):
        lse, logit, _ = pfc.sharded_lse_saving(*leaves, None, torch.tensor([0, 0]), True, *ALONE, False, saved_bytes)
        assert lse.tolist() == [-torch.inf] * 2 and logit.tolist() == [4.0, 0.0]
        dx, dw = torch.autograd.grad((lse, logit), leaves, (torch.ones(2), torch.tensor([1.0, 2.0])))
        assert dx.tolist() == [[0.0, 1.0], [0.0, 2.0]]
        assert dw.tolist() == [[2.5, 0.0]]  # (1·[3, 0] + 2·[1, 0]) / 2
