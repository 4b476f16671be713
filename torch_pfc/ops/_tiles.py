"""The walk over a shard's classes that forward and backward of pfc::sharded_lse share.

    T   classes of a tile: as many as keep [T, N] and [T, D] within TILE_ELEMENTS

Tiles are class-major, `[T, N]`, so that every matmul of the walk reads and writes contiguous rows of classes. All of
them use the same buffers: a tile is valid until the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

# A row of embeddings no longer than this has logits whose exponentials need no maximum taken out: in float32, neither
# e⁻⁷⁰ nor the sum of e⁷⁰ over a tile is beyond the range.
PLAIN_LENGTH = 70.0


def accumulate_dtype(embeddings: Tensor) -> torch.dtype:
    """The dtype of logits and sums: float64 for float64 embeddings, otherwise float32."""
    return torch.promote_types(embeddings.dtype, torch.float32)


def is_known(condition: Tensor) -> bool:
    """Whether all of a condition holds. To ask a CPU costs no sync; an accelerator is not asked: nothing is known."""
    return condition.device.type == "cpu" and bool(condition.all())


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
    return _or_infinite(torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=dtype))


def _or_infinite(length: Tensor) -> Tensor:
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
        centres: `[T, D]` ŵ, or w where they are not normalised, rounded to the dtype of the matmul. With `inverse`, w
            itself: a factor of the rows is cheaper applied to the logits, in a pass that is made of them anyhow.
        length: `[T, 1]` ‖w‖, or ∞ for a row without a direction; None where centres are not normalised.
        inverse: `[T, 1]` 1 / ‖w‖, or None.
        padding: `[T, 1]` bool, which of them are none; None where the shapes rule padding out.
        products: `[T, N]` of centres and embeddings: the logits z, or with `inverse` z·‖w‖.
        scores: `[T, N]` for what a walk makes of them; `products` itself, unless those are saved.
        scratch: gives a `[T, D]` of that name, in the dtype of the logits or another: memory that all tiles share.
        target: `[N]` the rows' targets, counted from this tile's first class.
        place: `[N]` the same where they are in this tile, otherwise some row of it.
    """

    span: slice
    rows: Tensor | None
    classes: Tensor
    centres: Tensor
    length: Tensor | None
    inverse: Tensor | None
    padding: Tensor | None
    products: Tensor
    scores: Tensor
    scratch: Callable[..., Tensor]
    target: Tensor
    place: Tensor

    def remove_target(self) -> Tensor:
        """Puts −∞ in the place of the targets' logits, and of padding's.

        Returns:
            `[N]` the targets' logits, 0 for rows whose target is not in this tile.
        """
        if self.padding is not None:
            self.products.masked_fill_(self.padding, -torch.inf)
        logits = self.replace_target(self.products, -torch.inf)
        return logits if self.inverse is None else logits * self.inverse.squeeze(1)[self.place]

    def replace_target(self, values: Tensor, replacement: float | Tensor) -> Tensor:
        """Puts `replacement`, a number or `[N]`, in the place of the targets in `values` `[T, N]`.

        Returns:
            `[N]` what was there, 0 for rows whose target is not in this tile.
        """
        # Rows with their target elsewhere read and rewrite one entry of their own column: no selection, so no sync.
        inside, place = self.place == self.target, self.place.unsqueeze(0)
        before = values.gather(0, place)
        values.scatter_(0, place, torch.where(inside, replacement, before))
        return torch.where(inside, before, 0).squeeze(0)

    def exponentials(self, shift: Tensor) -> Tensor:
        """`[T, N]` exp(z + shift), with a shift `[N]`, in `scores`."""
        if self.inverse is None:
            torch.add(self.products, shift, out=self.scores)
        else:
            torch.addcmul(shift, self.products, self.inverse, out=self.scores)
        return self.scores.exp_()

    def weight_grad(self, dz: Tensor, embeddings: Tensor, factor: float | Tensor, out: Tensor | None = None) -> Tensor:
        """From the gradients of the products `[T, N]` to `factor` times those of the weight's rows, `[T, D]`.

        In `out`; without one, valid until the next tile is asked for.
        """
        grad = matmul(dz, embeddings, out=self.scratch("gradient") if out is None else out)
        if self.length is not None:
            centres = self.centres.to(grad.dtype)
            along = torch.mul(centres, grad, out=self.scratch("product")).sum(dim=1, keepdim=True)
            if self.inverse is None:
                factor = factor / self.length
            else:
                along.mul_(self.inverse).mul_(self.inverse)
            grad.addcmul_(centres, along, value=-1)
        return grad if isinstance(factor, (int, float)) and factor == 1 else grad.mul_(factor)


