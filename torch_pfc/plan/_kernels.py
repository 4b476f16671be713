"""The operators' kernels as the planner runs them: on tensors without values, for either device, and not for long.

Of a loop's iterations of full size only two are traced. The others have the second's shapes: they multiply as much as
it, and hold no more but for what they keep. So a plan of any size takes seconds, and is that of the whole loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import _tiles, _values, sample, sparse_adamw, sparse_sgd

if TYPE_CHECKING:
    from ._trace import Trace


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """pfc::sample searches block by block, and finds as much as it expects; conditions hold, as they do as a rule; and
    a tile has as many targets as the others.

    Tensors without values would not say.
    """

    def nonzero(mask: Tensor, part: float) -> Tensor:
        return mask.new_empty(_num_found(mask.shape[0], part), dtype=torch.int64)

    def targets_in(tiles: Any, span: slice) -> tuple[Tensor, Tensor, None]:
        num_rows, num_classes = len(tiles.target), len(tiles.weight if tiles.index is None else tiles.index)
        some = tiles.target[: ceil(num_rows * tiles.step / num_classes)]
        return some, some, None

    answers = {"is_known": lambda condition: True, "are_between": lambda values, low, high: True}
    with (
        _replaced(sample, _nonzero=nonzero, _lowest=_few_blocks(sample._lowest)),
        _replaced(_tiles.Tiles, _targets_in=targets_in),
        _replaced(_values, **answers),
    ):
        yield


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """What the kernels choose by a tensor's device, for tensors of the CPU: tiles, and sampling in one piece."""

    def whole(positives: Tensor, key: Tensor, class_start: int, num_local_classes: int, part: float) -> Any:
        return sample._all(positives, key, class_start, num_local_classes)

    answers = {"is_known": lambda condition: False, "are_between": lambda values, low, high: False}
    with (
        _replaced(_tiles, TILE_ELEMENTS=_tiles.ACCELERATOR_TILE_ELEMENTS),
        _replaced(_values, **answers, listed=lambda values: None),
        _replaced(sample, _lowest=whole),
    ):
        yield


@contextmanager
def short_walks(trace: Trace) -> Iterator[None]:
    """Over the tiles of a shard, and of a gradient's rows."""
    walk = _few_tiles(_tiles.Tiles.__iter__, trace)
    with _replaced(_tiles.Tiles, __iter__=walk), ExitStack() as stack:
        for optimizer in (sparse_sgd, sparse_adamw):
            stack.enter_context(_replaced(optimizer, tiles=_few_rows(optimizer.tiles)))
        yield


def _num_found(num_places: int, part: float) -> int:
    """Rounded up, or all blocks together might find less than they must."""
    return ceil(part * num_places)


def _num_skipped(total: int, step: int) -> int:
    """How many of the steps that cover `total` are left out."""
    return max(total // step - 2, 0)


def _few_tiles(walk: Any, trace: Trace) -> Any:
    """Tiles.__iter__ in two parts, over the classes whose logits are saved and over the others."""

    def walk_some(self: Any) -> Iterator[Any]:
        num_saved, num_others, step = self.num_saved, self.num_classes - self.num_saved, self.step
        skipped_saved, skipped_others = _num_skipped(num_saved, step), _num_skipped(num_others, step)
        self.num_saved = num_saved - step * skipped_saved
        self.num_classes = self.num_saved + num_others - step * skipped_others

        # By the first class of the tile that stands for them.
        skipped = {step: skipped_saved, self.num_saved + step: skipped_others}
        before = trace.matmul_flops
        for tile in walk(self):
            yield tile
            trace.matmul_flops += skipped.get(tile.span.start, 0) * (trace.matmul_flops - before)
            before = trace.matmul_flops
        self.num_saved, self.num_classes = num_saved, num_saved + num_others

    return walk_some


def _few_blocks(lowest: Any) -> Any:
    """pfc::sample's `_lowest`, which keeps from each block what it found there."""

    def lowest_of_some(
        positives: Tensor, key: Tensor, class_start: int, num_local_classes: int, part: float
    ) -> list[Tensor]:
        num_skipped = _num_skipped(num_local_classes, sample._BLOCK)
        kept = [positives.new_empty(num_skipped * _num_found(sample._BLOCK, part)) for _ in ("priorities", "ids")]
        num_traced = num_local_classes - num_skipped * sample._BLOCK
        found = lowest(positives, key, class_start, num_traced, part)
        return [torch.cat(tensors) for tensors in zip(found, kept, strict=True)]

    return lowest_of_some


def _few_rows(tiles: Any) -> Any:
    """The walk of the sparse optimizers over a gradient's rows, which are not multiplied."""

    def some(tensors: list[Tensor | None], rows: Tensor | None, grad: Tensor) -> Iterator[Any]:
        step = max(next(tiles(tensors, rows, grad), [grad])[-1].shape[0], 1)
        traced = slice(grad.shape[0] - step * _num_skipped(grad.shape[0], step))
        if rows is None:
            return tiles([None if tensor is None else tensor[traced] for tensor in tensors], None, grad[traced])
        return tiles(tensors, rows[traced], grad[traced])

    return some


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
