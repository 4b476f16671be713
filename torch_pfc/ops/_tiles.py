"""The walk over a shard's classes that forward and backward of pfc::sharded_lse share.

    T   classes of a tile: as many as keep [T, N] and [T, D] within TILE_ELEMENTS

Tiles are class-major, `[T, N]`, so that every matmul of the walk reads and writes contiguous rows of classes. All of
them use the same buffers: a tile is valid until the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of a tile buffer: 4 MB in float32, of the order of a core's share of the last-level cache. On an accelerator
# a tile must fill the device: 256 MB.
TILE_ELEMENTS = 1 << 20
ACCELERATOR_TILE_ELEMENTS = 1 << 26

# A row no longer than this has no direction: it stays zero at unit length, and so does its gradient, which would be
# g / ε with torch.nn.functional.normalize's rule.
EPSILON = 1e-12


def accumulate_dtype(embeddings: Tensor) -> torch.dtype:
    """The dtype of logits and sums: float64 for float64 embeddings, otherwise float32."""
    return torch.promote_types(embeddings.dtype, torch.float32)


def check_operands(embeddings: Tensor, weight: Tensor, group_size: int) -> None:
    """Raises ValueError unless embeddings `[N, D]` and weight `[K, D]` fit each other and N the group."""
    if embeddings.dim() != 2 or weight.dim() != 2 or embeddings.shape[1] != weight.shape[1]:
        raise ValueError(
            "embeddings [N, D] and weight [K, D] must be matrices of the same width, got "
            f"{list(embeddings.shape)} and {list(weight.shape)}"
        )
    if embeddings.shape[0] % group_size != 0:
        raise ValueError(
            f"embeddings must hold the same number of rows of each of the {group_size} ranks, "
            f"got {embeddings.shape[0]} rows"
        )


def row_length(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`[M, D] → [M, 1]`: each row's length, computed in `dtype`; ∞ for a row without a direction."""
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=dtype)
    return length.masked_fill(length <= EPSILON, torch.inf)


def matmul(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> Tensor:
    """`out = a @ b`, or `out += a @ b`, with products and sums in the dtype of `out`."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    product = torch.mm(a, b, out_dtype=out.dtype)  # half operands, float32 result: CUDA only
    return out.add_(product) if accumulate else out.copy_(product)


@dataclass
class Tile:
    """The classes `span` of the walk.

    Attributes:
        rows: `[T]` their rows in the weight, None where the walk takes every row.
        centres: `[T, D]` ŵ, or w where they are not normalised, rounded to the dtype of the matmul.
        length: `[T, 1]` ‖w‖, or ∞ for a row without a direction; None where centres are not normalised.
        logits: `[T, N]`.
        padding: `[T, 1]` bool, which of them are none; None where the shapes rule padding out.
        workspace: `[T, D]` scratch.
        target: `[N]` the rows' targets, counted from this tile's first class.
    """

    span: slice
    rows: Tensor | None
    centres: Tensor
    length: Tensor | None
    logits: Tensor
    padding: Tensor | None
    workspace: Tensor
    target: Tensor

    def replace_target(self, value: float | Tensor) -> Tensor:
        """Puts `value`, a number or `[N]`, in the place of the target logits in this tile.

        Returns:
            `[N]` what was there, 0 for rows whose target is not in this tile.
        """
        inside = (self.target >= 0) & (self.target < self.logits.shape[0])
        # Rows with their target elsewhere read and rewrite one entry of their own column: no selection, so no sync.
        place = self.target.clamp(0, self.logits.shape[0] - 1).unsqueeze(0)
        before = self.logits.gather(0, place)
        self.logits.scatter_(0, place, torch.where(inside, value, before))
        return torch.where(inside, before, 0).squeeze(0)

    def project(self, grad: Tensor, factor: float) -> Tensor:
        """In place, from the gradient `[T, D]` of the centres to `factor` times that of the weight's rows."""
        if self.length is None:
            return grad.mul_(factor)
        centres = self.centres.to(grad.dtype)
        along = (centres * grad).sum(dim=1, keepdim=True)
        return grad.addcmul_(centres, along, value=-1).mul_(factor / self.length)


class Tiles:
    """Iterates over the classes that take part, a Tile at a time."""

    def __init__(
        self, embeddings: Tensor, weight: Tensor, index: Tensor | None, target: Tensor, normalize: bool
    ) -> None:
        self.dtype = accumulate_dtype(embeddings)
        self.rounded = embeddings.dtype
        # CPU has no matmul from half operands to float32, and one to half would round the logits: there the rounded
        # operands are widened first, which makes their products exact.
        self.operand = embeddings.dtype if embeddings.is_cuda else self.dtype
        self.embeddings = embeddings.to(self.operand)
        self.weight, self.index, self.target, self.normalize = weight, index, target, normalize
        self.num_local_classes = weight.shape[0]
        self.num_classes = self.num_local_classes if index is None else index.shape[0]
        # pfc::sample pads only up to min(N, K).
        self.may_pad = index is not None and self.num_classes <= target.shape[0]

    def __iter__(self) -> Iterator[Tile]:
        (num_rows, dim), device = self.embeddings.shape, self.embeddings.device
        elements = TILE_ELEMENTS if device.type == "cpu" else ACCELERATOR_TILE_ELEMENTS
        step = min(max(1, elements // max(num_rows, dim)), self.num_classes)
        logits = torch.empty(step, num_rows, dtype=self.dtype, device=device)
        centres, workspace = torch.empty(2, step, dim, dtype=self.dtype, device=device).unbind()
        for start in range(0, self.num_classes, max(1, step)):
            size = min(step, self.num_classes - start)
            yield self._tile(slice(start, start + size), logits[:size], centres[:size], workspace[:size])

    def _tile(self, span: slice, logits: Tensor, centres: Tensor, workspace: Tensor) -> Tile:
        rows = padding = length = None
        if self.index is None:
            classes = self.weight[span]
        else:
            rows = self.index[span]
            if self.may_pad:
                padding = (rows >= self.num_local_classes).unsqueeze(1)
                rows = rows % self.num_local_classes
            classes = self.weight.index_select(0, rows)
        if classes.dtype == torch.float64:  # a master weight wider than the matmul
            classes = classes.to(self.dtype)
        if self.normalize:
            length = row_length(classes, self.dtype)
            torch.div(classes, length, out=centres)
        else:
            centres.copy_(classes)
        centres = centres.to(self.rounded).to(self.operand)
        matmul(centres, self.embeddings.t(), out=logits)
        return Tile(span, rows, centres, length, logits, padding, workspace, self.target - span.start)
