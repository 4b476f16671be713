"""pfc::sharded_lse — the softmax over classes that live on many ranks, without its logits.

With z_nj = x_n · ŵ_j, the logit of row n and class j (ŵ is w / ‖w‖, or w itself where normalize is False)::

    negative_lse_n = log Σ_{j ≠ target_n} exp z_nj      over the sets of all ranks
    target_logit_n = z_{n, target_n}                    0 where the row has no target on any rank

so that a softmax cross-entropy with any margin ψ on the target is softplus(negative_lse − s·ψ(target_logit / s))::

    embeddings [N, D]  every rank's rows, scaled by the caller; their dtype is the matmul's
    weight     [K, D]  this rank's classes, in any (master) dtype
    index      [S]     the classes that take part, from pfc::sample; None is all K
    target     [N]     position in `index` (or row of `weight`), −1 where the class lives elsewhere or is ignored
    outputs    [B]     of this rank's rows, float32 (float64 for float64 embeddings)

Backward, with l and t the gradients of the two outputs and p_nj = exp(z_nj − negative_lse_n)::

    dz_nj = l_n p_nj  (j ≠ target_n),   t_n  (j = target_n)
    dx_n  = Σ_j dz_nj ŵ_j                                  this rank's part of the sum: pfc::gather's backward adds
    dw_j  = (g_j − ŵ_j (ŵ_j · g_j)) / (W ‖w_j‖),  g_j = Σ_n dz_nj x_n

The 1/W is the one factor by which "mean over ranks" enters (docs/gradients.md): nobody averages this gradient later.

Backward makes each tile's logits again, or reads what pfc::sharded_lse_saving has kept of them. Where classes are
normalised and no row of embeddings is longer than 66, no exponential can overflow: a CPU, which can tell, then takes no
maximum out of them, and keeps exponentials.

Collectives: forward one all-to-all of [N, 2]; backward one all-gather of [B, 3]. No device-to-host sync.
Memory: some tile buffers of at most TILE_ELEMENTS elements each, a few [N, D] in float32 for dx and the targets, and
the weight gradient: [K, D], or [S, D] with sparse_grad. Cost: one matmul of S·N·D forward; three backward, or two for
classes with saved logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _group, _values
from ._group import Group
from ._saved import new_logits
from ._tiles import Tiles
from ._walks import check, gather_row_terms, merge, row_outputs, walk_back, walk_forward


@torch.library.custom_op("pfc::sharded_lse", mutates_args=())
def sharded_lse(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    group_name: str,
    group_size: int,
    group_rank: int,
    sparse_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `negative_lse` and `target_logit`, `[B]` each, of this rank's rows.

    Args:
        embeddings: `[N, D]`, floating point.
        weight: `[K, D]`, floating point.
        index: `[S]` int64 as pfc::sample gives it, or None.
        target: `[N]` int64.
        normalize: whether the classes' rows are taken at unit length.
        group_name: with `group_size` and `group_rank`, the group that the classes are sharded over.
        sparse_grad: whether `weight`'s gradient is a coalesced COO tensor of the S rows.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: the live group is not the one given.
    """
    group = Group(group_name, group_size, group_rank)
    _group.check(group)
    check(embeddings, weight, index, target, group_size)
    return merge(*walk_forward(Tiles(embeddings, weight, index, target, normalize)), group)


@sharded_lse.register_fake
def _(embeddings, weight, index, target, normalize, group_name, group_size, group_rank, sparse_grad=False):
    check(embeddings, weight, index, target, group_size)
    return row_outputs(embeddings, group_size)


