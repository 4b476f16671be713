"""The two walks over a rank's classes, forward and back, that pfc::sharded_lse and its variants share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _group
from ._group import Group
from ._tiles import Tile, Tiles, accumulate_dtype, check_operands, matmul


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


def new_logits(embeddings: Tensor, weight: Tensor, index: Tensor | None, max_bytes: int) -> Tensor:
    """An empty tensor `[L]` for the logits of as many classes as fit in `max_bytes`.

    By elements, not by classes: a number of classes that depends on that of the rows could be 1 or 0, which a program
    with a dynamic batch takes for a case of its own.
    """
    dtype, num_classes = accumulate_dtype(embeddings), (weight if index is None else index).shape[0]
    size = torch.sym_min(num_classes * embeddings.shape[0], max_bytes // dtype.itemsize)
    return embeddings.new_empty(size, dtype=dtype)


def walk_forward(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Returns `[N]` each, over this rank's classes: the log-sum-exp of those that are not the target, and its logit."""
    target_logit = torch.zeros(tiles.target.shape, dtype=tiles.dtype, device=tiles.target.device)
    lse, no_shift = torch.full_like(target_logit, -torch.inf), torch.zeros_like(target_logit)
    # In float64, plain exponentials of any number of classes add up.
    total = torch.zeros_like(target_logit, dtype=torch.float64) if tiles.are_plain else None
    for tile in tiles:
        target_logit += tile.remove_target()
        if total is not None:
            total += tile.exponentials(no_shift).sum(dim=0)
            continue
        peak = tile.products.amax(dim=0)
        peak.masked_fill_(peak == -torch.inf, 0)  # where no class takes part: log 0 = −∞, not NaN
        lse = torch.logaddexp(lse, tile.exponentials(-peak).sum(dim=0).log_().add_(peak))
    if total is not None:
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
    # Contiguous: with every third number as an operand, a pass over a tile takes 20 times longer.
    lse_grad, target_grad, negative_lse = row_terms.t().contiguous()
    # l·exp(z − negative_lse) = ±exp(z + shift); the rows' signs go onto what is multiplied with the tiles.
    shift = lse_grad.abs().log() - negative_lse
    sign = torch.where(lse_grad < 0, -1.0, 1.0)
    target_grad = target_grad * sign
    embeddings = tiles.embeddings * sign.to(tiles.operand).unsqueeze(1)
    if factor is not None and tiles.rounded == tiles.dtype:
        embeddings, factor = embeddings * factor, 1.0
    for tile in tiles:
        dz = tile.exponentials(shift)
        if tile.padding is not None:
            dz.masked_fill_(tile.padding, 0)
        tile.replace_target(dz, target_grad)
        if tile.inverse is not None:
            dz.mul_(tile.inverse)
        dz = dz.to(tiles.operand)
        if dx is not None:
            matmul(dz.t(), tile.centres, out=dx, accumulate=True)
        out = None if dw is None else dw[tile.span]
        yield tile, None if factor is None else tile.weight_grad(dz, embeddings, factor, out)
    if dx is not None:
        dx.mul_(sign.unsqueeze(1))
