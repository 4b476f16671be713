"""pfc::sharded_topk — each row's best classes among those that live on many ranks.

    values_n, classes_n = the k largest z_nj = x_n · ŵ_j and their global ids; of equal values the lower id first

Tile by tile, a shard keeps its k best of every row; they are exchanged, and each rank picks the best of its own rows. A
candidate is one int64, its value's bits above its id's, so that its order is the rule for ties, and one exchange moves
both.

Collectives: one all-gather of the shards' sizes, one all-to-all of [N, k]. No backward, no device-to-host sync.
Memory: the tile buffers of pfc::sharded_lse, one of them again in int64, and [N, k]. Cost: one matmul of K·N·D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _group
from ._group import Group
from ._tiles import Tiles, check_operands

_NONE = torch.iinfo(torch.int64).min  # sorts behind every candidate
_MAX_ID = (1 << 32) - 1


def _ordered(bits: Tensor) -> Tensor:
    """Between a float32's bits, as an int, and the int of the same rank among the numbers; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _pack(values: Tensor, ids: Tensor) -> Tensor:
    bits = _ordered((values + 0.0).view(torch.int32)).long()  # + 0.0: −0 and 0 are equal
    return (bits << 32) | (_MAX_ID - ids)


def _unpack(candidates: Tensor) -> tuple[Tensor, Tensor]:
    none = candidates == _NONE
    values = _ordered((candidates >> 32).int()).view(torch.float32)
    ids = _MAX_ID - (candidates & _MAX_ID)
    return values.masked_fill(none, -torch.inf), ids.masked_fill(none, -1)


def _check(embeddings: Tensor, weight: Tensor, k: int, group_size: int) -> None:
    check_operands(embeddings, weight, group_size)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


@torch.library.custom_op("pfc::sharded_topk", mutates_args=())
def sharded_topk(
    embeddings: Tensor,
    weight: Tensor,
    k: int,
    group_name: str,
    group_size: int,
    group_rank: int,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns the `k` best classes of this rank's rows.

    Args:
        embeddings: `[N, D]`, every rank's rows.
        weight: `[K, D]`, this rank's classes, which follow those of the ranks before it.
        k: how many; where the group has fewer classes, value −∞ and class −1 follow.
        group_name: with `group_size` and `group_rank`, the group that the classes are sharded over.
        normalize: whether the classes' rows are taken at unit length.

    Returns:
        values: `[B, k]` float32, descending.
        classes: `[B, k]` int64, global ids.

    Raises:
        ValueError: shapes that do not fit, or k < 1.
        RuntimeError: the live group is not the one given.
    """
    group = Group(group_name, group_size, group_rank)
    _group.check(group)
    _check(embeddings, weight, k, group_size)

    num_rows, device = embeddings.shape[0], embeddings.device
    sizes = _group.all_gather(torch.full((1,), weight.shape[0], device=device), group)
    class_start = sizes[:group_rank].sum()
    best = torch.full((k, num_rows), _NONE, device=device)
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    for tile in Tiles(embeddings, weight, None, nowhere, normalize):
        ids = torch.arange(tile.span.start, tile.span.stop, device=device) + class_start
        candidates = _pack(tile.logits.float(), ids.unsqueeze(1))
        best = torch.cat([best, candidates]).topk(k, dim=0).values

    parts = _group.all_to_all(best.t(), group)
    merged = parts.transpose(0, 1).flatten(1).topk(k, dim=1).values
    return _unpack(merged)


@sharded_topk.register_fake
def _(embeddings, weight, k, group_name, group_size, group_rank, normalize=True):
    _check(embeddings, weight, k, group_size)
    shape = (embeddings.shape[0] // group_size, k)
    return embeddings.new_empty(shape, dtype=torch.float32), embeddings.new_empty(shape, dtype=torch.int64)
