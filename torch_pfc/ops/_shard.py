"""Which classes a rank holds: `ceil(C/W)` each, the last ranks fewer or none, as torch.chunk and DTensor split."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """The classes `start … start + size − 1`."""

    start: int
    size: int


def shard(num_classes: int, group_size: int, group_rank: int) -> Shard:
    """Returns the classes of rank `group_rank` where `num_classes` are split over `group_size` ranks."""
    full = -(-num_classes // group_size)
    start = min(group_rank * full, num_classes)
    return Shard(start, min(full, num_classes - start))
