"""Another list of classes for a trained head: rows move to the ranks that hold their new ids, tile by tile.

Traffic: every row that is kept, once. Memory on a rank: one new shard beside the old one, and two tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._init import draw_centres_
from ..ops import _group
from ..ops._group import Group
from ..ops._hash import random_bits
from ..ops._shard import shard
from ..ops._tiles import ACCELERATOR_TILE_ELEMENTS, TILE_ELEMENTS
from ..partial_fc import PartialFC
from ._contents import check_class_state, is_class_state, weight_position


@torch.no_grad()
def resize(
    head: PartialFC, num_classes: int, new_ids: Tensor | None = None, *, optimizer: Optimizer | None = None
) -> None:
    """Changes the head's classes in place, for fine-tuning. Every rank of its group calls it, with the same arguments.

    Centres keep their values under their new ids. Those of new classes are drawn as `reset_parameters` draws them.
    `head.weight` becomes a new Parameter without a gradient; an optimizer that is not given here still holds the old
    one.

    Args:
        head: its `num_classes`, shard and `weight` change.
        num_classes: how many classes there are to be.
        new_ids: `[C]` integers: the new id of each of the classes until now, or -1 for one that is dropped. None: all
            keep theirs.
        optimizer: what holds `head.weight`. Its state moves with the rows, and is zero for new classes; scalars, such
            as the number of steps, stay.

    Raises:
        TypeError: ids that are not integers.
        ValueError: ids out of range or given twice; fewer classes than keep theirs; an optimizer without the weight, or
            with state that is not by class; or arguments that differ between ranks. On every rank, and nothing has
            changed.
    """
    ids = _group.together(lambda: _checked_ids(head, num_classes, new_ids), head.group)
    state = _group.together(lambda: _state_of(optimizer, head), head.group)
    per_class = sorted(key for key, value in state.items() if is_class_state(value))
    _check_same(head.group, num_classes, ids, per_class)

    shard_ = shard(num_classes, head.group.size, head.group.rank)
    old = head.weight
    for key in per_class:
        moved = state[key].new_zeros(shard_.size, head.embedding_dim)
        _move(state[key], moved, ids, num_classes, head.group)
        state[key] = moved
    weight = old.new_empty(shard_.size, head.embedding_dim)
    draw_centres_(weight, shard_.start)
    _move(old, weight, ids, num_classes, head.group)

    head._set_num_classes(num_classes)
    head.weight = nn.Parameter(weight, requires_grad=old.requires_grad)
    if optimizer is not None:
        _replace(optimizer, old, head.weight)


def _checked_ids(head: PartialFC, num_classes: int, new_ids: Tensor | None) -> Tensor:
    """`new_ids` as `[C]` int64 on the CPU."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if new_ids is None:
        if num_classes < head.num_classes:
            raise ValueError(
                f"num_classes must be at least the {head.num_classes} of the head unless new_ids says which stay, "
                f"got {num_classes}"
            )
        return torch.arange(head.num_classes)
    if new_ids.is_floating_point() or new_ids.is_complex() or new_ids.dtype == torch.bool:
        raise TypeError(f"new_ids must be integers, got {new_ids.dtype}")
    if new_ids.shape != (head.num_classes,):
        raise ValueError(
            f"new_ids must have one entry for each of {head.num_classes} classes, got {list(new_ids.shape)}"
        )
    ids = new_ids.to("cpu", torch.int64)
    outside = ids[(ids < -1) | (ids >= num_classes)]
    if len(outside):
        raise ValueError(f"new_ids must lie in [0, {num_classes}) or equal -1, got {outside[:5].tolist()}")
    values, counts = ids[ids >= 0].unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"new_ids must differ from each other, got {values[counts > 1][:5].tolist()} more than once")
    return ids


def _state_of(optimizer: Optimizer | None, head: PartialFC) -> dict[str, Any]:
    """The optimizer's state of the head's weight; empty if it has none."""
    if optimizer is None:
        return {}
    if weight_position(optimizer, head) is None:
        raise ValueError("the optimizer must hold head.weight to move its state, but it is none of its parameters")
    state: dict[str, Any] = optimizer.state.get(head.weight, {})
    check_class_state(state, head)
    return state


def _check_same(group: Group, num_classes: int, ids: Tensor, per_class: list[str]) -> None:
    digest = int((random_bits(torch.tensor(0), torch.arange(len(ids))) * (ids + 1)).sum())
    given = _group.all_gather_object((num_classes, digest, per_class), group)
    if any(other != given[0] for other in given):
        raise ValueError(
            "num_classes, new_ids and the optimizer's state must be the same on every rank, got "
            f"num_classes {[n for n, _, _ in given]}, hashes of new_ids {[h for _, h, _ in given]}, "
            f"state {[s for _, _, s in given]}"
        )


def _move(old: Tensor, new: Tensor, ids: Tensor, num_classes: int, group: Group) -> None:
    """Copies the rows of `old` `[K, D]`, over all ranks, to their places in `new` `[K', D]`.

    Args:
        ids: `[C]` int64 on the CPU, the same on every rank, which so knows what it will get.
        num_classes: of the new list.
    """
    held = shard(num_classes, group.size, group.rank)
    full = shard(num_classes, group.size, 0).size
    elements = TILE_ELEMENTS if old.device.type == "cpu" else ACCELERATOR_TILE_ELEMENTS
    # All ranks may send to one.
    step = max(1, elements // (group.size * old.shape[1]))
    for offset in range(0, shard(len(ids), group.size, 0).size, step):
        tiles = [_tile(ids, group, rank, offset, step) for rank in range(group.size)]
        sent_to = torch.where(tiles[group.rank] >= 0, tiles[group.rank] // full, group.size)
        order = sent_to.argsort(stable=True)[: int((sent_to < group.size).sum())]  # by rank; without those dropped
        num_sent = sent_to.bincount(minlength=group.size)[: group.size].tolist()
        arriving = [tile[(tile >= held.start) & (tile < held.start + held.size)] for tile in tiles]
        rows = old.index_select(0, (offset + order).to(old.device))
        rows = _group.all_to_all_rows(rows, num_sent, [len(tile) for tile in arriving], group)
        new.index_copy_(0, (torch.cat(arriving) - held.start).to(new.device), rows)


def _tile(ids: Tensor, group: Group, rank: int, offset: int, step: int) -> Tensor:
    """The new ids of the classes that `rank` holds at rows `offset … offset + step − 1`; fewer or none at its end."""
    start, size = shard(len(ids), group.size, rank)
    return ids[start : start + size][offset : offset + step]


def _replace(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
