"""The two walks over a rank's classes, forward and back, that pfc::sharded_lse and its variants share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _group, _values
from ._group import Group
from ._targets import Targets
from ._tile import Tile, accumulate_dtype, matmul
from ._tiles import MODERATE_FACTORS, Tiles, check_operands


def check(embeddings: Tensor, weight: Tensor, index: Tensor | None, target: Tensor, group_size: int) -> None:
    check_operands(embeddings, weight, group_size)
    if target.shape != embeddings.shape[:1]:
        raise ValueError(
            f"target must have one entry for each of embeddings' {embeddings.shape[0]} rows, got {list(target.shape)}"
        )
    if index is not None and index.dim() != 1:
        raise ValueError(f"index must be [S], got {list(index.shape)}")


def row_outputs(embeddings: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Empty tensors like `negative_lse` and `target_logit` `[B]`."""
    shape, dtype = embeddings.shape[0] // group_size, accumulate_dtype(embeddings)
    return embeddings.new_empty(shape, dtype=dtype), embeddings.new_empty(shape, dtype=dtype)


def walk_forward(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Returns `[N]` each, over this rank's classes: the log-sum-exp of those that are not the target, and its logit."""
    target_logit = Targets(tiles).logit
    lse = torch.full_like(target_logit, -torch.inf)
    total = torch.zeros_like(target_logit, dtype=torch.float64)  # in which any number of tiles adds up
    for tile in tiles:
        if tiles.is_plain:
            exponentials = tile.exponentials(None)
            total += exponentials.sum(dim=0)
            if tile.span.stop <= tiles.num_saved:
                tile.over_length_(exponentials)
            continue
        peak = tile.logits.amax(dim=0)
        peak.masked_fill_(peak == -torch.inf, 0)  # where no class takes part: log 0 = −∞, not NaN
        lse = torch.logaddexp(lse, tile.exponentials(-peak).sum(dim=0).log_().add_(peak))
    if tiles.is_plain:
        lse = total.log().to(tiles.dtype)
    return lse, target_logit


def merge(lse: Tensor, target_logit: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """From every rank's part of every row `[N]` to the whole of this rank's rows `[B]`: an all-to-all of [N, 2]."""
    parts = _group.all_to_all(torch.stack([lse, target_logit], dim=1), group)
    return torch.logsumexp(parts[..., 0], dim=0), parts[..., 1].sum(dim=0)


def gather_row_terms(lse_grad: Tensor | None, target_grad: Tensor | None, negative_lse: Tensor, group: Group) -> Tensor:
    """Returns l, t and negative_lse of every row of the group, `[N, 3]`."""
    terms = [torch.zeros_like(negative_lse) if grad is None else grad for grad in (lse_grad, target_grad)]
    return torch.ops.pfc.gather(torch.stack([*terms, negative_lse], dim=1), *group)


def walk_back(
    tiles: Tiles, row_terms: Tensor, dx: Tensor | None, factor: float | Tensor | None, dw: Tensor | None = None
) -> Iterator[tuple[Tile, Any]]:
    """Adds to the gradient of the embeddings `dx` `[N, D]`, once the walk is at its end.

    Yields each tile, and `factor` times the gradient of its rows of the weight, `[T, D]`; None without a factor. In the
    tile's rows of `dw`, or else valid until the next tile is asked for.
    """
    lse_grad, target_grad, negative_lse = row_terms.t().contiguous()
    targets = Targets(tiles)
    shift, row_factor = _scale(tiles, lse_grad, negative_lse)
    if factor is not None:
        weight_factor, target_factor = row_factor, target_grad * factor
        if tiles.rounded == tiles.dtype:
            weight_factor, factor = row_factor * factor, 1.0
        embeddings = tiles.embeddings * weight_factor.to(tiles.operand).unsqueeze(1)
    for tile in tiles:
        # dz, but for the targets' and the row's factor.
        dz = tile.scores if tile.is_done else tile.over_length_(tile.exponentials(shift))
        dz = dz.to(tiles.operand)
        if dx is not None:
            matmul(dz.t(), tile.centres, out=dx, accumulate=True)
        grad = None
        if factor is not None:
            grad = matmul(dz, embeddings, out=tile.scratch("gradient") if dw is None else dw[tile.span])
            targets.add_weight_grad_(tile.project_(grad, factor), target_factor, tile)
        yield tile, grad
    if dx is not None:
        targets.add_embeddings_grad_(dx.mul_(row_factor.unsqueeze(1)), target_grad)


def _scale(tiles: Tiles, lse_grad: Tensor, negative_lse: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns what turns exponentials into l·p: a shift `[N]` of the logits, or None, and a factor `[N]` of the rows.

    A plain walk needs no pass over a tile for that. Otherwise p = exp(z − negative_lse) is at most 1, and |l| goes into
    the exponent, where half precision holds their product and not both.
    """
    has_none = negative_lse == -torch.inf  # no class but the target
    if tiles.is_plain:
        factor = torch.mul(lse_grad, (-negative_lse).exp()).masked_fill_(has_none, 0)
        size, (low, high) = factor.abs(), MODERATE_FACTORS
        if _values.is_known((size > low) & (size < high) | (lse_grad == 0) | has_none):
            return None, factor
        tiles.leave_plain()
    shift = (lse_grad.abs().log() - negative_lse).masked_fill_(has_none, -torch.inf)
    return shift, torch.where(lse_grad < 0, -1.0, 1.0)
