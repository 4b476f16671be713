"""The one door to `torch.distributed` and to its private names.

A process group is known to an operator by three plain values, so that a traced program can be saved:

    group_name   the c10d name of the group, `""` for a process alone
    group_size   W, the number of ranks
    group_rank   this process's rank in the group

Kernels see the group through the functions below. At size 1 none of them touches `torch.distributed`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

GroupLike: TypeAlias = Union["dist.ProcessGroup", DeviceMesh, None]


class Group(NamedTuple):
    """A process group as plain values, in the order in which every operator takes them."""

    name: str
    size: int
    rank: int


ALONE = Group("", 1, 0)

# The global rank that this thread stands for where one process plays several (torch_pfc.debug).
_simulated_rank: ContextVar[int | None] = ContextVar("simulated_rank", default=None)


@contextlib.contextmanager
def simulated(rank: int) -> Iterator[None]:
    """This thread stands for global rank `rank`."""
    token = _simulated_rank.set(rank)
    try:
        yield
    finally:
        _simulated_rank.reset(token)


def _is_local_tensor_mode_on() -> bool:
    # Looked up, not imported: who does not debug pays nothing, and a PyTorch that renames it breaks nothing here.
    mode = getattr(sys.modules.get("torch.distributed._local_tensor"), "enabled_local_tensor_mode", None)
    return mode is not None and mode() is not None


def _rank_in(group: dist.ProcessGroup) -> int:
    # Dynamo does not trace context variables, and nothing is simulated in compiled code.
    rank = None if torch.compiler.is_compiling() else _simulated_rank.get()
    return group.rank() if rank is None else dist.get_group_rank(group, rank)


def resolve(group: GroupLike) -> Group:
    """Returns the plain values of `group`.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None: the world if `torch.distributed` is initialised, otherwise
            this process alone.

    Raises:
        TypeError: `group` is something else.
        ValueError: the mesh is not 1-D, or this process is not in the group.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions: {group}; "
                "pass one of its dimensions, as in mesh['dp']"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this process, got a group of which this rank is no member")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}")
    if group.size() == 1:
        return ALONE
    return Group(group.group_name, group.size(), _rank_in(group))


def check(group: Group) -> None:
    """Raises RuntimeError unless the live group of that name has the size and rank that the program was built for."""
    if group.size == 1:
        return
    try:
        live = dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"this program was built for rank {group.rank} of the {group.size}-rank process group {group.name!r}, "
            "which does not exist in this process: call torch.distributed.init_process_group first"
        ) from error
    if _simulated_rank.get() is None and _is_local_tensor_mode_on():
        raise RuntimeError(
            "under LocalTensorMode, an operator's collectives would run on this process's group: "
            "import torch_pfc.debug, which makes them run over the simulated ranks"
        )
    rank = _rank_in(live)
    if (live.size(), rank) != (group.size, group.rank):
        raise RuntimeError(
            f"this program was built for rank {group.rank} of {group.size} in process group {group.name!r}, "
            f"but runs as rank {rank} of {live.size()}: build or export it once per rank and group size"
        )


def all_gather(input: Tensor, group: Group) -> Tensor:
    """`[B, …] → [W·B, …]`, rank 0's rows first. Never an alias of `input`."""
    if group.size == 1:
        return input.clone(memory_format=torch.contiguous_format)
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(input.contiguous(), group.size, group.name))


def reduce_scatter(input: Tensor, group: Group) -> Tensor:
    """`[W·B, …] → [B, …]`: the sum over the ranks, of which each keeps its own rows."""
    if group.size == 1:
        return input
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(input.contiguous(), "sum", group.size, group.name))


def all_to_all(input: Tensor, group: Group) -> Tensor:
    """`[W·B, …] → [W, B, …]`: what every rank holds of this rank's rows."""
    rows = input.shape[0] // group.size
    if group.size > 1:
        splits = [rows] * group.size
        input = _wait(torch.ops._c10d_functional.all_to_all_single(input.contiguous(), splits, splits, group.name))
    return input.view(group.size, rows, *input.shape[1:])


def _wait(pending: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(pending)
