"""Optimizers that update the rows that a sparse gradient names, in place, and no others.

SparseSGD and SparseAdamW are torch.optim's SGD and AdamW by arithmetic, options, state and `state_dict`: a gradient of
all rows, dense or sparse, gives the same bits as theirs with `foreach=False`. A row that the gradient does not name is
not touched: its value does not decay, its momentum does not move it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from ._padding import coalesce

__all__ = ["SparseAdamW", "SparseSGD"]


class _SparseOptimizer(Optimizer):
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
            lr = _scalar(group["lr"])
            for param in group["params"]:
                if param.grad is not None:
                    rows, grad = _rows_and_values(param)
                    self._update(param, rows, grad, lr, group)

    @abstractmethod
    def _update(self, param: Tensor, rows: Tensor | None, grad: Tensor, lr: Tensor, group: dict[str, Any]) -> None:
        """Updates `param` and its state, which the first call makes, as `group`'s options say."""


class SparseSGD(_SparseOptimizer):
    """torch.optim.SGD for sparse gradients: lazy momentum and weight decay, in place, without a `[K, D]` temporary.

    Momentum and decay of a row are applied at the steps that name it, and at no other. `dampening` applies from the
    parameter's second step on, as in torch.optim, also to rows that are named there first.

    Args:
        params: parameters, named parameters or groups of them, as for any torch.optim optimizer. Their gradients may
            be dense, or sparse in dimension 0: `PartialFC(sparse_grad=True)`, `nn.Embedding(sparse=True)`.
        lr: learning rate, a number or a one-element tensor.
        momentum: μ.
        dampening: τ, by which a gradient counts less in the momentum.
        weight_decay: λ, L2.
        nesterov: needs a momentum and no dampening.
        maximize: ascend.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        _check_lr(lr)
        _check_not_negative("momentum", momentum)
        _check_not_negative("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum and zero dampening, got momentum={momentum} and dampening={dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(self, param, rows, grad, lr, group) -> None:
        buffer, first = None, False
        if group["momentum"] != 0:
            state = self.state[param]
            first = state.get("momentum_buffer") is None
            if first:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = _local(state["momentum_buffer"])
        torch.ops.pfc.sparse_sgd_(
            _local(param),
            buffer,
            rows,
            grad,
            lr,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
            first,
        )


class SparseAdamW(_SparseOptimizer):
    """torch.optim.AdamW for sparse gradients: lazy averages and weight decay, in place, without a `[K, D]` temporary.

    A row's averages and decay are applied at the steps that name it, and at no other. The bias correction counts the
    steps of the parameter, whichever rows they named.

    Args:
        params: as of SparseSGD.
        lr: learning rate, a number or a one-element tensor.
        betas: β₁ and β₂, the decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: λ, decoupled from the gradient.
        maximize: ascend.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        _check_lr(lr)
        _check_not_negative("eps", eps)
        _check_not_negative("weight_decay", weight_decay)
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas must lie in [0, 1), got {beta} at index {index}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if any(group.get("amsgrad", False) for group in state["param_groups"]):
            raise ValueError("SparseAdamW keeps no maximum of the averages, got the state of one with amsgrad=True")
        super().__setstate__(state)
        for param_state in self.state.values():
            param_state["step"] = param_state["step"].cpu()  # fused=True keeps it on the accelerator

    def _update(self, param, rows, grad, lr, group) -> None:
        state = self.state[param]
        if not state:
            # On the host, as torch.optim's: the bias correction is computed there.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        torch.ops.pfc.sparse_adamw_(
            _local(param),
            _local(state["exp_avg"]),
            _local(state["exp_avg_sq"]),
            state["step"],
            rows,
            grad,
            lr,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["maximize"],
        )


def _check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got {list(lr.shape)}")
    _check_not_negative("lr", lr)


def _check_not_negative(name: str, value: float | Tensor) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _scalar(lr: float | Tensor) -> Tensor:
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
    return None, _local(grad)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, such as fully_shard makes; any other tensor itself."""
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # DTensor's import takes most of a second
