"""The walk over a gradient's rows that pfc::sparse_sgd_ and pfc::sparse_adamw_ share.

    param, state   [K, …]   what is updated, in place; of any strides
    rows           [S]      int64, ascending and distinct: the rows that the gradient names; None where it has them all
    grad           [S, …]   their gradients; [K, …] (or []) where rows is None
    T              rows of a tile: as many as keep [T, …] within TILE_ELEMENTS

A named row that is −0.0 throughout is padding (see pfc::sharded_lse): nothing of it changes, neither by decay nor by
momentum. A gradient of all rows has no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _tiles, _values


def check(param: Tensor, state: Sequence[Tensor], rows: Tensor | None, grad: Tensor, lr: Tensor) -> None:
    """Raises ValueError unless they fit each other."""
    for tensor in state:
        if tensor.shape != param.shape:
            raise ValueError(f"state must have param's shape {list(param.shape)}, got {list(tensor.shape)}")
    if rows is not None and rows.dim() != 1:
        raise ValueError(f"rows must be [S], got {list(rows.shape)}")
    expected = list(param.shape) if rows is None else [rows.shape[0], *param.shape[1:]]
    if list(grad.shape) != expected:
        raise ValueError(f"grad must be {expected} for param {list(param.shape)}, got {list(grad.shape)}")
    if lr.dim() != 0:
        raise ValueError(f"lr must be a scalar tensor, got {list(lr.shape)}")


def tiles(tensors: Sequence[Tensor | None], rows: Tensor | None, grad: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields `[T, …]` of every one of `tensors` and of `grad`, tile by tile.

    What the caller changes in a tile of `tensors`, in place, is theirs once the next tile is asked for.
    """
    if grad.dim() == 0:
        tensors, grad = [None if tensor is None else tensor.unsqueeze(0) for tensor in tensors], grad.unsqueeze(0)
    elements = _tiles.TILE_ELEMENTS if grad.device.type == "cpu" else _tiles.ACCELERATOR_TILE_ELEMENTS
    step = max(1, elements // max(1, grad.shape[1:].numel()))
    for start in range(0, grad.shape[0], step):
        span = slice(start, start + step)
        if rows is None:
            yield *[None if tensor is None else tensor[span] for tensor in tensors], grad[span]
        else:
            yield from _gathered(tensors, rows[span], grad[span])


def _gathered(tensors: Sequence[Tensor | None], rows: Tensor, grad: Tensor) -> Iterator[tuple[Any, ...]]:
    tile = [None if tensor is None else tensor.index_select(0, rows) for tensor in tensors]
    yield *tile, grad
    padding = is_padding(grad).view(-1, *[1] * (grad.dim() - 1))
    keeps_some = not _values.is_known(~padding)  # else two passes over a tile are spared
    for tensor, updated in zip(tensors, tile, strict=True):
        if tensor is not None and updated is not None:
            if keeps_some:
                updated = torch.where(padding, tensor.index_select(0, rows), updated)
            tensor.index_copy_(0, rows, updated)


# Of −0.0, seen as an integer of the same size, the bits are the smallest: one pass finds what is that throughout.
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def is_padding(grad: Tensor) -> Tensor:
    """`[T, …] → [T]` bool: the rows that are −0.0 throughout."""
    if grad.numel() == 0:
        return torch.zeros(grad.shape[0], dtype=torch.bool, device=grad.device)
    bits = _BITS[grad.itemsize]
    return grad.view(bits).unsqueeze(-1).flatten(1).amax(dim=1) == torch.iinfo(bits).min
