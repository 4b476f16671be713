"""The shipped margins against the same margins written by angle."""

import math

import pytest
import torch
from torch import nn

import torch_pfc
from torch_pfc import reference

PAIRS = [
    (torch_pfc.CosFace(0.35), reference.cosface(0.35)),
    (torch_pfc.ArcFace(0.5), reference.arcface(0.5)),
    (torch_pfc.ArcFace(0.5, straight_through=True), reference.arcface(0.5, straight_through=True)),
    (torch_pfc.SphereFace(1.7), reference.sphereface(1.7)),
    (torch_pfc.SphereFace(4.0), reference.sphereface(4.0)),
    (torch_pfc.CombinedMargin(1.0, 0.5, 0.0), reference.combined(1.0, 0.5, 0.0)),
    (torch_pfc.CombinedMargin(1.0, 0.3, 0.2), reference.combined(1.0, 0.3, 0.2)),
    (torch_pfc.CombinedMargin(1.35, 0.4, 0.1), reference.combined(1.35, 0.4, 0.1)),
]
each_pair = pytest.mark.parametrize("margin, oracle", PAIRS, ids=[f"{i}-{m}" for i, (m, _) in enumerate(PAIRS)])


@each_pair
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_value_and_slope_over_all_angles(
    margin: nn.Module, oracle: reference.Margin, dtype: torch.dtype, rtol: float
) -> None:
    nothing = torch.empty(0)
    cosine = torch.linspace(0.02, math.pi - 0.02, 200, dtype=torch.float64).cos().to(dtype).requires_grad_()
    value = margin(cosine, nothing, nothing)
    (slope,) = torch.autograd.grad(value.sum(), cosine)
    exact = cosine.detach().double().requires_grad_()
    expected = oracle(exact, nothing, nothing)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=rtol, atol=rtol)


@each_pair
def test_value_and_slope_are_finite_at_the_poles(margin: nn.Module, oracle: reference.Margin) -> None:
    """An embedding that lies on its centre, or opposite, or a rounding error beyond, still trains."""
    nothing = torch.empty(0)
    poles = torch.tensor([1.0, -1.0, 1.0 + 1e-7, -1.0 - 1e-7, 1.0 - 6e-8], requires_grad=True)
    value = margin(poles, nothing, nothing)
    (slope,) = torch.autograd.grad(value.sum(), poles)
    assert slope.isfinite().all()
    expected = oracle(poles.detach().double().clamp(-1, 1), nothing, nothing)
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=2e-3)


def test_arcface_past_pi_takes_the_published_fallback() -> None:
    """PB-11: D = 2, centre (1, 0), x at 2.9 rad: cos - m sin m, not cos(2.9 + 0.5), which would rise again."""
    x = torch.tensor([[math.cos(2.9), math.sin(2.9)]], dtype=torch.float64)
    value = torch_pfc.ArcFace(0.5)(x @ torch.tensor([1.0, 0.0], dtype=torch.float64), x, torch.tensor([0]))
    torch.testing.assert_close(value, torch.tensor([-1.210671], dtype=torch.float64), rtol=0, atol=1e-6)
