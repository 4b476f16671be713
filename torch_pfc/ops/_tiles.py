"""The walk over a shard's classes that forward and backward of pfc::sharded_lse share.

    T   classes of a tile: as many as keep [T, N] and [T, D] within TILE_ELEMENTS

Tiles are class-major, `[T, N]`, so that every matmul of the walk reads and writes contiguous rows of classes. All of
them use the same buffers: a tile is valid until the next one is asked for.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from . import _values
from ._saved import Saved
from ._tile import Tile, accumulate_dtype, matmul, or_infinite

# Elements of a tile buffer: 4 MB in float32, of the order of a core's share of the last-level cache; from 2^19 to 2^21
# a step's time varies by 3 % (2 cores, N = D = 512). On an accelerator a tile must fill the device: 256 MB.
TILE_ELEMENTS = 1 << 20
ACCELERATOR_TILE_ELEMENTS = 1 << 26

# A row of embeddings no longer than this has logits whose exponentials need no maximum taken out: in float32, neither
# e⁻⁶⁶ nor the sum of e⁶⁶ over billions of classes is beyond the range.
PLAIN_LENGTH = 66.0

# Nor are products with classes of such lengths, and exponentials over these lengths.
MODERATE_LENGTHS = (1e-6, 1e6)

# Nor are rows of embeddings times such factors, but for entries that do not matter beside the row's others.
MODERATE_FACTORS = (1e-35, 1e35)


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


class Tiles:
    """Iterates over the classes that take part, a Tile at a time.

    A walk is plain where no exponential of a logit, and no sum of them, can be beyond the range of its dtype.

    Args:
        saved: `[L]`, as `new_logits` makes it, what backward needs of the first classes' logits: to be written, or read
            where `filled`.
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
        self.weight, self.index, self.target, self.normalize = weight, index, target, normalize
        # |z| is no more than the row's length, if classes are at unit length.
        lengths = torch.linalg.vector_norm(self.embeddings, dim=1, dtype=self.dtype)
        self.is_plain = normalize and _values.are_between(lengths, -1.0, PLAIN_LENGTH)
        self._saved = None if saved is None else Saved(saved, embeddings.shape[0], filled)
        self.num_saved = 0 if self._saved is None else self._saved.num_classes
        self._buffers: dict[str, Tensor] = {}
        self.num_local_classes = weight.shape[0]
        self.num_classes = self.num_local_classes if index is None else index.shape[0]
        # pfc::sample pads only up to min(N, K).
        self.may_pad = index is not None and self.num_classes <= target.shape[0]
        self._sorted_target, self._order = target.sort()

    @functools.cached_property
    def transposed(self) -> Tensor:
        """`[D, N]`, contiguous."""
        return self.embeddings.t().contiguous()

    @functools.cached_property
    def _known_targets(self) -> list[int] | None:
        return _values.listed(self._sorted_target)

    @property
    def step(self) -> int:
        """T of a full tile."""
        elements = TILE_ELEMENTS if self.embeddings.device.type == "cpu" else ACCELERATOR_TILE_ELEMENTS
        return max(1, min(elements // max(self.embeddings.shape), self.num_classes))

    def __iter__(self) -> Iterator[Tile]:
        starts = (*range(0, self.num_saved, self.step), *range(self.num_saved, self.num_classes, self.step))
        for start, stop in pairwise((*starts, self.num_classes)):
            yield self._tile(slice(start, stop))
        self._buffers.clear()

    def leave_plain(self) -> None:
        """Makes of a plain walk one that is not, and does not read what a plain one has left."""
        self.is_plain, self.num_saved = False, 0

    def _buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Made when it is first asked for: a walk does not use all of them."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self.step, width, dtype=dtype, device=self.embeddings.device)
        return self._buffers[name][:num_rows]

    def _tile(self, span: slice) -> Tile:
        (num_rows, dim), size = self.embeddings.shape, span.stop - span.start

        def scratch(name: str, dtype: torch.dtype = self.dtype) -> Tensor:
            return self._buffer(name, size, dim, dtype)

        rows = padding = None
        if self.index is None:
            classes = self.weight[span]
        else:
            rows = self.index[span]
            if self.may_pad:
                padding = (rows >= self.num_local_classes).unsqueeze(1)
                rows = rows % self.num_local_classes
            classes = scratch("classes", self.weight.dtype)
            torch.index_select(self.weight, 0, rows, out=classes)

        saved = self._saved if span.stop <= self.num_saved else None
        is_read = saved is not None and saved.filled
        logits = self._buffer("scores", size, num_rows, self.dtype) if saved is None else saved.values[span]
        # What is saved of a plain walk is what is made of the logits, otherwise the logits.
        in_place = saved is None or self.is_plain
        scores = logits if in_place else self._buffer("scores", size, num_rows, self.dtype)

        # A master weight may be wider than the matmul.
        centres = classes.to(self.dtype) if classes.dtype == torch.float64 else classes
        postpones = self.is_plain and self.rounded == centres.dtype == self.dtype
        if postpones and not is_read:
            matmul(centres, self.transposed, out=logits)  # first, which brings the rows into the cache
        length = self._length(centres, span, saved) if self.normalize else None
        inverse = None
        if postpones and length is not None and _values.are_between(length, *MODERATE_LENGTHS):
            inverse = length.reciprocal()
            if not is_read:
                logits.mul_(inverse)
        else:
            if length is not None:
                length = or_infinite(length)
                centres = torch.div(centres, length, out=scratch("centres"))
            centres = centres.to(self.rounded).to(self.operand)
            if not is_read:
                matmul(centres, self.transposed, out=logits)

        here, place, inside = self._targets_in(span)
        if not is_read:
            if padding is not None:
                logits.masked_fill_(padding, -torch.inf)
            if inside is None:
                logits[place, here] = -torch.inf
            else:
                logits[place, here] = torch.where(inside, -torch.inf, logits[place, here])
        is_done = is_read and self.is_plain
        weight = (classes, centres, length, inverse)
        targets = (here, place, inside)
        return Tile(span, rows, padding, *weight, *targets, logits, scores, is_done, scratch)

    def _length(self, centres: Tensor, span: slice, saved: Saved | None) -> Tensor:
        """`[T, 1]` ‖w‖, in or from what is saved."""
        if saved is not None and saved.filled:
            return saved.lengths[span].unsqueeze(1)
        length = torch.linalg.vector_norm(centres, dim=1, keepdim=True, dtype=self.dtype)
        if saved is not None:
            saved.lengths[span] = length.squeeze(1)
        return length

    def _targets_in(self, span: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """`here`, `place` and `inside` of a tile."""
        if self._known_targets is not None:
            first, last = (bisect_left(self._known_targets, bound) for bound in (span.start, span.stop))
            return self._order[first:last], self._sorted_target[first:last] - span.start, None
        target = self._sorted_target - span.start
        inside = (target >= 0) & (target < span.stop - span.start)
        return self._order, target.clamp_(0, span.stop - span.start - 1), inside
