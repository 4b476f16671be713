"""`pfc::sparse_sgd_` — stochastic gradient descent on the rows that a gradient names, in place.

For every such row, with μ momentum, τ dampening, λ weight_decay, γ lr (torch.optim.SGD's arithmetic, operation by
operation, so that a gradient of all rows gives the same bits)::

    g ← −g                                 if maximize
    g ← g + λ p                            if λ ≠ 0
    b ← g  at the parameter's first step, otherwise  μ b + (1 − τ) g
    g ← g + μ b  if nesterov, otherwise  b            both if μ ≠ 0
    p ← p − γ g

    param, momentum_buffer [K, …],   rows [S],   grad [S, …]      see _rows; momentum_buffer is None where μ = 0

A row that is not named keeps p and b: neither decays. A row that is named first at a later step starts from b = 0.

No collective, no backward, no device-to-host sync. Memory: a few tiles. Cost: the named rows of p and b read twice and
written once; all rows in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import check, tiles


@torch.library.custom_op("pfc::sparse_sgd_", mutates_args=("param", "momentum_buffer"))
def sparse_sgd_(
    param: Tensor,
    momentum_buffer: Tensor | None,
    rows: Tensor | None,
    grad: Tensor,
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """Updates `param` and `momentum_buffer`.

    Args:
        param: `[K, …]` floating point.
        momentum_buffer: like `param`; None where `momentum` is 0.
        rows: `[S]` int64, ascending and distinct; None for all rows.
        grad: `[S, …]` in the dtype of `param`; rows of −0.0 throughout are padding, unless `rows` is None.
        lr: `[]`, on the CPU or the accelerator.
        first: whether this is the parameter's first step: `momentum_buffer` takes the gradient undampened.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(param, momentum_buffer, rows, grad, lr)
    for param_rows, buffer_rows, grad_rows in tiles([param, momentum_buffer], rows, grad):
        update_rows_(
            param_rows, buffer_rows, grad_rows, lr, momentum, dampening, weight_decay, nesterov, maximize, first
        )


def _check(param: Tensor, momentum_buffer: Tensor | None, rows: Tensor | None, grad: Tensor, lr: Tensor) -> None:
    check(param, [] if momentum_buffer is None else [momentum_buffer], rows, grad, lr)


def update_rows_(
    param: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """Updates every row of `param` and `momentum_buffer` `[T, …]`, given their gradients; arguments as of the op."""
    if maximize:
        grad = -grad
    if weight_decay != 0:
        grad = grad.add(param, alpha=weight_decay)
    if momentum_buffer is not None:
        if first:
            momentum_buffer.copy_(grad)
        else:
            momentum_buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
        grad = grad.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    if lr.device.type == "cpu":
        param.add_(grad, alpha=-lr.item())
    else:  # not read on the host
        param.addcmul_(grad, -lr)


@sparse_sgd_.register_fake
def _(param, momentum_buffer, rows, grad, lr, momentum, dampening, weight_decay, nesterov, maximize, first):
    _check(param, momentum_buffer, rows, grad, lr)
