"""From what a caller gives to what the operators take: checks, padding of uneven batches, scaled directions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .ops._group import Group
from .ops._tile import accumulate_dtype, row_length


def check_embeddings(embeddings: Tensor, embedding_dim: int) -> None:
    """Raises unless `embeddings` is `[B, embedding_dim]` floating point."""
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_dim:
        raise ValueError(f"embeddings must be [B, {embedding_dim}], got {list(embeddings.shape)}")
    if not embeddings.is_floating_point():
        raise TypeError(f"embeddings must be floating point, got {embeddings.dtype}")


def as_class_ids(labels: Tensor, num_rows: int) -> Tensor:
    """Returns labels `[B]` or `[B, 1]` of any integer dtype as `[B]` int64; raises on others."""
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != (num_rows,) and labels.shape != (num_rows, 1):
        raise ValueError(
            f"labels must be [{num_rows}] or [{num_rows}, 1], one for each embedding, got {list(labels.shape)}"
        )
    return labels.reshape(-1).long()


def assert_in_range(group_labels: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises on every rank alike: each sees the labels `[N]` of all. An assertion in the graph, so without a sync."""
    valid = (group_labels >= 0) & (group_labels < num_classes) | (group_labels == ignore_index)
    all_valid = valid.all()
    rule = f"labels must lie in [0, {num_classes}) or equal ignore_index={ignore_index}"
    if not torch.compiler.is_compiling() and group_labels.device.type == "cpu" and not all_valid:
        raise RuntimeError(f"{rule}, got {group_labels[~valid].unique().tolist()}")
    torch._assert_async(all_valid, rule)


def num_missing_rows(num_rows: int, device: torch.device, group: Group) -> int:
    """By how many rows the largest batch of the group is larger: a small collective and a device-to-host sync."""
    sizes = torch.ops.pfc.gather(torch.tensor([num_rows], device=device), *group)
    return int(sizes.max()) - num_rows


def pad_rows(tensor: Tensor, num_missing: int, value: float = 0) -> Tensor:
    """`[B, …] → [B + num_missing, …]`."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, num_missing), value=value)


def scaled_directions(embeddings: Tensor, scale: float | Tensor) -> Tensor:
    """`scale`·x̂ in the dtype of the matmul: that of `embeddings`, or autocast's.

    Computed in float32 (float64 for float64), where squares of half-precision numbers cannot overflow.
    """
    device_type, dtype = embeddings.device.type, embeddings.dtype
    autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    wide = embeddings.to(accumulate_dtype(embeddings))
    return (scale * (wide / row_length(wide, wide.dtype))).to(dtype)
