"""pfc::sharded_lse_update — pfc::sharded_lse with the weight's optimizer fused into its backward.

The outputs are pfc::sharded_lse's. Backward gives the gradient of the embeddings, and instead of making that of the
weight it steps: each tile's gradient goes at once into the weight's rows and into the optimizer's state, and is never
stored (Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782)::

    g_j  = ∂loss/∂w_j / loss_scale                    as in pfc::sharded_lse, for the classes j that take part
    w_j, state_j ← rule(w_j, state_j, g_j)            pfc::sparse_sgd_'s or pfc::sparse_adamw_'s, whose bits these are

    rule     state                          options
    "sgd"    [momentum_buffer], or []       momentum, weight_decay, nesterov, maximize
    "adamw"  [exp_avg, exp_avg_sq, step]    β₁, β₂, ε, weight_decay, maximize

With a loss_scale, a batch in which the loss of any rank has a gradient that is not finite changes nothing: one
device-to-host sync, as a GradScaler's step has. Without, there is none.

Collectives and cost: those of pfc::sharded_lse, and the update of S rows. Memory beside weight and state: tile buffers
and [N, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _group, sparse_adamw, sparse_sgd
from ._group import Group
from ._saved import new_logits
from ._tile import Tile
from ._tiles import Tiles
from ._walks import check, gather_row_terms, merge, row_outputs, walk_back, walk_forward


def _sgd(tensors: Sequence[Tensor], grad: Tensor, lr: Tensor, options: Sequence[float]) -> None:
    weight, *state = tensors
    momentum, weight_decay, nesterov, maximize = options
    buffer = state[0] if state else None
    # In place, as `grad` is scratch; then what is left of the rule.
    if maximize:
        grad.neg_()
    if weight_decay != 0:
        grad.add_(weight, alpha=weight_decay)
    sparse_sgd.update_rows_(weight, buffer, grad, lr, momentum, 0.0, 0.0, bool(nesterov), False, first=False)


def _adamw(tensors: Sequence[Tensor], grad: Tensor, lr: Tensor, options: Sequence[float]) -> None:
    weight, exp_avg, exp_avg_sq, step = tensors
    beta1, beta2, eps, weight_decay, maximize = options
    sparse_adamw.update_rows_(
        weight, exp_avg, exp_avg_sq, grad, step.item(), lr, beta1, beta2, eps, weight_decay, bool(maximize)
    )


_RULES = {"sgd": _sgd, "adamw": _adamw}


@torch.library.custom_op("pfc::sharded_lse_update", mutates_args=())
def sharded_lse_update(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    group_name: str,
    group_size: int,
    group_rank: int,
    saved_bytes: int,
    rule: str,
    state: Sequence[Tensor],
    lr: Tensor,
    options: Sequence[float],
    loss_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As pfc::sharded_lse_saving; its backward changes `weight` and `state`, and gives `weight` no gradient.

    Args:
        embeddings: `[N, D]`; must require grad, or there is no backward. This and what follows as for
            pfc::sharded_lse_saving.
        rule: "sgd" or "adamw".
        state: `[K, D]` each, in the order of the table above; `step` is `[]` on the CPU.
        lr: `[]`.
        options: in the order of the table above.
        loss_scale: `[]`, by which the loss is multiplied before backward.

    Raises:
        ValueError: shapes that do not fit, or no such rule.
        RuntimeError: the live group is not the one given.
    """
    group = Group(group_name, group_size, group_rank)
    _group.check(group)
    _check(embeddings, weight, index, target, group_size, rule, state)
    logits = new_logits(embeddings, weight, index, saved_bytes)
    tiles = Tiles(embeddings, weight, index, target, normalize, logits)
    return *merge(*walk_forward(tiles), group), logits


def _check(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    group_size: int,
    rule: str,
    state: Sequence[Tensor],
) -> None:
    check(embeddings, weight, index, target, group_size)
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {list(_RULES)}, got {rule!r}")
    shapes = [list(tensor.shape) for tensor in state if tensor.dim() > 0]
    if any(shape != list(weight.shape) for shape in shapes):
        raise ValueError(f"state must have the weight's shape {list(weight.shape)}, got {shapes}")


