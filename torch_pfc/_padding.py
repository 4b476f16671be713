"""Keeps the padding of a head's sparse gradient apart from its scored rows where PyTorch adds such gradients.

A row of −0.0 throughout is one that was not scored (pfc::sharded_lse). Adding two of them gives −0.0 again, but PyTorch
adds sparse tensors to a zero that it starts from, in `+` on the CPU and in `coalesce` on CUDA, and 0 + −0.0 is 0: the
gradient of a scored row. So it is remembered here which rows were scored, and the others' signs are put back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, but Dynamo is imported by the first call
from torch.multiprocessing.reductions import StorageWeakRef

from .ops._rows import is_padding


def scored_rows(grad: Tensor, values: Tensor) -> Tensor:
    """`[K]` bool: the rows that are named and no padding.

    Args:
        grad: COO, shape `[K, …]`, coalesced or not.
        values: its values `[S, …]`, or a part of every one of them that tells padding from the rest.
    """
    num_rows = grad.shape[0]
    # Padding writes to a slot past the end instead of being selected, which would need its number on the host.
    rows = torch.where(is_padding(values), num_rows, grad._indices()[0])
    scored = torch.zeros(num_rows + 1, dtype=torch.bool, device=rows.device)
    return scored.index_fill_(0, rows, True)[:num_rows]


def restore_(grad: Tensor, scored: Tensor) -> None:
    """Makes −0.0 of the zeros in the rows of a coalesced `grad` that are not in `scored` `[K]`."""
    rows, values = grad.indices()[0], grad.values()
    padding = ~scored[rows].view(-1, *[1] * (values.dim() - 1))
    values.masked_fill_(padding & (values == 0), -0.0)


def coalesce(grad: Tensor) -> Tensor:
    """As `grad.coalesce()`: duplicates add up, and those that are padding to padding."""
    if grad.is_coalesced():
        return grad
    summed = grad.coalesce()
    restore_(summed, scored_rows(grad, grad._values()))
    return summed


class Accumulation:
    """Follows which rows of a head's `weight.grad` were scored, over the backward passes that add to it.

    Called by autograd hooks, which in a compiled step are frames of their own that Dynamo would trace.
    """

    def __init__(self) -> None:
        self._scored: Tensor | None = None  # of `weight.grad`, `[K]`
        self._arrived = self._first = torch.empty(0)  # of the gradient that is added: `[K]`, and its first column
        self._storage = 0

    @_disable_dynamo
    def before(self, grad: Tensor) -> None:
        """To be called with a coalesced gradient before it is added."""
        self._first = grad.values()[:, :1].clone()  # tells padding: no scored row begins with −0.0
        self._arrived = scored_rows(grad, self._first)
        self._storage = _storage_of(grad)

    @_disable_dynamo
    def after(self, total: Tensor) -> None:
        """To be called with what it was added to, if that is coalesced."""
        if self._scored is None or _storage_of(total) == self._storage:  # nothing was there before
            self._scored = self._arrived
            return
        first = total.values()[:, :1]
        if first.shape == self._first.shape:  # it may be a copy: a sum of padding is none until it is restored
            is_copy = ((first == self._first) & (first.signbit() == self._first.signbit())).all()
            self._scored = self._scored & ~is_copy
        self._scored = self._scored | self._arrived
        restore_(total, self._scored)


def _storage_of(grad: Tensor) -> int:
    return StorageWeakRef(grad.values().untyped_storage()).cdata
