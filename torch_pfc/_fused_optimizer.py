"""The optimizer that a head's backward steps with, looked up at each forward: its options and state may be replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ._sparse_optimizer import SparseOptimizer
from .scaling import GradScaler


class FusedOptimizer:
    """What PartialFC.fuse was given."""

    def __init__(self, optimizer: SparseOptimizer, scaler: GradScaler | None, weight: nn.Parameter) -> None:
        if not isinstance(optimizer, SparseOptimizer):
            raise TypeError(f"optimizer must be one of torch_pfc.optim's, got a {type(optimizer).__name__}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch_pfc.GradScaler, got a {type(scaler).__name__}")
        self.optimizer, self.scaler = optimizer, scaler
        # Makes state and scale: a compiled forward can use them, but not make what its backward changes.
        self._look_up(weight)

    def arguments(self, weight: nn.Parameter, embeddings: Tensor) -> tuple[Any, ...]:
        """The last arguments of pfc::sharded_lse_update."""
        if not embeddings.requires_grad:
            raise RuntimeError(
                "embeddings must require grad where the optimizer is fused into their backward, or it never steps; "
                "head.fuse(None) gives the weight a gradient again"
            )
        return self._look_up(weight)

    def _look_up(self, weight: nn.Parameter) -> tuple[Any, ...]:
        scale = None if self.scaler is None else self.scaler.scale_on(weight.device)
        return *self.optimizer.fused_update(weight), scale
