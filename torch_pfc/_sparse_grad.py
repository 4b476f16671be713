"""Keeps a parameter's sparse gradient marked as coalesced.

Autograd stores the first gradient of a leaf as a new COO tensor without the mark (pytorch, accumulate_grad.h,
"stealable sparse new_grad"), and without it every consumer would sort and copy rows that are sorted and distinct.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook


def keep_coalesced(weight: nn.Parameter) -> None:
    """Restores the mark whenever a coalesced gradient arrives where none was; accumulation keeps it by itself."""
    arrived_coalesced = False
    alive = weakref.ref(weight)  # a hook that held its parameter would keep it in memory

    @unserializable_hook
    def before(grad: Tensor) -> None:
        nonlocal arrived_coalesced
        owner = alive()
        arrived_coalesced = owner is not None and owner.grad is None and grad.is_sparse and grad.is_coalesced()

    @unserializable_hook
    def after(weight: Tensor) -> None:
        if arrived_coalesced and weight.grad is not None:
            weight.grad._coalesced_(True)

    weight.register_hook(before)
    weight.register_post_accumulate_grad_hook(after)
