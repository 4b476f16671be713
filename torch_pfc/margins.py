"""Margins ψ: what the target's cosine is replaced by before the softmax.

A margin is any differentiable callable::

    margin(cosine [B], embeddings [B, D], labels [B]) -> [B]

of this rank's rows, with cosine in float32 (float64 for float64 embeddings), embeddings as the backbone gave them and
labels as global class ids. Rows with `ignore_index` as their label come along; what a margin makes of them is not used.
Those shipped are modules without parameters; θ is the angle whose cosine is given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .ops import _group

# sin²θ is held at this constant where rounding puts it lower, so that no gradient is infinite at cos = ±1. Far below
# what float32 cosines can resolve (they are 6e-8 apart next to 1), it moves ψ by less than 1e-7.
_MIN_SIN_SQUARED = 1e-14


class CosFace(nn.Module):
    """ψ = cos θ − m. Also known as AM-Softmax.

    Wang et al., "CosFace: Large Margin Cosine Loss for Deep Face Recognition", CVPR 2018, arXiv:1801.09414.

    Args:
        m: the margin, in cosine: a number, or a scalar tensor that a schedule changes without a recompilation.
    """

    def __init__(self, m: float | Tensor = 0.4) -> None:
        super().__init__()
        self.m = m

    def extra_repr(self) -> str:
        return f"m={self.m}"

    def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        return combined_margin(cosine, 1.0, 0.0, self.m)


class ArcFace(nn.Module):
    """ψ = cos(θ + m); past θ + m > π, where that would rise again, cos θ − m sin m.

    Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR 2019, arXiv:1801.07698.

    Args:
        m: the margin, in radians, 0 … π.
        straight_through: give the margined value the plain cosine's gradient, as InsightFace's in-place version does,
            in place of the exact one.
    """

    def __init__(self, m: float = 0.5, straight_through: bool = False) -> None:
        super().__init__()
        _check_angle("m", m)
        self.m, self.straight_through = m, straight_through

    def extra_repr(self) -> str:
        return f"m={self.m}, straight_through={self.straight_through}"

    def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        margined = combined_margin(cosine, 1.0, self.m, 0.0)
        return cosine + (margined - cosine).detach() if self.straight_through else margined


class SphereFace(nn.Module):
    """ψ = (−1)^k cos(mθ) − 2k with k = ⌊mθ/π⌋: cos(mθ), continued so that it falls all the way to θ = π.

    Liu et al., "SphereFace: Deep Hypersphere Embedding for Face Recognition", CVPR 2017, arXiv:1704.08063.

    Args:
        m: the factor on the angle, at least 1; need not be whole.
    """

    def __init__(self, m: float = 1.5) -> None:
        super().__init__()
        _check_factor("m", m)
        self.m = m

    def extra_repr(self) -> str:
        return f"m={self.m}"

    def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        return combined_margin(cosine, self.m, 0.0, 0.0)


class CombinedMargin(nn.Module):
    """ψ = cos(m1 θ + m2) − m3, continued past m1 θ + m2 > π as ArcFace is (m1 = 1) or as SphereFace is (m1 > 1).

    So (1, 0, m), (1, m, 0) and (m, 0, 0) are CosFace, ArcFace and SphereFace. Deng et al., arXiv:1801.07698, eq. 4.

    Args:
        m1: the factor on the angle, at least 1.
        m2: the margin on the angle, in radians, 0 … π.
        m3: the margin in cosine.
    """

    def __init__(self, m1: float = 1.0, m2: float = 0.3, m3: float = 0.2) -> None:
        super().__init__()
        _check_factor("m1", m1)
        _check_angle("m2", m2)
        self.m1, self.m2, self.m3 = m1, m2, m3

    def extra_repr(self) -> str:
        return f"m1={self.m1}, m2={self.m2}, m3={self.m3}"

    def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        return combined_margin(cosine, self.m1, self.m2, self.m3)


def combined_margin(cosine: Tensor, m1: float, m2: float, m3: float | Tensor) -> Tensor:
    """CombinedMargin's formula, of cosines of any shape; the margins must be in range."""
    if m1 == 1 and m2 == 0:
        return cosine - m3
    sine = ((1 - cosine) * (1 + cosine)).clamp_min(_MIN_SIN_SQUARED).sqrt()
    if m1 == 1:
        turned = cosine * math.cos(m2) - sine * math.sin(m2)
        fallback = cosine - m2 * math.sin(m2)
        return torch.where(cosine > -math.cos(m2), turned, fallback) - m3
    angle = m1 * torch.atan2(sine, cosine) + m2
    half_turns = (angle.detach() / math.pi).floor()
    sign = 1 - 2 * half_turns.remainder(2)
    return sign * angle.cos() - 2 * half_turns - m3


def group_mean_std(values: Tensor, group: _group.GroupLike = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the rows of all ranks, for margins that depend on the batch.

    One all-gather of three numbers. Ranks may have different numbers of rows, and none.

    Args:
        values: `[B]` floating point, such as the embeddings' norms.
        group: as for PartialFC.

    Returns:
        mean: `[]`.
        std: `[]`, unbiased (n − 1); NaN where the group has fewer than two rows, as torch.std.
    """
    if values.dim() != 1:
        raise ValueError(f"values must be [B], got {list(values.shape)}")
    count = values.shape[0]
    mean = values.sum() / max(count, 1)
    own = torch.stack([torch.full_like(mean, count), mean, (values - mean).square().sum()])
    parts = torch.ops.pfc.gather(own.unsqueeze(0), *_group.resolve(group))
    counts, means, squares = parts.unbind(dim=1)
    # Chan, Golub, LeVeque 1979: sums of squares about each part's own mean lose no digits.
    total = counts.sum()
    group_mean = (counts * means).sum() / total
    spread = (squares + counts * (means - group_mean).square()).sum()
    return group_mean, (spread / (total - 1)).sqrt()


def _check_angle(name: str, value: float) -> None:
    if not 0 <= value <= math.pi:
        raise ValueError(f"{name} must be an angle in [0, π] radians, got {value}")


def _check_factor(name: str, value: float) -> None:
    if not value >= 1:
        raise ValueError(f"{name} must be a factor of at least 1, got {value}")