@torch.library.custom_op("pfc::sharded_lse_saving", mutates_args=())
def sharded_lse_saving(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    group_name: str,
    group_size: int,
    group_rank: int,
    sparse_grad: bool,
    saved_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As pfc::sharded_lse, and `[L]`, for its backward, of as many classes' logits as fit in `saved_bytes`.

    4·(N+1) bytes to a class (8 in float64); zeros fill what is left.
    """
    group = Group(group_name, group_size, group_rank)
    _group.check(group)
    check(embeddings, weight, index, target, group_size)
    logits = new_logits(embeddings, weight, index, saved_bytes)
    tiles = Tiles(embeddings, weight, index, target, normalize, logits)
    return *merge(*walk_forward(tiles), group), logits


@sharded_lse_saving.register_fake
def _(embeddings, weight, index, target, normalize, group_name, group_size, group_rank, sparse_grad, saved_bytes):
    check(embeddings, weight, index, target, group_size)
    return *row_outputs(embeddings, group_size), new_logits(embeddings, weight, index, saved_bytes)


@torch.library.custom_op("pfc::sharded_lse_backward", mutates_args=())
def sharded_lse_backward(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    row_terms: Tensor,
    weight_factor: float,
    embeddings_grad: bool,
    weight_grad: bool,
    sparse_grad: bool,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the gradients; empty tensors in place of those not asked for. No collective.

    Args:
        row_terms: `[N, 3]`: l, t and negative_lse of every row.
        weight_factor: 1/W.
        logits: as pfc::sharded_lse_saving gives them.

    Returns:
        The gradient of embeddings `[N, D]`; of weight `[K, D]`, or with `sparse_grad` its rows `[S, D]`; and with
        `sparse_grad` the ids of those rows, `[S]` ascending. Padding rows hold −0.0, the identity of IEEE addition:
        adding such a row changes nothing, the sum of two is still one, and no member's row begins with −0.0.
    """
    tiles = Tiles(embeddings, weight, index, target, normalize, logits, filled=True)
    dx = torch.zeros(embeddings.shape if embeddings_grad else 0, dtype=tiles.dtype, device=embeddings.device)
    dw, in_place = weight.new_empty(0), False
    if weight_grad and (sparse_grad or index is None):  # a tile's rows of dw are those of its span
        dw, in_place = weight.new_empty(tiles.num_classes, weight.shape[1]), weight.dtype == tiles.dtype
    elif weight_grad:
        dw = weight.new_zeros(weight.shape)

    factor = weight_factor if weight_grad else None
    for tile, g in walk_back(tiles, row_terms, dx if embeddings_grad else None, factor, dw if in_place else None):
        if not weight_grad:
            continue
        if tile.rows is not None and not sparse_grad:
            dw.index_copy_(0, tile.rows, g.to(dw.dtype))
        elif not in_place:
            dw[tile.span] = g
        if sparse_grad and not _values.is_known(dw[tile.span, :1] != 0):
            dw[tile.span] += 0.0  # turns −0.0 into 0.0: no row but padding begins with the one

    rows = target.new_empty(0)
    if weight_grad and sparse_grad:
        rows, dw = _by_row(dw, index, tiles)
    return dx.to(embeddings.dtype), dw, rows


def _by_row(values: Tensor, index: Tensor | None, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Returns the row ids, ascending, and the rows in that order."""
    if index is None:
        return torch.arange(values.shape[0], device=values.device), values
    if not tiles.may_pad:
        return index.clone(), values
    rows, order = (index % tiles.num_local_classes).sort()
    is_padding = index[order] >= tiles.num_local_classes
    return rows, values[order].masked_fill_(is_padding.unsqueeze(1), -0.0)


@sharded_lse_backward.register_fake
def _(
    embeddings,
    weight,
    index,
    target,
    normalize,
    row_terms,
    weight_factor,
    embeddings_grad,
    weight_grad,
    sparse_grad,
    logits=None,
):
    num_rows = (weight if index is None else index).shape[0] if sparse_grad else weight.shape[0]
    return (
        embeddings.new_empty(embeddings.shape if embeddings_grad else 0),
        weight.new_empty((num_rows, weight.shape[1]) if weight_grad else 0),
        target.new_empty(num_rows if weight_grad and sparse_grad else 0),
    )


def _setup_context(ctx, inputs, output) -> None:
    embeddings, weight, index, target, ctx.normalize, *group, ctx.sparse_grad = inputs[:9]
    ctx.group = Group(*group)
    negative_lse, _, *logits = output
    ctx.set_materialize_grads(False)  # the logits' would be zeros of their size
    ctx.mark_non_differentiable(*logits)
    ctx.save_for_backward(embeddings, weight, index, target, negative_lse, *logits)
    ctx.num_inputs = len(inputs)


def _backward(ctx, lse_grad: Tensor | None, target_grad: Tensor | None, *_: None):
    embeddings, weight, index, target, negative_lse, *logits = ctx.saved_tensors
    embeddings_grad, weight_grad = ctx.needs_input_grad[:2]
    row_terms = gather_row_terms(lse_grad, target_grad, negative_lse, ctx.group)
    dx, dw, rows = torch.ops.pfc.sharded_lse_backward(
        embeddings,
        weight,
        index,
        target,
        ctx.normalize,
        row_terms,
        1 / ctx.group.size,
        embeddings_grad,
        weight_grad,
        ctx.sparse_grad,
        *logits,
    )
    if weight_grad and ctx.sparse_grad:
        dw = torch.sparse_coo_tensor(rows.unsqueeze(0), dw, weight.shape, is_coalesced=True, check_invariants=False)
    return (
        dx if embeddings_grad else None,
        dw if weight_grad else None,
        *([None] * (ctx.num_inputs - 2)),
    )


sharded_lse.register_autograd(_backward, setup_context=_setup_context)
sharded_lse_saving.register_autograd(_backward, setup_context=_setup_context)
