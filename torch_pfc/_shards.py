"""What a head leaves on its weight, so that whoever sees the parameter alone knows it for a shard."""

from __future__ import annotations

from torch import Tensor, nn

from .ops._group import Group


def mark(weight: nn.Parameter, group: Group) -> None:
    """Says that `weight` holds this rank's classes of `group`."""
    weight.pfc_group = group  # type: ignore[attr-defined]


def group_of(parameter: Tensor) -> Group | None:
    """The group over which `parameter` is sharded by class; None for any other parameter."""
    group: Group | None = getattr(parameter, "pfc_group", None)
    return group
