"""The targets, a class to each row, which the walk over tiles leaves out: their logits and their gradients.

With ŵ the target of row n, and t_n the gradient of its logit::

    dx_n  += t_n ŵ
    dw_ŵ  += t_n (x_n − ŵ (ŵ · x_n)) / ‖w‖     t_n x_n where classes are not normalised
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._tile import row_length
from ._tiles import Tiles


class Targets:
    """Those that are on this rank; what has to do with another's is 0.

    Args:
        tiles: the walk over this rank's classes.

    Attributes:
        logit: `[N]`.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._embeddings = tiles.embeddings.to(tiles.dtype)
        self._centres = torch.zeros_like(self._embeddings)
        self._length: Tensor | None = None
        if tiles.num_classes > 0:
            rows = tiles.target.clamp_min(0)
            if tiles.index is not None:
                rows = tiles.index[rows] % tiles.num_local_classes
            centres = tiles.weight[rows].to(tiles.dtype)
            if tiles.normalize:
                self._length = row_length(centres, tiles.dtype)
                centres = centres.div_(self._length)
            elsewhere = (tiles.target < 0).unsqueeze(1)
            self._centres = centres.to(tiles.rounded).to(tiles.dtype).masked_fill_(elsewhere, 0)
        self.logit = (self._embeddings * self._centres).sum(dim=1)

    def add_embeddings_grad_(self, dx: Tensor, values: Tensor) -> None:
        """Adds their part to `dx` `[N, D]`, with `values` `[N]` the gradients of their logits."""
        dx.addcmul_(self._centres, values.unsqueeze(1))

    def weight_grad(self, values: Tensor) -> Tensor:
        """`[N, D]`, with `values` `[N]` the gradients of their logits."""
        values = values.unsqueeze(1)
        if self._length is None:
            return self._embeddings * values
        grad = torch.addcmul(self._embeddings, self._centres, self.logit.unsqueeze(1), value=-1)
        return grad.mul_(values / self._length)
