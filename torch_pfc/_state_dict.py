"""A head's state with the shard as one tensor over all ranks, as torch.distributed.checkpoint wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ops import _group

if TYPE_CHECKING:
    from ._sharded_module import ShardedModule


def by_class(local: Tensor, head: ShardedModule) -> Tensor:
    """`[K, D]` of this rank as a DTensor `[C, D]` over the head's group that aliases it; as it is in a group of one."""
    if head.group.size == 1:
        return local
    from torch.distributed.tensor import DTensor, Shard  # takes half a second

    shape = torch.Size((head.num_classes, head.embedding_dim))
    mesh = _group.mesh(head.group, local.device.type)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(head.embedding_dim, 1))


def sharded_state_dict(head: ShardedModule, prefix: str = "") -> dict[str, Any]:
    """`head.state_dict()` with `weight` as `[C, D]`; nothing is copied."""
    state = dict(head.state_dict(prefix=prefix))
    weight = state[prefix + "weight"]
    if hasattr(weight, "device_mesh"):
        raise RuntimeError(
            "weight must be a plain parameter to be saved by class, but a wrapper has made it a DTensor over ranks "
            f"{weight.device_mesh.mesh.flatten().tolist()}: leave the head out of it"
        )
    state[prefix + "weight"] = by_class(weight, head)
    return state


def load_sharded_state_dict(head: ShardedModule, state: Mapping[str, Any], prefix: str = "") -> None:
    """Copies into the head what `sharded_state_dict` gives, or a whole `[C, D]` as its weight."""
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    check_entries(head, own, "the state")
    head.load_state_dict(own | {"weight": _shard_of(own["weight"], head)})


def check_entries(head: ShardedModule, found: Mapping[str, Any], source: str) -> None:
    """Raises ValueError unless the entries of `found`, tensors or anything with a shape, are those of the head."""
    expected: dict[str, Any] = dict(head.state_dict())
    shapes = {name: list(value.shape) for name, value in expected.items() if isinstance(value, Tensor)}
    shapes["weight"] = [head.num_classes, head.embedding_dim]
    match list(found["weight"].shape) if "weight" in found else []:
        case [num_classes, embedding_dim] as shape if shape != shapes["weight"]:
            raise ValueError(
                f"{source} must be of this head's {head.num_classes} classes of width {head.embedding_dim}, "
                f"got {num_classes} classes of width {embedding_dim}"
            )
    if found.keys() != expected.keys():
        raise ValueError(f"{source} must have this head's entries {sorted(expected)}, got {sorted(found)}")
    for name, shape in shapes.items():
        if list(found[name].shape) != shape:
            raise ValueError(f"{name} of {source} must be {shape} as this head's, got {list(found[name].shape)}")


def _shard_of(weight: Tensor, head: ShardedModule) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return weight[head.class_start :][: head.num_local_classes]
    local = weight.to_local()
    if local.shape != head.weight.shape:
        raise ValueError(
            f"weight must be sharded by class over this head's group, rows {list(head.weight.shape)} on this rank, "
            f"got {list(local.shape)} by {weight.placements}"
        )
    return local
