"""pfc::sharded_ce — the margin-softmax cross-entropy of rows against classes that live on many ranks::

    loss_n = softplus(negative_lse_n − s·ψ(target_logit_n / s)),   ψ(cos θ) = cos(m1 θ + m2) − m3

Composite over pfc::sharded_lse: shapes, collectives, memory and backward are that op's, and the elementwise tail on
[B] is plain PyTorch, which a compiler fuses with what follows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..margins import combined_margin

_library = torch.library.Library("pfc", "FRAGMENT")
_library.define(
    "sharded_ce(Tensor embeddings, Tensor weight, Tensor? index, Tensor target, bool normalize, "
    "str group_name, SymInt group_size, SymInt group_rank, float scale, float m1, float m2, float m3, "
    "bool sparse_grad=False) -> Tensor"
)


def sharded_ce(
    embeddings: Tensor,
    weight: Tensor,
    index: Tensor | None,
    target: Tensor,
    normalize: bool,
    group_name: str,
    group_size: int,
    group_rank: int,
    scale: float,
    m1: float,
    m2: float,
    m3: float,
    sparse_grad: bool = False,
) -> Tensor:
    """Returns the loss `[B]` of this rank's rows.

    Args:
        embeddings: `[N, D]`, scaled: s·x̂. The other tensors and the group are as for pfc::sharded_lse.
        scale: s, by which `embeddings` were scaled.
        m1: the factor on the angle; m2: the margin on the angle, in radians; m3: the margin in cosine.

    A row without a target on any rank counts as one at cosine 0: the caller masks it.
    """
    negative_lse, target_logit = torch.ops.pfc.sharded_lse(
        embeddings, weight, index, target, normalize, group_name, group_size, group_rank, sparse_grad
    )
    return softplus(negative_lse - scale * combined_margin(target_logit / scale, m1, m2, m3))


_library.impl("sharded_ce", sharded_ce, "CompositeImplicitAutograd")
