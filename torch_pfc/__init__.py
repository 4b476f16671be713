"""Partial FC for PyTorch: class-sharded, sampled margin softmax, as registered operators `torch.ops.pfc.*`."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import ops, optim, reference
from ._gather_weight import gather_weight
from .margins import ArcFace, CombinedMargin, CosFace, SphereFace, group_mean_std
from .partial_fc import PartialFC
from .scaling import GradScaler, clip_grad_norm_

if TYPE_CHECKING:
    from . import checkpoint

__version__ = "0.1.0"

__all__ = [
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "GradScaler",
    "PartialFC",
    "SphereFace",
    "checkpoint",
    "clip_grad_norm_",
    "gather_weight",
    "group_mean_std",
    "ops",
    "optim",
    "reference",
]


def __getattr__(name: str) -> ModuleType:
    if name == "checkpoint":  # at its first use: it imports torch.distributed.checkpoint, which takes half a second
        return import_module(".checkpoint", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
