"""`pfc::sparse_adamw_` — Adam with decoupled weight decay on the rows that a gradient names, in place.

For every such row, with γ lr, λ weight_decay and t the parameter's step, which counts all of its updates, whichever
rows they named (torch.optim.AdamW's arithmetic, operation by operation, so that a gradient of all rows gives the same
bits)::

    g ← −g                                 if maximize
    p ← (1 − γ λ) p                        if λ ≠ 0
    m ← m + (1 − β₁)(g − m)
    v ← β₂ v + (1 − β₂) g²
    p ← p − γ / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

    param, exp_avg (m), exp_avg_sq (v) [K, …],   step (t) [],   rows [S],   grad [S, …]      see _rows

A row that is not named keeps p, m and v: none of them decays.

No collective, no backward, no device-to-host sync as long as `step` is on the CPU. Memory: a few tiles. Cost: the named
rows of p, m and v read twice and written once; all rows in place.

Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import check, tiles


@torch.library.custom_op("pfc::sparse_adamw_", mutates_args=("param", "exp_avg", "exp_avg_sq", "step"))
def sparse_adamw_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Counts `step` up and updates `param`, `exp_avg` and `exp_avg_sq`.

    Args:
        param: `[K, …]` floating point.
        exp_avg: like `param`.
        exp_avg_sq: like `param`.
        step: `[]` float32 on the CPU, the number of updates before this one.
        rows: `[S]` int64, ascending and distinct; None for all rows.
        grad: `[S, …]` in the dtype of `param`; rows of −0.0 throughout are padding, unless `rows` is None.
        lr: `[]`, on the CPU or the accelerator.

    Raises:
        ValueError: shapes that do not fit.
    """
    check(param, [exp_avg, exp_avg_sq], rows, grad, lr)
    count = step.add_(1).item()
    for param_rows, avg_rows, avg_sq_rows, grad_rows in tiles([param, exp_avg, exp_avg_sq], rows, grad):
        update_rows_(param_rows, avg_rows, avg_sq_rows, grad_rows, count, lr, beta1, beta2, eps, weight_decay, maximize)


def update_rows_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: float,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Updates every row of `param` and its averages `[T, …]`, given their gradients.

    Args:
        step: t, this update counted; the others as of the op.
    """
    if maximize:
        grad = -grad
    if weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = lr / (1 - beta1**step)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    if lr.device.type == "cpu":
        param.addcdiv_(exp_avg, denominator, value=-step_size.item())
    else:  # not read on the host
        param.addcmul_(exp_avg / denominator, -step_size)


@sparse_adamw_.register_fake
def _(param, exp_avg, exp_avg_sq, step, rows, grad, lr, beta1, beta2, eps, weight_decay, maximize):
    check(param, [exp_avg, exp_avg_sq], rows, grad, lr)
