"""Optimizers that update the rows that a sparse gradient names, in place, and no others.

SparseSGD and SparseAdamW are torch.optim's SGD and AdamW by arithmetic, options, state and `state_dict`: a gradient of
all rows, dense or sparse, gives the same bits as theirs with `foreach=False`. A row that the gradient does not name is
not touched: its value does not decay, its momentum does not move it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._sparse_optimizer import FusedUpdate, SparseOptimizer, check_lr, check_not_negative, local, scalar

__all__ = ["SparseAdamW", "SparseSGD"]


class SparseSGD(SparseOptimizer):
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
        check_lr(lr)
        check_not_negative("momentum", momentum)
        check_not_negative("weight_decay", weight_decay)
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

    def fused_update(self, param: Tensor) -> FusedUpdate:
        """As of the base class. A dampening, which the first step is without, rules it out."""
        group = self._group_of(param)
        if group["dampening"] != 0:
            raise ValueError(f"dampening must be 0 for an update in the backward, got {group['dampening']}")
        buffer, _ = self._buffer(param, group)
        options = [float(group[name]) for name in ("momentum", "weight_decay", "nesterov", "maximize")]
        return FusedUpdate("sgd", [] if buffer is None else [buffer], scalar(group["lr"]), options)

    def _buffer(self, param: Tensor, group: dict[str, Any]) -> tuple[Tensor | None, bool]:
        """The momentum, None where there is none, and whether it is new."""
        if group["momentum"] == 0:
            return None, False
        state = self.state[param]
        is_new = state.get("momentum_buffer") is None
        if is_new:
            state["momentum_buffer"] = torch.zeros_like(param)
        return local(state["momentum_buffer"]), is_new

    def _update(self, param, rows, grad, lr, group) -> None:
        buffer, first = self._buffer(param, group)
        torch.ops.pfc.sparse_sgd_(
            local(param),
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


class SparseAdamW(SparseOptimizer):
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
        check_lr(lr)
        check_not_negative("eps", eps)
        check_not_negative("weight_decay", weight_decay)
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

    def fused_update(self, param: Tensor) -> FusedUpdate:
        """As of the base class."""
        group, state = self._group_of(param), self._state_of(param)
        options = [*group["betas"], group["eps"], group["weight_decay"], float(group["maximize"])]
        return FusedUpdate(
            "adamw", [state["exp_avg"], state["exp_avg_sq"], state["step"]], scalar(group["lr"]), options
        )

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            # On the host, as torch.optim's: the bias correction is computed there.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def _update(self, param, rows, grad, lr, group) -> None:
        state = self._state_of(param)
        torch.ops.pfc.sparse_adamw_(
            local(param),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            state["step"],
            rows,
            grad,
            lr,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["maximize"],
        )