class Tiles:
    """Iterates over the classes that take part, a Tile at a time.

    Args:
        saved: `[L]`, where the products of the first L // N classes are kept: to be written, or read where `filled`.
        as_logits: whether products must be the logits.
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
        as_logits: bool = False,
    ) -> None:
        self.dtype = accumulate_dtype(embeddings)
        self.rounded = embeddings.dtype
        # CPU has no matmul from half operands to float32, and one to half would round the logits: there the rounded
        # operands are widened first, which makes their products exact.
        self.operand = embeddings.dtype if embeddings.is_cuda else self.dtype
        self.embeddings = embeddings.to(self.operand)
        self.transposed = self.embeddings.t().contiguous()
        self.weight, self.index, self.target, self.normalize = weight, index, target, normalize
        # |z| is no more than the row's length, if classes are at unit length.
        lengths = torch.linalg.vector_norm(self.embeddings, dim=1, dtype=self.dtype)
        self.are_plain = normalize and is_known(lengths <= PLAIN_LENGTH)
        self.may_postpone = self.are_plain and not as_logits and self.rounded == self.dtype
        num_rows = embeddings.shape[0]
        self.num_saved = 0 if saved is None else saved.shape[0] // max(num_rows, 1)
        self.saved = None if saved is None else saved[: self.num_saved * num_rows].view(self.num_saved, num_rows)
        self.filled = filled
        if saved is not None and not filled:
            saved[self.num_saved * num_rows :] = 0  # where no more class fits
        self._buffers: dict[str, Tensor] = {}
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
        starts = (*range(0, self.num_saved, self.step), *range(self.num_saved, self.num_classes, self.step))
        for start, stop in pairwise((*starts, self.num_classes)):
            yield self._tile(slice(start, stop))
        self._buffers.clear()

    def _buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Made when it is first asked for: a walk does not use all of them."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self.step, width, dtype=dtype, device=self.embeddings.device)
        return self._buffers[name][:num_rows]

    def _tile(self, span: slice) -> Tile:
        (num_rows, dim), size = self.embeddings.shape, span.stop - span.start

        def scratch(name: str, dtype: torch.dtype = self.dtype) -> Tensor:
            return self._buffer(name, size, dim, dtype)

        rows = padding = length = inverse = None
        if self.index is None:
            classes = self.weight[span]
        else:
            rows = self.index[span]
            if self.may_pad:
                padding = (rows >= self.num_local_classes).unsqueeze(1)
                rows = rows % self.num_local_classes
            classes = scratch("classes", self.weight.dtype)
            torch.index_select(self.weight, 0, rows, out=classes)
        # A master weight may be wider than the matmul.
        centres = classes.to(self.dtype) if classes.dtype == torch.float64 else classes
        scores = self._buffer("scores", size, num_rows, self.dtype)
        is_saved = span.stop <= self.num_saved
        products = self.saved[span] if self.saved is not None and is_saved else scores
        is_missing = not (is_saved and self.filled)
        if self.normalize:
            postpones = self.may_postpone and centres.dtype == self.dtype
            if postpones and is_missing:
                matmul(centres, self.transposed, out=products)  # first, which brings the rows into the cache
            length = torch.linalg.vector_norm(centres, dim=1, keepdim=True, dtype=self.dtype)
            if postpones and is_known((length > EPSILON) & (length < torch.inf)):
                inverse, is_missing = length.reciprocal(), False
            else:
                length = _or_infinite(length)
                centres = torch.div(centres, length, out=scratch("centres"))
        centres = centres.to(self.rounded).to(self.operand)
        if is_missing:
            matmul(centres, self.transposed, out=products)
        target = self.target - span.start
        place = target.clamp(0, size - 1)
        return Tile(span, rows, classes, centres, length, inverse, padding, products, scores, scratch, target, place)
