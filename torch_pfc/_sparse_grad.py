"""Keeps a parameter's sparse gradient marked as coalesced.

Autograd stores the first gradient of a leaf as a new COO tensor without the mark (pytorch, accumulate_grad.h,
"stealable sparse new_grad"), and without it every consumer would sort and copy rows that are sorted and distinct.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from ._padding import Accumulation


def keep_coalesced(weight: nn.Parameter) -> None:
    """Restores the mark on a gradient that came coalesced and was stored as it came; sums of such keep it themselves.

    Does nothing where it was called before. The parameter may be frozen, now or later.
    """
    if any(hook.__module__ == __name__ for hook in (weight._post_accumulate_grad_hooks or {}).values()):
        return
    num_arrived: int | None = None  # rows of the last gradient; None if it was not coalesced
    accumulation = Accumulation()

    @unserializable_hook
    def before(grad: Tensor | None) -> None:
        nonlocal num_arrived
        num_arrived = None
        # Others are not the head's own; none is the one of a backward that steps itself.
        if grad is not None and grad.is_sparse and grad.sparse_dim() == 1 and grad.is_coalesced():
            num_arrived = grad._nnz()
            accumulation.before(grad)

    @unserializable_hook
    def after(weight: Tensor) -> None:
        # Where uncoalesced rows were before, the sum has more rows than what arrived.
        if weight.grad is not None and weight.grad.is_sparse and weight.grad._nnz() == num_arrived:
            weight.grad._coalesced_(True)
        if num_arrived is not None and weight.grad is not None and weight.grad.is_coalesced():
            accumulation.after(weight.grad)

    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # a frozen tensor takes no hooks, but keeps those it has
    weight.register_hook(before)
    weight.register_post_accumulate_grad_hook(after)
    weight.requires_grad_(is_trained)


def drop_dead_hooks(weight: nn.Parameter) -> None:
    """To be called after torch.utils.swap_tensors: it leaves lists of hooks behind that never run, nor do additions."""
    weight._backward_hooks = None
    weight._post_accumulate_grad_hooks = None  # type: ignore[assignment]
