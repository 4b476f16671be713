"""What a step of PartialFC would take on one rank of a group of any size: memory, collectives and matrix products.

The real head and the real optimizer run one step on fake tensors, in a fake process group. Nothing of the size of the
problem is allocated, no other process is needed, and a process group that exists is left alone.

    python -m torch_pfc.plan --classes 100e6 --dim 512 --ranks 64 --batch 128 --sample-rate 0.1
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .._sparse_optimizer import SparseOptimizer
from ..ops._shard import shard
from ..optim import SparseAdamW, SparseSGD
from ..partial_fc import PartialFC
from ._trace import Collective, Phase, fake_group, num_bytes, tracing

__all__ = ["DEVICES", "DTYPES", "OPTIMIZERS", "Collective", "Phase", "Plan", "plan"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# torch.optim's, and the library's own. Sizes do not depend on the numbers given here.
_DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
_SPARSE: dict[str, Callable[..., SparseOptimizer]] = {
    "sparse_sgd": functools.partial(SparseSGD, lr=0.1),
    "sparse_momentum": functools.partial(SparseSGD, lr=0.1, momentum=0.9),
    "sparse_adamw": SparseAdamW,
}
OPTIMIZERS = _DENSE | _SPARSE
DEVICES = ("cpu", "cuda")
_MAX_BYTES = 1 << 63


@dataclass(frozen=True)
class Plan:
    """One training step of one rank, not the first: the optimizer has its state.

    Attributes:
        num_local_classes: K, the classes of this rank.
        sparse_grad: whether the weight has a gradient and that is sparse.
        weight_bytes: of this rank's shard `[K, D]`.
        optimizer_bytes: of the optimizer's state for it.
        gradient_bytes: of `weight.grad`, between backward and `zero_grad`; indices included where it is sparse; 0
            where the update is fused into backward.
        activation_bytes: of this rank's embeddings and labels, and of all that forward leaves for backward, saved
            logits included.
        forward: from `head(embeddings, labels)`.
        backward: from `loss.backward()`; with the update, where that is fused.
        update: from `optimizer.step()`.
        peak_bytes: the most that all tensors of the head, its optimizer and its inputs hold at any moment of the step.
    """

    num_local_classes: int
    sparse_grad: bool
    weight_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    forward: Phase
    backward: Phase
    update: Phase
    peak_bytes: int


def plan(
    num_classes: int,
    embedding_dim: int,
    *,
    ranks: int = 1,
    batch_size: int = 128,
    sample_rate: float = 1.0,
    dtype: str = "fp32",
    optimizer: str = "sgd",
    sparse_grad: bool | None = None,
    fused: bool = False,
    saved_logits_bytes: int = 0,
    rank: int = 0,
    device: str = "cpu",
) -> Plan:
    """Runs one step of `rank` on fake tensors.

    Args:
        num_classes: C, in all.
        embedding_dim: D.
        ranks: W.
        batch_size: B, rows of each rank.
        sample_rate: the part of a shard's classes that a step scores, 0 … 1.
        dtype: of weight and embeddings: "fp32", "bf16" or "fp16".
        optimizer: torch.optim's "sgd" (plain), "momentum" (SGD with it) or "adamw"; or the same of torch_pfc.optim:
            "sparse_sgd", "sparse_momentum", "sparse_adamw".
        sparse_grad: as in PartialFC; None for True where classes are sampled and the optimizer takes it: "sgd" and
            torch_pfc.optim's do.
        fused: whether backward does the update (PartialFC.fuse), for torch_pfc.optim's.
        saved_logits_bytes: as in PartialFC.
        rank: the one to plan for. No other has more classes than rank 0.
        device: "cpu" or "cuda", whose operators use larger tiles.

    Raises:
        ValueError: a value out of range, or an optimizer that cannot be fused or takes no such gradient.
    """
    _check(
        num_classes, embedding_dim, ranks, batch_size, sample_rate, saved_logits_bytes, dtype, optimizer, rank, device
    )
    sparse_grad = _is_sparse(sparse_grad, optimizer, fused, sample_rate)

    with fake_group(ranks, rank) as group, tracing(device) as trace:
        head = _Head(
            embedding_dim,
            num_classes,
            sample_rate=sample_rate,
            sparse_grad=sparse_grad,
            saved_logits_bytes=saved_logits_bytes,
            group=group,
            dtype=DTYPES[dtype],
        )
        updater = OPTIMIZERS[optimizer](head.parameters())
        if optimizer in _DENSE:
            # torch.optim's own choice on CUDA, which fake CPU tensors would not lead it to.
            updater.param_groups[0]["foreach"] = device == "cuda"
        head.weight.grad = torch.zeros_like(head.weight)
        updater.step()
        updater.zero_grad()
        if fused:
            assert isinstance(updater, SparseOptimizer)
            head.fuse(updater)
        resident = trace.live_bytes
        embeddings = torch.empty(batch_size, embedding_dim, dtype=DTYPES[dtype], requires_grad=True)
        labels = torch.empty(batch_size, dtype=torch.int64)

        trace.end_phase()
        loss = head(embeddings, labels)
        activations = trace.live_bytes - resident
        forward = trace.end_phase()
        loss.backward()
        backward = trace.end_phase()
        updater.step()
        update = trace.end_phase()

        weight = num_bytes(head.weight)
        return Plan(
            num_local_classes=head.num_local_classes,
            sparse_grad=sparse_grad,
            weight_bytes=weight,
            optimizer_bytes=resident - weight,
            gradient_bytes=0 if head.weight.grad is None else num_bytes(head.weight.grad),
            activation_bytes=activations,
            forward=forward,
            backward=backward,
            update=update,
            peak_bytes=max(forward.peak_bytes, backward.peak_bytes, update.peak_bytes),
        )


class _Head(PartialFC):
    def reset_parameters(self) -> None:
        """Fake weights have no values."""


def _check(
    num_classes: int,
    embedding_dim: int,
    ranks: int,
    batch_size: int,
    sample_rate: float,
    saved_logits_bytes: int,
    dtype: str,
    optimizer: str,
    rank: int,
    device: str,
) -> None:
    for name, value in [
        ("num_classes", num_classes),
        ("embedding_dim", embedding_dim),
        ("ranks", ranks),
        ("batch_size", batch_size),
    ]:
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in [0, 1], got {sample_rate}")
    if not 0 <= saved_logits_bytes < _MAX_BYTES:
        raise ValueError(f"saved_logits_bytes must lie in [0, 2⁶³), got {saved_logits_bytes}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    choices: Iterable[str]
    for name, choice, choices in (
        ("dtype", dtype, DTYPES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("device", device, DEVICES),
    ):
        if choice not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {choice!r}")
    for rows, what in [(shard(num_classes, ranks, 0).size, "a shard"), (ranks * batch_size, "the group's embeddings")]:
        # Twice as long as a float32 row: no tensor of the step is larger.
        if 8 * rows * embedding_dim >= _MAX_BYTES:
            raise ValueError(f"{what} of {rows} rows of width {embedding_dim} is more than any machine can address")


def _is_sparse(sparse_grad: bool | None, optimizer: str, fused: bool, sample_rate: float) -> bool:
    """Whether there is a sparse gradient; raises ValueError where `optimizer` cannot have what is asked of it."""
    if fused:
        if optimizer not in _SPARSE:
            raise ValueError(f"fused needs an optimizer of {', '.join(_SPARSE)}, got {optimizer!r}")
        if sparse_grad is not None:
            raise ValueError(f"a fused update leaves no gradient, got sparse_grad={sparse_grad}")
        return False
    takes_sparse = optimizer == "sgd" or optimizer in _SPARSE
    if sparse_grad and not takes_sparse:
        raise ValueError(f"optimizer {optimizer!r} takes dense gradients alone, got sparse_grad=True")
    return takes_sparse and sample_rate < 1 if sparse_grad is None else sparse_grad
