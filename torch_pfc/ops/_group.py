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
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader, StorageWriter

GroupLike: TypeAlias = Union["dist.ProcessGroup", DeviceMesh, None]
T = TypeVar("T")


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


def global_ranks(group: Group) -> set[int]:
    """The ranks of the world that `group`, of more than one, consists of."""
    return set(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group.name)))  # type: ignore[arg-type]


def sharded_over(tensor: Tensor) -> list[Group]:
    """Of a DTensor, the group of each mesh dimension along which ranks hold different parts; none of another tensor."""
    mesh = getattr(tensor, "device_mesh", None)  # DTensor's class takes half a second to import
    if mesh is None:
        return []
    placements = tensor.placements  # type: ignore[attr-defined]
    return [resolve(mesh.get_group(dim)) for dim, placement in enumerate(placements) if not placement.is_replicate()]


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


def all_to_all_rows(input: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """`[sum(sent), …] → [sum(received), …]`: `sent[r]` rows go to rank r, `received[r]` come from it, in rank order."""
    if group.size == 1:
        return input
    return _wait(torch.ops._c10d_functional.all_to_all_single(input.contiguous(), received, sent, group.name))


def send(input: Tensor, to_rank: int, group: Group) -> None:
    dist.send(input.contiguous(), group=process_group(group), group_dst=to_rank)


def receive(output: Tensor, from_rank: int, group: Group) -> None:
    dist.recv(output, group=process_group(group), group_src=from_rank)


def _wait(pending: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(pending)


def process_group(group: Group) -> dist.ProcessGroup | None:
    """The live group; None for a process alone."""
    return None if group.size == 1 else dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type]


def mesh(group: Group, device_type: str) -> DeviceMesh:
    """The 1-D mesh over `group`, of more than one, for tensors on that type of device."""
    return DeviceMesh.from_group(process_group(group), device_type)  # type: ignore[arg-type]


def gloo_twin(group: Group) -> Group:
    """A new gloo group of the same ranks: for a thread whose collectives must not mix with those of `group`."""
    if group.size == 1:
        return ALONE
    if not dist.is_gloo_available():
        raise RuntimeError("gloo must be available for collectives in the background, but torch was built without it")
    ranks = dist.get_process_group_ranks(process_group(group))
    return resolve(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))


def all_gather_object(value: T, group: Group) -> list[T]:
    """What every rank gave, in rank order."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=process_group(group))
    return values


def together(fn: Callable[[], T], group: Group) -> T:
    """Returns `fn()`; where it raises on any rank, raises on all. A barrier.

    Raises:
        Exception: as `fn` did on this rank.
        RuntimeError: `fn` raised on another rank alone.
    """
    result: Any = None
    raised: Exception | None = None
    try:
        result = fn()
    except Exception as error:
        raised = error
    failures = all_gather_object(None if raised is None else f"{type(raised).__name__}: {raised}", group)
    if raised is not None:
        raise raised
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"on rank {rank} of {group.size}: {failure}")
    return result


def write_checkpoint(state: dict[str, Any], writer: StorageWriter, group: Group) -> None:
    """As torch.distributed.checkpoint.save, without its warning where there is no group.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, state_dict_saver

    # What every rank has is rank 0's, also where it differs, as DDP has it of buffers such as BatchNorm's.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    with _as_runtime_error():
        state_dict_saver._save_state_dict(state, writer, process_group(group), no_dist=group.size == 1, planner=planner)


def read_checkpoint(state: dict[str, Any], reader: StorageReader, group: Group) -> None:
    """As torch.distributed.checkpoint.load, into `state` in place, without its warning where there is no group.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _as_runtime_error():
        state_dict_loader._load_state_dict(
            state, reader, process_group(group), no_dist=group.size == 1, planner=planner
        )


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """torch.distributed.checkpoint raises a BaseException that carries the traces of all ranks."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as failure:
        causes = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failure.failures.items())
        raise RuntimeError(causes) from failure
