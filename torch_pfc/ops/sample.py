"""pfc::sample — which of a rank's classes take part in this step::

    set      = positives of this shard ∪ negatives, drawn uniformly up to max(num_sampled, positives) classes
    S        = clamp(num_sampled, min(N, K), K)           known from shapes alone
    index    [S]   local ids of the set, ascending; where the set is smaller than S, padding follows
    target   [N]   position of the row's class in `index`, −1 where the class lives elsewhere or is ignored

A padding entry is `K + id`, with `id` a class outside the set: so `index < K` tells members from padding, `index % K`
is a row that may be read, and all of `index` is strictly ascending and free of duplicates.

The draw is counter-based: a class's priority is a hash of `key` and its *global* id, and the lowest priorities win.
The same key therefore gives the same set on every device, and shards never mirror one another.

No collective, no backward, no device-to-host sync. Cost: O(K) for the hash, one top-S selection. Memory: on a CPU
O(S); on an accelerator two int64 to a class for a moment.
Partial FC: An et al., "Killing Two Birds with One Stone", CVPR 2022, arXiv:2203.15565.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._hash import RandomBlocks, random_bits_

# Classes whose priorities a CPU works out at a time.
_BLOCK = 1 << 17
# The priority of positives, before all others.
_FIRST = torch.iinfo(torch.int64).min


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


def _all(positives: Tensor, key: Tensor, class_start: int, num_local_classes: int) -> tuple[Tensor, Tensor]:
    """Returns the priorities and the ids of all local classes."""
    # One class more: the slot of positives that are not of this shard.
    counters = torch.arange(class_start, class_start + num_local_classes + 1, device=positives.device)
    priority = random_bits_(key, counters).index_fill_(0, positives, _FIRST)[:-1]
    return priority, torch.arange(num_local_classes, device=positives.device)


def _lowest(
    positives: Tensor, key: Tensor, class_start: int, num_local_classes: int, part: float
) -> tuple[Tensor, Tensor]:
    """As _all, for the classes with priorities in the lowest `part` of all values, and few others.

    Block by block, so that they never leave the cache; how many there are depends on values, so for a CPU alone.
    """
    blocks = RandomBlocks(key, min(_BLOCK, num_local_classes) + 1)
    # Up to a number that the highest bits alone decide: the others are made for those that are found.
    bound = min(int((2 * part - 1) * 2**63), 2**63 - 1) | (1 << (64 - blocks.DECIDED)) - 1
    priorities, ids = [], []
    for start in range(0, num_local_classes, _BLOCK):
        stop = min(start + _BLOCK, num_local_classes)
        bits = blocks.unfinished(class_start + start, stop - start + 1)
        inside = (positives >= start) & (positives < stop)
        bits.index_fill_(0, torch.where(inside, positives, stop) - start, _FIRST)  # the others' slot is past the end
        place = _nonzero(bits[:-1] <= bound, part)
        found = bits[place]
        priorities.append(blocks.finish(found).masked_fill_(found == _FIRST, _FIRST))
        ids.append(place + start)
    return torch.cat(priorities), torch.cat(ids)


def _nonzero(mask: Tensor, part: float) -> Tensor:
    """Where `mask` `[T]` is set, in about `part` of its places."""
    return mask.nonzero().squeeze(1)


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

    # Rows without a class here name a slot past the end instead of being selected: their number would need a sync.
    positives = torch.where(target >= 0, target, num_local_classes)
    if target.device.type == "cpu":
        # A part in which the lowest `size` of uniform priorities lie but for once in 10¹⁵ times (eight σ).
        part = min((size + 8 * size**0.5) / num_local_classes, 1.0)
        priority, ids = _lowest(positives, key, class_start, num_local_classes, part)
        if priority.shape[0] < size:
            priority, ids = _lowest(positives, key, class_start, num_local_classes, 1.0)
    else:
        priority, ids = _all(positives, key, class_start, num_local_classes)
    may_pad = size > num_sampled
    chosen_priority, place = priority.topk(size, largest=False, sorted=may_pad)
    chosen = ids[place]
    if may_pad:
        num_members = (chosen_priority == _FIRST).sum().clamp_min(num_sampled)
        is_padding = torch.arange(size, device=labels.device) >= num_members
        chosen += is_padding * num_local_classes
    index = chosen.sort().values
    position = torch.searchsorted(index, target)
    return index, torch.where(target >= 0, position, -1)


@sample.register_fake
def _(
    labels: Tensor, key: Tensor, class_start: int, num_local_classes: int, num_sampled: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    _check(labels, key)
    size = _num_entries(labels, num_local_classes, num_sampled)
    return labels.new_empty(size), labels.new_empty(labels.shape)
