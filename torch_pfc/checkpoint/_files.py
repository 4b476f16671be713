"""The directory of a checkpoint: a new one takes the place of the old one when it is complete, and not before.

    path.saving     is being written; what a crash leaves of it is of no use
    path            the last complete checkpoint
    path.previous   the one before it, while the two change places

`prepare` and `swap` are for one rank of the group alone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, Metadata

_METADATA = ".metadata"


def resolve(path: str | os.PathLike[str]) -> Path:
    """`path` without symbolic links: the place that a link points to changes, never the link."""
    if "://" in os.fspath(path):
        raise ValueError(f"path must be a directory of a file system, got {os.fspath(path)!r}")
    return Path(os.path.realpath(path))


def saving(path: Path) -> Path:
    return path.with_name(path.name + ".saving")


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def prepare(path: Path) -> None:
    """Makes room for `saving(path)`.

    Raises:
        FileExistsError: `path` is something else than a checkpoint, which a save would remove.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a checkpoint that may be replaced")
    foreign = [name for name in os.listdir(path) if not _belongs(name)] if path.exists() else []
    if foreign:
        raise FileExistsError(f"{path} holds files that are of no checkpoint, and would be lost: {sorted(foreign)[:5]}")
    if saving(path).exists():
        shutil.rmtree(saving(path))
    saving(path).mkdir(parents=True)


def _belongs(name: str) -> bool:
    return name == _METADATA or name.endswith(".distcp")


def swap(path: Path) -> None:
    """Puts `saving(path)` in the place of `path`. A crash at any point leaves a complete checkpoint to `read`."""
    check_sizes(saving(path), _read_metadata(saving(path)))
    _sync(saving(path))
    if path.exists():
        if _previous(path).exists():
            shutil.rmtree(_previous(path))
        os.rename(path, _previous(path))
    os.rename(saving(path), path)
    _sync(path.parent)
    if _previous(path).exists():
        shutil.rmtree(_previous(path))


def _sync(directory: Path) -> None:
    """Brings the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[Path, Metadata]:
    """Returns the directory of the last complete checkpoint and its metadata.

    Raises:
        FileNotFoundError: there is none.
        RuntimeError: its metadata are damaged, or it is something else.
    """
    directory = _previous(path) if not path.exists() and _previous(path).exists() else path
    if not directory.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if not (directory / _METADATA).exists():
        raise FileNotFoundError(f"{directory} is no checkpoint: it has no file {_METADATA}")
    return directory, _read_metadata(directory)


def _read_metadata(directory: Path) -> Metadata:
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except Exception as error:  # whatever unpickling a damaged or foreign file gives
        raise RuntimeError(f"{directory / _METADATA} is damaged or of no checkpoint: {error!r}") from error
    if not isinstance(metadata, Metadata):
        raise RuntimeError(f"{directory / _METADATA} is of no checkpoint: it holds a {type(metadata).__name__}")
    return metadata


def check_sizes(directory: Path, metadata: Metadata) -> None:
    """Raises RuntimeError unless every file has the size that was written."""
    sizes: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, size in sizes.items():
        file = directory / name
        if not file.exists():
            raise RuntimeError(
                f"{file} is missing: every rank must give the same path, on a file system that all ranks share"
            )
        if file.stat().st_size != size:
            raise RuntimeError(f"{file} is truncated or damaged: expected {size} bytes, got {file.stat().st_size}")
