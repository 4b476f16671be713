"""Partial FC for PyTorch: class-sharded, sampled margin softmax, as registered operators `torch.ops.pfc.*`."""

from . import ops, reference
from .margins import ArcFace, CombinedMargin, CosFace, SphereFace, group_mean_std
from .partial_fc import PartialFC

__version__ = "0.1.0"

__all__ = [
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "PartialFC",
    "SphereFace",
    "group_mean_std",
    "ops",
    "reference",
]
