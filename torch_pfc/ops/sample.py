"""pfc::sample — which of a rank's classes take part in this step::

    set      = positives of this shard ∪ negatives, drawn uniformly up to max(num_sampled, positives) classes
    S        = clamp(num_sampled, min(N, K), K)           known from shapes alone
    index    [S]   local ids of the set, ascending; where the set is smaller than S, padding follows
    target   [N]   position of the row's class in `index`, −1 where the class lives elsewhere or is ignored

A padding entry is `K + id`, with `id` a class outside the set: so `index < K` tells members from padding, `index % K`
is a row that may be read, and all of `index` is strictly ascending and free of duplicates.

The draw is counter-based: a class's priority is a hash of `key` and its *global* id, and the lowest priorities win.
The same key therefore gives the same set on every device, and shards never mirror one another.

No collective, no backward, no device-to-host sync. Cost: O(K) for the hash, one top-S selection. Memory: O(K) int64.
Partial FC: An et al., "Killing Two Birds with One Stone", CVPR 2022, arXiv:2203.15565.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._hash import random_bits


def local_target(labels: Tensor, class_start: int, num_local_classes: int, ignore_index: int) -> Tensor:
    """Returns the local id of each label `[N]`, −1 where another rank holds its class or it is ignored."""
    local = labels - class_start
    here = (local >= 0) & (local < num_local_classes) & (labels != ignore_index)
    return torch.where(here, local, -1)


def _num_entries(labels: Tensor, num_local_classes: int, num_sampled: int):
    """S, an int, or a symbol under tracing."""
    return torch.sym_max(min(num_sampled, num_local_classes), torch.sym_min(labels.shape[0], num_local_classes))


def _check(labels: Tensor, key: Tensor) -> None:
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(f"labels must be [N] int64, got {list(labels.shape)} {labels.dtype}")
    if key.dim() != 0 or key.dtype != torch.int64:
        raise ValueError(f"key must be a scalar int64 tensor, got {list(key.shape)} {key.dtype}")


@torch.library.custom_op("pfc::sample", mutates_args=())
def sample(
    labels: Tensor, key: Tensor, class_start: int, num_local_classes: int, num_sampled: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Draws this step's classes of one shard.

    Args:
        labels: `[N]` int64, global class ids of all rows of the group.
        key: `[]` int64.
        class_start: the first global id of this shard.
        num_local_classes: K.
        num_sampled: `int(sample_rate · K)`; 0 takes the positives only.
        ignore_index: the label of rows that have no class.

    Returns:
        index: `[S]` int64.
        target: `[N]` int64.

    Raises:
        ValueError: labels or key of another shape or dtype.
    """
    _check(labels, key)
    target = local_target(labels, class_start, num_local_classes, ignore_index)
    size = _num_entries(labels, num_local_classes, num_sampled)
    if num_local_classes == 0:
        return labels.new_empty(0), target

    ids = torch.arange(num_local_classes, device=labels.device)
    priority = random_bits(key, ids + class_start)
    # Positives go to the front of the queue. Rows without a class here write to a slot past the end instead of
    # being selected, which would need their number on the host.
    queue = torch.cat([priority, priority.new_empty(1)])
    first = torch.iinfo(queue.dtype).min
    queue.index_fill_(0, torch.where(target >= 0, target, num_local_classes), first)
    queue = queue[:num_local_classes]

    chosen_priority, chosen = queue.topk(size, largest=False, sorted=True)
    num_members = (chosen_priority == first).sum().clamp_min(num_sampled)
    is_padding = torch.arange(size, device=labels.device) >= num_members
    index = (chosen + is_padding * num_local_classes).sort().values
    position = torch.searchsorted(index, target)
    return index, torch.where(target >= 0, position, -1)


@sample.register_fake
def _(
    labels: Tensor, key: Tensor, class_start: int, num_local_classes: int, num_sampled: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    _check(labels, key)
    size = _num_entries(labels, num_local_classes, num_sampled)
    return labels.new_empty(size), labels.new_empty(labels.shape)
