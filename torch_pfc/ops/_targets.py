"""The targets, a class to each row, which the walk over tiles leaves out: their logits and their gradients.

With ŵ the target of row n, and t_n the gradient of its logit::

    dx_n  += t_n ŵ
    dw_ŵ  += t_n (x_n − ŵ (ŵ · x_n)) / ‖w‖     t_n x_n where classes are not normalised
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._tile import Tile, row_length
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
            centres = self._centres.copy_(tiles.weight[rows])
            if tiles.normalize:
                self._length = row_length(centres, tiles.dtype)
                centres.div_(self._length)
            if tiles.rounded != tiles.dtype:
                centres.copy_(centres.to(tiles.rounded))
            centres.masked_fill_((tiles.target < 0).unsqueeze(1), 0)
        self.logit = (self._embeddings * self._centres).sum(dim=1)

    def add_embeddings_grad_(self, dx: Tensor, values: Tensor) -> None:
        """Adds their part to `dx` `[N, D]`, with `values` `[N]` the gradients of their logits."""
        dx.addcmul_(self._centres, values.unsqueeze(1))

    def add_weight_grad_(self, grad: Tensor, values: Tensor, tile: Tile) -> None:
        """Adds the part of those that are in `tile` to the gradient of its rows of the weight, `[T, D]`."""
        rows, values = self._embeddings[tile.here], values[tile.here].unsqueeze(1)
        if self._length is not None:
            rows.addcmul_(self._centres[tile.here], self.logit[tile.here].unsqueeze(1), value=-1)
            values = values / self._length[tile.here]
        rows.mul_(values)
        if tile.inside is not None:
            rows.masked_fill_(~tile.inside.unsqueeze(1), 0)
        grad.index_put_((tile.place,), rows, accumulate=True)  # unlike index_add_, in the same order on a GPU, too
