"""The operators `torch.ops.pfc.*`, registered by importing this package. One batch goes through them in this order::

    embeddings [B, D] ─ pfc::gather ─► [N, D] ─┐                         (backward: reduce-scatter)
    labels     [B]    ─ pfc::gather ─► [N] ─ pfc::sample ─► index [S], target [N]
    weight     [K, D] ─────────────────────────┴─► pfc::sharded_lse ─► negative_lse [B], target_logit [B]
                                       margin ψ, softplus: plain PyTorch on [B] ─► loss (pfc::sharded_ce does both)

    B  rows on this rank       N = B·W  rows in the group         W  ranks        D  embedding width
    C  classes in all          K  classes on this rank            S  sampled classes on this rank

pfc::sharded_topk ranks the same classes without a loss. pfc::sparse_sgd_ and pfc::sparse_adamw_ update the sampled rows
of the weight in place (torch_pfc.optim); pfc::sharded_lse_update is pfc::sharded_lse with a backward that does so.

Behind them: `_group` (the process group as plain values), `_shard` (which classes a rank holds), `_hash` (counter-based
random bits), `_tiles` (a shard's classes, a `_tile` at a time), `_targets` (apart from them), `_saved` (what forward
leaves for backward), `_walks` (over all of it, forward and back), `_rows` (over a gradient's rows), `_values` (what may
be asked of them without a sync).
"""

from . import (  # noqa: I001 — the order of the flow
    gather,
    sample,
    sharded_lse,
    sharded_ce,
    sharded_topk,
    sparse_sgd,
    sparse_adamw,
    sharded_lse_update,
)

__all__ = [
    "gather",
    "sample",
    "sharded_ce",
    "sharded_lse",
    "sharded_lse_update",
    "sharded_topk",
    "sparse_adamw",
    "sparse_sgd",
]
