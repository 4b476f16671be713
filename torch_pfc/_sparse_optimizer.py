"""What SparseSGD and SparseAdamW share: the walk over their parameters, and what they take of a gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from ._padding import coalesce


class FusedUpdate(NamedTuple):
    """What pfc::sharded_lse_update needs to know of an optimizer, in the order of its arguments.

    Attributes:
        rule: which operator's arithmetic to follow.
        state: of the parameter.
        lr: `[]`.
        options: of the parameter's group.
    """

    rule: str
    state: list[Tensor]
    lr: Tensor
    options: list[float]


class SparseOptimizer(Optimizer):
    """The walk over the parameters; what is done to one of them is the subclass's `_update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What `closure` returned, None without one.

        Raises:
            TypeError: a gradient of a layout other than dense or COO with one sparse dimension, or complex parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    # Dynamo traces no sparse tensors, and an update is one opaque operator a parameter: there is nothing to compile.
    @_disable_dynamo  # torch.compiler.disable, but Dynamo is imported by the first call
    def _update_all(self) -> None:
        for group in self.param_groups:
            lr = scalar(group["lr"])
            for param in group["params"]:
                if param.grad is not None:
                    rows, grad = _rows_and_values(param)
                    self._update(param, rows, grad, lr, group)

    @abstractmethod
    def fused_update(self, param: Tensor) -> FusedUpdate:
        """How `step` would update `param`, for a backward to do it (PartialFC.fuse). Makes the state if there is none.

        Raises:
            ValueError: `param` is none of the optimizer's, or an option rules it out.
        """

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                return group
        raise ValueError(f"the optimizer must hold the parameter, but one of {list(param.shape)} is none of its own")

    @abstractmethod
    def _update(self, param: Tensor, rows: Tensor | None, grad: Tensor, lr: Tensor, group: dict[str, Any]) -> None:
        """Updates `param` and its state, which the first call makes, as `group`'s options say."""


def check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got {list(lr.shape)}")
    check_not_negative("lr", lr)


def check_not_negative(name: str, value: float | Tensor) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def scalar(lr: float | Tensor) -> Tensor:
    """`[]`; of a number in float64, in which PyTorch computes with one."""
    return lr.detach().reshape(()) if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64)


def _rows_and_values(param: Tensor) -> tuple[Tensor | None, Tensor]:
    """The rows that the gradient names, ascending and distinct, None for all of them; and its values there."""
    grad = param.grad
    assert grad is not None
    is_coo = grad.layout == torch.sparse_coo
    supported = grad.layout == torch.strided or (is_coo and grad.sparse_dim() == 1)
    if not supported or param.layout != torch.strided or param.is_complex():
        dims = f" with {grad.sparse_dim()} sparse dimensions" if is_coo else ""
        raise TypeError(
            "a parameter must be real and dense, its gradient dense or COO with one sparse dimension, "
            f"got a {param.dtype} {param.layout} parameter {list(param.shape)} with a {grad.layout} gradient{dims}"
        )
    if is_coo:
        grad = coalesce(grad)
        return grad.indices()[0], grad.values()
    if _is_distributed(grad):
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return None, local(grad)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, such as fully_shard makes; any other tensor itself."""
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # DTensor's import takes most of a second
