"""The walk over a shard's classes that forward and backward of pfc::sharded_lse share.

    T   classes of a tile: as many as keep [T, N] and [T, D] within TILE_ELEMENTS

Tiles are class-major, `[T, N]`, so that every matmul of the walk reads and writes contiguous rows of classes. All of
them use the same buffers: a tile is valid until the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Elements of a tile buffer: 4 MB in float32, of the order of a core's share of the last-level cache; from 2^19 to 2^21
# a step's time varies by 3 % (2 cores, N = D = 512). On an accelerator a tile must fill the device: 256 MB.
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
        span: where they stand among the classes that take part.
        rows: `[T]` their rows in the weight, None where the walk takes every row.
        classes: `[T, D]` w, in the dtype of the weight: a view of it where the walk takes every row, otherwise a copy.
        centres: `[T, D]` ŵ, or w where they are not normalised, rounded to the dtype of the matmul.
        length: `[T, 1]` ‖w‖, or ∞ for a row without a direction; None where centres are not normalised.
        padding: `[T, 1]` bool, which of them are none; None where the shapes rule padding out.
        logits: `[T, N]`.
        scores: `[T, N]` for what a walk makes of the logits; `logits` itself, unless those are saved.
        workspace: two of `[T, D]`, scratch.
        target: `[N]` the rows' targets, counted from this tile's first class.
    """

    span: slice
    rows: Tensor | None
    classes: Tensor
    centres: Tensor
    length: Tensor | None
    padding: Tensor | None
    logits: Tensor
    scores: Tensor
    workspace: tuple[Tensor, ...]
    target: Tensor

    def replace_target(self, values: Tensor, replacement: float | Tensor) -> Tensor:
        """Puts `replacement`, a number or `[N]`, in the place of the targets in `values` `[T, N]`.

        Returns:
            `[N]` what was there, 0 for rows whose target is not in this tile.
        """
        inside = (self.target >= 0) & (self.target < values.shape[0])
        # Rows with their target elsewhere read and rewrite one entry of their own column: no selection, so no sync.
        place = self.target.clamp(0, values.shape[0] - 1).unsqueeze(0)
        before = values.gather(0, place)
        values.scatter_(0, place, torch.where(inside, replacement, before))
        return torch.where(inside, before, 0).squeeze(0)

    def weight_grad(self, dz: Tensor, embeddings: Tensor, factor: float | Tensor) -> Tensor:
        """From the gradients of the logits `[T, N]` to `factor` times those of the weight's rows, `[T, D]`.

        Valid until the next tile is asked for.
        """
        grad = matmul(dz, embeddings, out=self.workspace[0])
        if self.length is None:
            return grad.mul_(factor)
        centres = self.centres.to(grad.dtype)
        along = torch.mul(centres, grad, out=self.workspace[1]).sum(dim=1, keepdim=True)
        return grad.addcmul_(centres, along, value=-1).mul_(factor / self.length)


class Tiles:
    """Iterates over the classes that take part, a Tile at a time.

    Args:
        saved: `[L]`, where the logits of the first L // N classes are kept: to be written, or read where `filled`.
    """

    def __init__(
        self,
        embeddings: Tensor,
        weight: Tensor,
        index: Tensor | None,
        target: Tensor,
        normalize: bool,
        saved: Tensor | None = None,
        filled: bool = False,
    ) -> None:
        self.dtype = accumulate_dtype(embeddings)
        self.rounded = embeddings.dtype
        # CPU has no matmul from half operands to float32, and one to half would round the logits: there the rounded
        # operands are widened first, which makes their products exact.
        self.operand = embeddings.dtype if embeddings.is_cuda else self.dtype
        self.embeddings = embeddings.to(self.operand)
        self.transposed = self.embeddings.t().contiguous()
        self.weight, self.index, self.target, self.normalize = weight, index, target, normalize
        num_rows = embeddings.shape[0]
        self.num_saved = 0 if saved is None else saved.shape[0] // max(num_rows, 1)
        self.saved = None if saved is None else saved[: self.num_saved * num_rows].view(self.num_saved, num_rows)
        self.filled = filled
        if saved is not None and not filled:
            saved[self.num_saved * num_rows :] = 0  # where no more class fits
        self.num_local_classes = weight.shape[0]
        self.num_classes = self.num_local_classes if index is None else index.shape[0]
        # pfc::sample pads only up to min(N, K).
        self.may_pad = index is not None and self.num_classes <= target.shape[0]

    @property
    def step(self) -> int:
        """T of a full tile."""
        elements = TILE_ELEMENTS if self.embeddings.device.type == "cpu" else ACCELERATOR_TILE_ELEMENTS
        return max(1, min(elements // max(self.embeddings.shape), self.num_classes))

    def __iter__(self) -> Iterator[Tile]:
        (num_rows, dim), device, step = self.embeddings.shape, self.embeddings.device, self.step
        scores = torch.empty(step, num_rows, dtype=self.dtype, device=device)
        centres, *workspace = torch.empty(3, step, dim, dtype=self.dtype, device=device).unbind()
        classes = self.weight.new_empty(0 if self.index is None else step, dim)
        starts = (*range(0, self.num_saved, step), *range(self.num_saved, self.num_classes, step))
        for start, stop in pairwise((*starts, self.num_classes)):
            size = stop - start
            buffers = [buffer[:size] for buffer in (classes, scores, centres, *workspace)]
            yield self._tile(slice(start, stop), *buffers)

    def _tile(self, span: slice, classes: Tensor, scores: Tensor, centres: Tensor, *workspace: Tensor) -> Tile:
        rows = padding = length = None
        if self.index is None:
            classes = self.weight[span]
        else:
            rows = self.index[span]
            if self.may_pad:
                padding = (rows >= self.num_local_classes).unsqueeze(1)
                rows = rows % self.num_local_classes
            torch.index_select(self.weight, 0, rows, out=classes)
        # A master weight may be wider than the matmul.
        narrow = classes.to(self.dtype) if classes.dtype == torch.float64 else classes
        if self.normalize:
            length = row_length(narrow, self.dtype)
            torch.div(narrow, length, out=centres)
        else:
            centres.copy_(narrow)
        centres = centres.to(self.rounded).to(self.operand)
        is_saved = span.stop <= self.num_saved
        logits = self.saved[span] if self.saved is not None and is_saved else scores
        if not (is_saved and self.filled):
            matmul(centres, self.transposed, out=logits)
        target = self.target - span.start
        return Tile(span, rows, classes, centres, length, padding, logits, scores, workspace, target)
