"""Checkpoints of a head, its optimizer and whatever else a run consists of, on torch.distributed.checkpoint.

A checkpoint is one directory for all ranks, on a file system that they share. Classes are saved under their global
positions, so a head of any group size loads it. See docs/checkpoints.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from .._gather_weight import gather_weight
from ..ops import _group
from ..ops._group import Group
from ..partial_fc import PartialFC
from . import _background, _contents, _files, _room
from ._resize import resize

__all__ = ["async_save", "gather_weight", "load", "resize", "save"]


def save(
    path: str | os.PathLike[str],
    head: PartialFC,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint. Every rank of the head's group calls it, and returns when the checkpoint is in place.

    The checkpoint that `path` held before is replaced when the new one is complete and on the disk: it survives a
    failure and a crash. Waits for an `async_save` of a head of the same group.

    Args:
        path: of the directory, the same on every rank.
        head: its weight, and what else its state dict holds.
        optimizer: with the head's weight among its parameters, or not. State of the weight must have its shape or be a
            scalar. Other parameters are the same on every rank (DDP), or DTensors (fully_shard).
        others: by name, objects with `state_dict` and `load_state_dict` whose tensors are the same on every rank, or
            DTensors: a backbone, a scheduler, a torch.amp.GradScaler.

    Raises:
        FileExistsError: `path` holds something else than a checkpoint.
        TypeError: `head` is no PartialFC, or one of `others` has no state dict.
        ValueError: state that cannot be split by class, or a shard of another head.
        RuntimeError: a rank could not write, or could not do one of the above; on every rank.
    """
    group = _group_of(head)
    _background.finish(group)
    contents = _group.together(lambda: _contents.collect(head, optimizer, others or {}), group)
    _write(path, contents, group)


def async_save(
    path: str | os.PathLike[str],
    head: PartialFC,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
) -> Future[None]:
    """As `save`, but returns when everything is copied to host memory; a thread writes while training goes on.

    A second call, a `save` or a `load` for a head of the same group first waits until the thread is done, so there is
    one copy at a time. The first call makes a gloo group of the same ranks for the thread.

    Returns:
        Its `result()` returns when the checkpoint is in place, or raises what `save` would have raised.

    Raises:
        RuntimeError: torch was built without gloo.
    """
    background = _background.of(_group_of(head))
    background.finish()

    def stage() -> dict[str, Any]:
        on_host = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        staged: Any = DefaultStager(on_host).stage(_contents.collect(head, optimizer, others or {}))
        return staged

    contents = _group.together(stage, head.group)
    return background.submit(lambda: _write(path, contents, background.group))


def _group_of(head: PartialFC) -> Group:
    if not isinstance(head, PartialFC):
        raise TypeError(f"head must be a PartialFC, itself and not what it is compiled or wrapped to, got {type(head)}")
    return head.group


def _write(path: str | os.PathLike[str], contents: dict[str, Any], group: Group) -> None:
    place = _group.together(lambda: _files.resolve(path), group)
    _on_first_rank(lambda: _files.prepare(place), group)
    _group.write_checkpoint(contents, FileSystemWriter(_files.saving(place)), group)
    _on_first_rank(lambda: _files.swap(place), group)


def _on_first_rank(fn: Callable[[], None], group: Group) -> None:
    _group.together(fn if group.rank == 0 else lambda: None, group)


def load(
    path: str | os.PathLike[str],
    head: PartialFC,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Reads a checkpoint into the objects given. Every rank of the head's group calls it.

    Everything is read into memory of its own first, on the host where it is no DTensor of `others`, and then copied: if
    anything fails up to there, nothing has changed. Values are cast to the dtypes of the objects, as load_state_dict
    does. The optimizer takes the saved options (lr, …) and state, also where it has made no step yet.

    Where a crash came between the two renames that put a new checkpoint in place, `path` does not exist; then the one
    before it is read.

    A checkpoint may execute code when it is read, as any of torch.distributed.checkpoint: load only those you trust.

    Args:
        path: what `save` was given.
        head: of the same number of classes and width, over a group of any size.
        optimizer: of as many parameters as the saved one, in the same order; None leaves what was saved of it.
        others: names of the saved ones or some of them.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ValueError: it is of another number of classes, another width, optimizer or set of entries; names both.
        RuntimeError: it is damaged, or not written by `save`; or a rank could not read it. On every rank.
    """
    others = others or {}
    group = _group_of(head)
    _background.finish(group)

    def look() -> tuple[Path, Any]:
        directory, metadata = _files.read(_files.resolve(path))
        _room.check_is_ours(metadata, f"the checkpoint {directory}")
        if group.rank == 0:
            _files.check_sizes(directory, metadata)
        return directory, metadata

    directory, metadata = _group.together(look, group)
    source = f"the checkpoint {directory}"
    if len(set(_group.all_gather_object((str(directory), metadata.storage_meta.save_id), group))) > 1:
        raise RuntimeError(f"{source} is not the same on every rank")

    described: dict[str, Any] = {_contents.MARKER: None}
    _read(described, directory, group)
    description = described[_contents.MARKER]
    tensors: Any = _group.together(
        lambda: _room.make_room(description, metadata, head, optimizer, others, source), group
    )
    _read(tensors, directory, group)
    _group.together(lambda: _contents.put_back(description, tensors, head, optimizer, others), group)


def _read(state: dict[str, Any], directory: Path, group: Group) -> None:
    try:
        _group.read_checkpoint(state, FileSystemReader(directory), group)
    except RuntimeError as error:
        raise RuntimeError(f"the checkpoint {directory} is damaged or cannot be read: {error}") from error
