"""All class centres in one place: streamed to the first rank of the group, tile by tile.

Traffic: every row once, to rank 0. Memory: rank 0 holds the result, or nothing where it goes to a file, and one tile.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .ops import _group
from .ops._shard import shard
from .ops._tiles import TILE_ELEMENTS
from .partial_fc import PartialFC

# https://github.com/huggingface/safetensors#format
_SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@torch.no_grad()
def gather_weight(head: PartialFC, path: str | os.PathLike[str] | None = None) -> Tensor | None:
    """The class centres of all ranks, on rank 0 of the head's group; every rank must call it.

    Args:
        head: its weight is read as it is; not normalised.
        path: of a safetensors file to write them to, in place of memory. Rank 0 writes it; its tensor `weight` has the
            dtype of `head.weight`. It takes the place of an old file when it is complete.

    Returns:
        On rank 0 and without `path`, `[C, D]` on the CPU, row i the centre of class i, in the dtype of `head.weight`.
        None otherwise.

    Raises:
        RuntimeError: rank 0 could not allocate or write; on every rank but it, where the error is as it came.
        TypeError: a dtype that safetensors files are not written in here.
    """
    if path is not None:
        _write_safetensors(head, Path(path))
        return None
    shape = (head.num_classes if head.group.rank == 0 else 0, head.embedding_dim)
    result = _group.together(lambda: torch.empty(shape, dtype=head.weight.dtype), head.group)
    start = 0

    def copy(tile: Tensor) -> None:
        nonlocal start
        result[start : start + len(tile)] = tile
        start += len(tile)

    _stream(head, copy)
    return result if head.group.rank == 0 else None


def _stream(head: PartialFC, take: Callable[[Tensor], None]) -> None:
    """Gives every row to `take` on rank 0, in the order of the classes, `[T, D]` on the CPU at a time."""
    failure: Exception | None = None
    for tile in _tiles_on_first_rank(head):
        if failure is None:  # the other ranks send on: what is left is received and dropped
            try:
                take(tile.cpu())
            except Exception as error:
                failure = error

    def finish() -> None:
        if failure is not None:
            raise failure

    _group.together(finish, head.group)


def _tiles_on_first_rank(head: PartialFC) -> Iterator[Tensor]:
    """On rank 0, all rows tile by tile, in one buffer for those of other ranks; the others send theirs."""
    group, weight = head.group, head.weight.detach()
    num_rows = max(1, TILE_ELEMENTS // head.embedding_dim)
    if group.rank > 0:
        for tile in weight.split(num_rows):
            if len(tile):
                _group.send(tile, 0, group)
        return
    yield from weight.split(num_rows)
    buffer = weight.new_empty(num_rows if group.size > 1 else 0, head.embedding_dim)
    for rank in range(1, group.size):
        for tile_start in range(0, size := shard(head.num_classes, group.size, rank).size, num_rows):
            tile = buffer[: size - tile_start]
            _group.receive(tile, rank, group)
            yield tile


def _write_safetensors(head: PartialFC, path: Path) -> None:
    group, unfinished = head.group, path.with_name(path.name + ".saving")
    header = _safetensors_header(head)
    file = _group.together(lambda: unfinished.open("wb") if group.rank == 0 else None, group)
    if file is None:
        _stream(head, lambda tile: None)
        _group.together(lambda: None, group)
        return
    try:
        file.write(header)  # to the file's buffer, as yet
        _stream(head, lambda tile: _write_bytes(file, tile))
        _group.together(lambda: _put_in_place(file, unfinished, path), group)
    finally:
        with contextlib.suppress(OSError):  # where writing failed, that is raised already
            file.close()
        unfinished.unlink(missing_ok=True)


def _safetensors_header(head: PartialFC) -> bytes:
    dtype = head.weight.dtype
    if dtype not in _SAFETENSORS_DTYPES:
        raise TypeError(f"weight must be of one of {[str(d) for d in _SAFETENSORS_DTYPES]} for a file, got {dtype}")
    shape = [head.num_classes, head.embedding_dim]
    entries = {
        "__metadata__": {"format": "pt", "num_classes": str(shape[0]), "embedding_dim": str(shape[1])},
        "weight": {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": shape,
            "data_offsets": [0, shape[0] * shape[1] * dtype.itemsize],
        },
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data start aligned
    return len(text).to_bytes(8, "little") + text


def _write_bytes(file: BinaryIO, tile: Tensor) -> None:
    tile = tile.contiguous()
    file.write(memoryview((ctypes.c_char * tile.nbytes).from_address(tile.data_ptr())).cast("B"))


def _put_in_place(file: BinaryIO, unfinished: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.replace(unfinished, path)
