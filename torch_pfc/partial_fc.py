"""PartialFC: the class-sharded, sampled margin softmax as one module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._fused_optimizer import FusedOptimizer
from ._init import draw_centres_
from ._inputs import (
    as_class_ids,
    assert_in_range,
    check_embeddings,
    num_missing_rows,
    pad_rows,
    scaled_directions,
)
from ._sharded_module import ShardedModule
from .margins import CosFace
from .ops import _group
from .ops._shard import shard
from .ops.sample import local_target

if TYPE_CHECKING:
    from ._sparse_optimizer import SparseOptimizer
    from .scaling import GradScaler

Margin: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_DEFAULT_MARGIN = CosFace(0.4)


class PartialFC(ShardedModule):
    """Margin-softmax loss over `num_classes` classes, sharded over a process group and sampled at each step.

    Every rank holds `ceil(num_classes / W)` classes, the last ones fewer or none. A step scores the rows of all ranks
    against all of their classes and a random part of the others, and returns the loss of the whole group's batch.

    The objective is the mean over ranks of what each rank back-propagates, as under DistributedDataParallel. Wrap the
    backbone in DDP (or fully_shard it), never the head: then every gradient, the head's included, is that of the
    group's mean loss. Without DDP, `embeddings`' gradient is W times that, as in InsightFace.

    Every rank must give the same number of rows, unless `uneven_batches` is set.

    An et al., "Killing Two Birds with One Stone: Efficient and Robust Training of Face Recognition CNNs by Partial
    FC", CVPR 2022, arXiv:2203.15565.

    Args:
        embedding_dim: D, the width of the embeddings.
        num_classes: C, the number of classes in all.
        margin: what the target's cosine is replaced by, a callable `margin(cosine [B], embeddings [B, D], labels [B])
            -> [B]` (see torch_pfc.margins); None for plain softmax.
        scale: s, the length that embeddings are brought to: a number, or a scalar tensor or Parameter. A Parameter is
            trained; its gradient on a rank is of the same kind as a replicated parameter's under DDP.
        sample_rate: the part of a shard's classes that a step scores, 0 … 1. Classes of the batch always take part;
            at 0 they alone do.
        reduction: "mean" over the group's rows that are not ignored, or "sum" over them: the same value on every
            rank. "none": `[B]`, this rank's rows, 0 where ignored.
        ignore_index: the label of rows that take no part.
        sparse_grad: `weight.grad` is a coalesced COO tensor of the sampled rows in place of a dense one.
        saved_logits_bytes: how many bytes of logits, or of their exponentials, forward may keep for backward, which
            then makes two matmuls in place of three for their classes. All of them take 4·(N+1)·S bytes.
        uneven_batches: ranks may give different numbers of rows, also none. One more small collective and a
            device-to-host sync.
        group: a ProcessGroup, a 1-D DeviceMesh, or None: the world if torch.distributed is initialised, otherwise
            this process alone.
        device: of `weight`.
        dtype: of `weight`, the master copy. The matmul runs in the dtype of the embeddings, or autocast's.

    Attributes:
        weight: Parameter `[K, D]`, this rank's class centres; not normalised.
        class_start: the first class of this rank; `weight[i]` is the centre of class `class_start + i`.
        num_local_classes: K.
        num_sampled: how many of them a step scores, unless more are in the batch; None at `sample_rate` 1.
        group: the process group as plain values `(name, size, rank)`.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        margin: Margin | None = _DEFAULT_MARGIN,
        scale: float | Tensor = 64.0,
        sample_rate: float = 1.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int = -100,
        sparse_grad: bool = False,
        saved_logits_bytes: int = 0,
        uneven_batches: bool = False,
        group: _group.GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in [("embedding_dim", embedding_dim), ("num_classes", num_classes)]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= sample_rate <= 1:
            raise ValueError(f"sample_rate must lie in [0, 1], got {sample_rate}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        if saved_logits_bytes < 0:
            raise ValueError(f"saved_logits_bytes must not be negative, got {saved_logits_bytes}")
        if not isinstance(scale, Tensor) and not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")

        self.embedding_dim = embedding_dim
        # A head of its own copy: a schedule that changes one head's margin must not change another's.
        self.margin = copy.copy(margin) if margin is _DEFAULT_MARGIN else margin
        self.sample_rate = sample_rate
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.sparse_grad = sparse_grad
        self.saved_logits_bytes = saved_logits_bytes
        self._fused: FusedOptimizer | None = None
        self.uneven_batches = uneven_batches
        if isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

        self.group = _group.resolve(group)
        self._set_num_classes(num_classes)
        self.weight = nn.Parameter(torch.empty(self.num_local_classes, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def _set_num_classes(self, num_classes: int) -> None:
        """Which classes this rank holds; `weight` is the caller's to follow."""
        self.num_classes = num_classes
        self.class_start, self.num_local_classes = shard(num_classes, self.group.size, self.group.rank)
        self.num_sampled = None if self.sample_rate == 1 else int(self.sample_rate * self.num_local_classes)

    def fuse(self, optimizer: SparseOptimizer | None, scaler: GradScaler | None = None) -> None:
        """From now on the optimizer's update of `weight` happens in the backward of the loss, tile by tile.

        `weight` gets no gradient, so none is stored: one step costs no memory beyond a few tiles, and one pass less.
        Values are those of `optimizer.step()` to rounding; options are read at each forward, so schedules work, and the
        optimizer keeps the state, so checkpoints do. `optimizer.step()` goes on to update its other parameters.

        As a backward is a step:

        - each forward has one backward, before the next forward; micro-batches would be steps of their own;
        - the head's gradient is in no clipped norm;
        - embeddings must require grad;
        - with a scaler, the update is skipped where this loss has no finite gradient, on any rank, but not for an
          overflow further down; leave an optimizer that holds `weight` alone out of `scaler.step`.

        Copies of the head, and what is unpickled, are not fused: their weight gets a gradient.

        Args:
            optimizer: a torch_pfc.optim optimizer that holds `weight`; None for a gradient again.
            scaler: what the loss is scaled by before backward.

        Raises:
            TypeError: another optimizer.
            ValueError: it does not hold `weight`, or has an option that cannot be followed.
        """
        self._fused = None if optimizer is None else FusedOptimizer(optimizer, scaler, self.weight)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and unpickled heads are not fused: the optimizer, with all of its parameters, is not theirs."""
        return self.__dict__ | {"_fused": None}

    def extra_repr(self) -> str:
        scale = "tensor" if isinstance(self.scale, Tensor) else self.scale
        return (
            f"embedding_dim={self.embedding_dim}, num_classes={self.num_classes}, scale={scale}, "
            f"sample_rate={self.sample_rate}, rank {self.group.rank} of {self.group.size}: "
            f"classes {self.class_start} … {self.class_start + self.num_local_classes - 1}"
        )

    def reset_parameters(self) -> None:
        """Draws `weight` anew: normal, a function of torch's default seed and the class id, not of the group's size."""
        draw_centres_(self.weight, self.class_start)

    def forward(self, embeddings: Tensor, labels: Tensor, *, key: Tensor | None = None) -> Tensor:
        """Returns the loss, float32 (float64 for float64 embeddings): `[]`, or `[B]` with reduction "none".

        Args:
            embeddings: `[B, D]` floating point, as the backbone gives them: any length.
            labels: `[B]` or `[B, 1]`, any integer dtype: global class ids or `ignore_index`. Never modified.
            key: `[]` int64, which classes are sampled; None draws it from torch's default generator.

        Raises:
            ValueError: shapes that do not fit.
            TypeError: embeddings that are not floating point, labels that are not integers.
            RuntimeError: a label that is neither a class nor `ignore_index`, on every rank; or a process group other
                than the one that the module was built for.
        """
        check_embeddings(embeddings, self.embedding_dim)
        labels = as_class_ids(labels, embeddings.shape[0])
        self._check_weight()
        num_missing = self._num_missing_rows(embeddings)

        x = self._gather(scaled_directions(embeddings, self.scale), num_missing)
        group_labels = self._gather(labels, num_missing, self.ignore_index)
        assert_in_range(group_labels, self.num_classes, self.ignore_index)
        index, target = self.sample(group_labels, key=key)
        negative_lse, target_logit = self._lse(x, index, target)
        if num_missing:
            negative_lse, target_logit = negative_lse[:-num_missing], target_logit[:-num_missing]

        cosine = target_logit / self.scale
        margined = cosine if self.margin is None else self.margin(cosine, embeddings, labels)
        loss = F.softplus(negative_lse - self.scale * margined)
        loss = torch.where(labels != self.ignore_index, loss, 0)
        return self._reduce(loss, group_labels)

    def _lse(self, x: Tensor, index: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor]:
        """pfc::sharded_lse, in the variant that `saved_logits_bytes` and `fuse` ask for."""
        operands = (x, self.weight, index, target, True, *self.group)
        if not torch.is_grad_enabled():
            return torch.ops.pfc.sharded_lse(*operands)
        if self._fused is not None and self.weight.requires_grad:
            update = self._fused.arguments(self.weight, x)
            return torch.ops.pfc.sharded_lse_update(*operands, self.saved_logits_bytes, *update)[:2]
        if self.saved_logits_bytes > 0:
            return torch.ops.pfc.sharded_lse_saving(*operands, self.sparse_grad, self.saved_logits_bytes)[:2]
        return torch.ops.pfc.sharded_lse(*operands, self.sparse_grad)

    def sample(self, labels: Tensor, *, key: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Which of this rank's classes take part, given the labels of the whole group: see pfc::sample.

        Args:
            labels: `[N]` int64.
            key: `[]` int64; None draws it from torch's default generator.

        Returns:
            index: `[S]` int64, or None for all K classes at `sample_rate` 1.
            target: `[N]` int64.
        """
        if self.num_sampled is None:
            return None, local_target(labels, self.class_start, self.num_local_classes, self.ignore_index)
        if key is None:
            key = torch.randint(2**62, (), device=labels.device)
        return torch.ops.pfc.sample(
            labels, key, self.class_start, self.num_local_classes, self.num_sampled, self.ignore_index
        )

    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` classes of the group whose centres are closest to each embedding; every rank must call it.

        No gradient flows through it.

        Args:
            embeddings: `[B, D]` floating point.
            k: 1 … `num_classes`.

        Returns:
            cosines: `[B, k]` float32, descending.
            classes: `[B, k]` int64, global ids; of equal cosines the lower id first.

        Raises:
            ValueError: shapes that do not fit, or k out of range.
            TypeError: embeddings that are not floating point.
        """
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k must lie in [1, num_classes={self.num_classes}], got {k}")
        check_embeddings(embeddings, self.embedding_dim)
        self._check_weight()
        num_missing = self._num_missing_rows(embeddings)
        x = self._gather(scaled_directions(embeddings.detach(), 1.0), num_missing)
        cosines, classes = torch.ops.pfc.sharded_topk(x, self.weight.detach(), k, *self.group)
        return (cosines[:-num_missing], classes[:-num_missing]) if num_missing else (cosines, classes)

    def _num_missing_rows(self, embeddings: Tensor) -> int:
        """By how many rows the largest batch of the group is larger."""
        if not self.uneven_batches:
            return 0
        return num_missing_rows(embeddings.shape[0], embeddings.device, self.group)

    def _gather(self, rows: Tensor, num_missing: int, padding: int = 0) -> Tensor:
        return torch.ops.pfc.gather(pad_rows(rows, num_missing, padding) if num_missing else rows, *self.group)

    def _reduce(self, loss: Tensor, group_labels: Tensor) -> Tensor:
        """`[B]` of this rank to the group's value. Every rank adds the same W numbers in the same order."""
        if self.reduction == "none":
            return loss
        total = torch.ops.pfc.gather(loss.sum().reshape(1), *self.group).sum()
        if self.reduction == "sum":
            return total
        return total / (group_labels != self.ignore_index).sum().clamp_min(1)