@sharded_lse_update.register_fake
def _(embeddings, weight, index, target, normalize, group_name, group_size, group_rank, saved_bytes, rule, state, *_):
    _check(embeddings, weight, index, target, group_size, rule, state)
    return *row_outputs(embeddings, group_size), new_logits(embeddings, weight, index, saved_bytes)


@torch.library.custom_op("pfc::sharded_lse_update_backward_", mutates_args=("weight", "state"))
def sharded_lse_update_backward_(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    row_terms: Tensor,
    weight_factor: float,
    logits: Tensor,
    rule: str,
    state: Sequence[Tensor],
    lr: Tensor,
    options: Sequence[float],
    loss_scale: Tensor | None,
) -> Tensor:
    """Steps, and returns this rank's part of the gradient of embeddings `[N, D]`. No collective.

    Args:
        row_terms: `[N, 3]`: l, t and negative_lse of every row.
        weight_factor: 1/W.
        logits: `[L]` as pfc::sharded_lse_update gives them.
    """
    tiles = Tiles(embeddings, weight, index, target, normalize, logits, filled=True)
    dx = torch.zeros(embeddings.shape, dtype=tiles.dtype, device=embeddings.device)
    steps = loss_scale is None or bool(row_terms[:, :2].isfinite().all())
    factor = weight_factor if loss_scale is None else weight_factor / loss_scale.to(tiles.dtype)
    per_class = [tensor for tensor in state if tensor.dim() > 0]
    counts = [tensor for tensor in state if tensor.dim() == 0]
    for count in counts:
        count.add_(steps)
    for tile, grad in walk_back(tiles, row_terms, dx, factor if steps else None):
        if not steps:
            continue
        grad = grad.to(weight.dtype)
        rows = [tile.classes, *(_rows(tensor, tile, f"state {i}") for i, tensor in enumerate(per_class))]
        _RULES[rule]([*rows, *counts], grad, lr, options)
        for tensor, updated in zip([weight, *per_class], rows, strict=True):
            _put_rows_(tensor, tile, updated)
    return dx.to(embeddings.dtype)


def _rows(tensor: Tensor, tile: Tile, name: str) -> Tensor:
    """`[T, D]`: the tile's rows of `tensor` `[K, D]`: a view where the walk takes every row, otherwise in scratch."""
    if tile.rows is None:
        return tensor[tile.span]
    return torch.index_select(tensor, 0, tile.rows, out=tile.scratch(name, tensor.dtype))


def _put_rows_(tensor: Tensor, tile: Tile, rows: Tensor) -> None:
    """Writes them back, if they are no view; padding stays as it was."""
    if tile.rows is None:
        return
    if tile.padding is not None:
        rows = torch.where(tile.padding, tensor.index_select(0, tile.rows), rows)
    tensor.index_copy_(0, tile.rows, rows)


@sharded_lse_update_backward_.register_fake
def _(embeddings, *_):
    return torch.empty_like(embeddings, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    embeddings, weight, index, target, ctx.normalize, *group, _, ctx.rule, state, lr, ctx.options, loss_scale = inputs
    ctx.group = Group(*group)
    negative_lse, _, logits = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(logits)
    ctx.save_for_backward(embeddings, weight, index, target, negative_lse, logits, lr, loss_scale, *state)


def _backward(ctx, lse_grad: Tensor | None, target_grad: Tensor | None, _: None):
    embeddings, weight, index, target, negative_lse, logits, lr, loss_scale, *state = ctx.saved_tensors
    row_terms = gather_row_terms(lse_grad, target_grad, negative_lse, ctx.group)
    dx = torch.ops.pfc.sharded_lse_update_backward_(
        embeddings,
        weight,
        index,
        target,
        ctx.normalize,
        row_terms,
        1 / ctx.group.size,
        logits,
        ctx.rule,
        state,
        lr,
        ctx.options,
        loss_scale,
    )
    return dx, *([None] * 9), [None] * len(state), None, None, None


sharded_lse_update.register_autograd(_backward, setup_context=_setup_context)
