"""What forward leaves of the logits for backward, in one tensor `[L]`, of the first M classes::

values   [M, N]   exponentials over ‖w‖ of a plain walk, otherwise logits
lengths  [M]      ‖w‖, or 0 where classes are not normalised
0                 where no more class fits
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._tile import accumulate_dtype


def new_logits(embeddings: Tensor, weight: Tensor, index: Tensor | None, max_bytes: int) -> Tensor:
    """An empty tensor `[L]` for as many of the classes that take part as fit in `max_bytes`.

    By elements, not by classes: a number of classes that depends on that of the rows could be 1 or 0, which a program
    with a dynamic batch takes for a case of its own.
    """
    dtype, num_classes = accumulate_dtype(embeddings), (weight if index is None else index).shape[0]
    size = torch.sym_min(num_classes * (embeddings.shape[0] + 1), max_bytes // dtype.itemsize)
    return embeddings.new_empty(size, dtype=dtype)


class Saved:
    """Its parts.

    Args:
        saved: `[L]`.
        num_rows: N.
        filled: whether it has been written.
    """

    def __init__(self, saved: Tensor, num_rows: int, filled: bool) -> None:
        self.num_classes = saved.shape[0] // (num_rows + 1)
        self.filled = filled
        bounds = (self.num_classes * num_rows, self.num_classes * (num_rows + 1))
        values, self.lengths, rest = saved.tensor_split(bounds)
        self.values = values.view(self.num_classes, num_rows)
        if not filled:
            self.lengths.zero_()
            rest.zero_()
