"""Some classes of a walk, and what is made of their logits, forward and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A row no longer than this has no direction: it stays zero at unit length, and so does its gradient, which would be
# g / ε with torch.nn.functional.normalize's rule.
EPSILON = 1e-12


def accumulate_dtype(embeddings: Tensor) -> torch.dtype:
    """The dtype of logits and sums: float64 for float64 embeddings, otherwise float32."""
    return torch.promote_types(embeddings.dtype, torch.float32)


def row_length(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`[M, D] → [M, 1]`: each row's length, computed in `dtype`; ∞ for a row without a direction."""
    return or_infinite(torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=dtype))


def or_infinite(length: Tensor) -> Tensor:
    """A length, or ∞ for a row without a direction."""
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
        padding: `[T, 1]` bool, which of them are none; None where the shapes rule padding out.
        classes: `[T, D]` w, in the dtype of the weight: a view of it where the walk takes every row, otherwise a copy.
        centres: `[T, D]` ŵ, or w where they are not normalised, rounded to the dtype of the matmul. With `inverse`, w
            itself: what `[T, N]` holds is divided instead, in place, which is cheaper.
        length: `[T, 1]` ‖w‖, or ∞ for a row without a direction; None where centres are not normalised.
        inverse: `[T, 1]` 1 / ‖w‖, or None.
        here: `[M]` the rows of embeddings whose target is in this tile; of an accelerator's, all rows.
        place: `[M]` where it is, counted from this tile's first class.
        inside: `[M]` whether it is in this tile: if not, `place` is that of another class. None if all are.
        logits: `[T, N]` z, but −∞ for targets and padding; unless `is_done`.
        scores: `[T, N]` for what is made of the logits, which may be there themselves.
        is_done: whether that is done, by the plain walk whose exponentials over ‖w‖ are read there.
        scratch: gives a `[T, D]` of that name, in the dtype of the logits or another: memory that all tiles share.
    """

    span: slice
    rows: Tensor | None
    padding: Tensor | None
    classes: Tensor
    centres: Tensor
    length: Tensor | None
    inverse: Tensor | None
    here: Tensor
    place: Tensor
    inside: Tensor | None
    logits: Tensor
    scores: Tensor
    is_done: bool
    scratch: Callable[..., Tensor]

    def exponentials(self, shift: Tensor | None) -> Tensor:
        """`[T, N]` exp(z + shift), with a shift `[N]` or without, in `scores`."""
        if shift is None:
            return torch.exp(self.logits, out=self.scores)
        return torch.add(self.logits, shift, out=self.scores).exp_()

    def over_length_(self, values: Tensor) -> Tensor:
        """`values` `[T, N]` / ‖w‖, in place, if `centres` are not at unit length yet."""
        return values if self.inverse is None else values.mul_(self.inverse)

    def project_(self, grad: Tensor, factor: float | Tensor) -> Tensor:
        """From the gradients of `centres` `[T, D]` to `factor` times those of the weight's rows, in place."""
        if self.length is not None:
            centres = self.centres.to(grad.dtype)
            along = torch.mul(centres, grad, out=self.scratch("product")).sum(dim=1, keepdim=True)
            if self.inverse is None:
                factor = factor / self.length
            else:
                along.mul_(self.inverse).mul_(self.inverse)
            grad.addcmul_(centres, along, value=-1)
        return grad if isinstance(factor, (int, float)) and factor == 1 else grad.mul_(factor)
