"""pfc::gather — every rank's rows on every rank::

    forward    y = [x_0; x_1; …; x_{W−1}]          [B, …] → [W·B, …]      one all-gather
    backward   dx_r = Σ_ranks dy[r·B : (r+1)·B]    [W·B, …] → [B, …]      one reduce-scatter

The exact adjoint over all ranks: what a rank's rows did to any rank's output comes back to them, summed.
Memory: the output. Every rank gives the same B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _group
from ._group import Group


@torch.library.custom_op("pfc::gather", mutates_args=())
def gather(input: Tensor, group_name: str, group_size: int, group_rank: int) -> Tensor:
    """Concatenates `input` `[B, …]` of every rank, any dtype, to `[W·B, …]` in rank order."""
    group = Group(group_name, group_size, group_rank)
    _group.check(group)
    return _group.all_gather(input, group)


@gather.register_fake
def _(input: Tensor, group_name: str, group_size: int, group_rank: int) -> Tensor:
    return input.new_empty((input.shape[0] * group_size, *input.shape[1:]))


def _setup_context(ctx, inputs, output) -> None:
    _, *group = inputs
    ctx.group = Group(*group)


def _reduce_scatter_backward(ctx, grad: Tensor):
    """Backward of all-gather is reduce-scatter with sum."""
    return _group.reduce_scatter(grad, ctx.group), None, None, None


gather.register_autograd(_reduce_scatter_backward, setup_context=_setup_context)
