"""PartialFC: the class-sharded, sampled margin softmax as one module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import _ddp
from ._sparse_grad import keep_coalesced
from .margins import CosFace
from .ops import _group
from .ops._hash import random_bits
from .ops._shard import shard
from .ops._tiles import EPSILON
from .ops.sample import local_target

Margin: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_DEFAULT_MARGIN = CosFace(0.4)
# As in InsightFace. Centres are used at unit length, so this sets how far a step of given size turns them.
_INIT_STD = 0.01
# Classes that share one seed: initial values are drawn in whole blocks, so that they do not depend on where shards end.
_INIT_BLOCK = 1024


class PartialFC(nn.Module):
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
        if not isinstance(scale, Tensor) and not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")

        self.embedding_dim = embedding_dim
        self.num_classes = num_classes
        # A head of its own copy: a schedule that changes one head's margin must not change another's.
        self.margin = copy.copy(margin) if margin is _DEFAULT_MARGIN else margin
        self.sample_rate = sample_rate
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.sparse_grad = sparse_grad
        self.uneven_batches = uneven_batches
        if isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

        self.group = _group.resolve(group)
        self.class_start, self.num_local_classes = shard(num_classes, self.group.size, self.group.rank)
        self.num_sampled = None if sample_rate == 1 else int(sample_rate * self.num_local_classes)
        self.weight = nn.Parameter(torch.empty(self.num_local_classes, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()
        self._register_hooks()

    def _register_hooks(self) -> None:
        if self.sparse_grad and self.weight.requires_grad:
            keep_coalesced(self.weight)
        if self.group.size > 1:
            _ddp.guard_shards(PartialFC)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register_hooks()  # copies and unpickled heads lose them

    def extra_repr(self) -> str:
        scale = "tensor" if isinstance(self.scale, Tensor) else self.scale
        return (
            f"embedding_dim={self.embedding_dim}, num_classes={self.num_classes}, scale={scale}, "
            f"sample_rate={self.sample_rate}, rank {self.group.rank} of {self.group.size}: "
            f"classes {self.class_start} … {self.class_start + self.num_local_classes - 1}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws `weight` anew: normal, a function of torch's default seed and the class id, not of the group's size."""
        key = torch.randint(2**62, ())
        if self.weight.is_meta:
            return
        stop = self.class_start + self.num_local_classes
        first_block = self.class_start // _INIT_BLOCK
        blocks = torch.arange(first_block, -(-stop // _INIT_BLOCK))
        generator = torch.Generator(self.weight.device)
        for block, seed in enumerate(random_bits(key, blocks).tolist(), start=first_block):
            values = torch.empty(_INIT_BLOCK, self.embedding_dim, device=self.weight.device)
            values.normal_(std=_INIT_STD, generator=generator.manual_seed(seed))
            start = block * _INIT_BLOCK
            low, high = max(start, self.class_start), min(start + _INIT_BLOCK, stop)
            self.weight[low - self.class_start : high - self.class_start] = values[low - start : high - start]

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
        labels = self._check_inputs(embeddings, labels)
        rows, row_labels = self._even(embeddings, labels) if self.uneven_batches else (embeddings, labels)

        x = torch.ops.pfc.gather(self._scaled(rows), *self.group)
        group_labels = torch.ops.pfc.gather(row_labels, *self.group)
        self._check_labels(group_labels)
        index, target = self.sample(group_labels, key=key)
        negative_lse, target_logit = torch.ops.pfc.sharded_lse(
            x, self.weight, index, target, True, *self.group, self.sparse_grad
        )
        if self.uneven_batches:
            negative_lse, target_logit = negative_lse[: len(labels)], target_logit[: len(labels)]

        cosine = target_logit / self.scale
        margined = cosine if self.margin is None else self.margin(cosine, embeddings, labels)
        loss = F.softplus(negative_lse - self.scale * margined)
        loss = torch.where(labels != self.ignore_index, loss, 0)
        return self._reduce(loss, group_labels)

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

    def _scaled(self, embeddings: Tensor) -> Tensor:
        """s·x̂ in the dtype of the matmul; computed in float32, where squares of half precision cannot overflow."""
        device_type, dtype = embeddings.device.type, embeddings.dtype
        if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        wide = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        # A row of zeros has no direction: it stays zero, and so does its gradient, which would be g / ε otherwise.
        direction = wide / length.masked_fill(length <= EPSILON, torch.inf)
        return (self.scale * direction).to(dtype)

    def _reduce(self, loss: Tensor, group_labels: Tensor) -> Tensor:
        """`[B]` of this rank to the group's value. Every rank adds the same W numbers in the same order."""
        if self.reduction == "none":
            return loss
        total = torch.ops.pfc.gather(loss.sum().reshape(1), *self.group).sum()
        if self.reduction == "sum":
            return total
        return total / (group_labels != self.ignore_index).sum().clamp_min(1)

    def _even(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Pads with ignored rows up to the largest batch of the group."""
        own = torch.tensor([len(labels)], device=labels.device)
        largest = int(torch.ops.pfc.gather(own, *self.group).max())
        missing = largest - len(labels)
        return F.pad(embeddings, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=self.ignore_index)

    def _check_inputs(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Returns the labels as `[B]` int64."""
        if embeddings.dim() != 2 or embeddings.shape[1] != self.embedding_dim:
            raise ValueError(f"embeddings must be [B, {self.embedding_dim}], got {list(embeddings.shape)}")
        if not embeddings.is_floating_point():
            raise TypeError(f"embeddings must be floating point, got {embeddings.dtype}")
        if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
            raise TypeError(f"labels must be integers, got {labels.dtype}")
        rows = embeddings.shape[0]
        if labels.shape != (rows,) and labels.shape != (rows, 1):
            raise ValueError(f"labels must be [{rows}] or [{rows}, 1], as embeddings' rows, got {list(labels.shape)}")
        expected = (self.num_local_classes, self.embedding_dim)
        if self.weight.shape != expected:
            raise ValueError(
                f"weight must be this rank's shard {list(expected)} of the {self.num_classes} classes "
                f"(classes {self.class_start} … {self.class_start + self.num_local_classes - 1}), "
                f"got {list(self.weight.shape)}"
            )
        return labels.reshape(-1).long()

    def _check_labels(self, group_labels: Tensor) -> None:
        """Raises on every rank alike: each sees the labels of all. An assertion in the graph, so no sync."""
        valid = (group_labels >= 0) & (group_labels < self.num_classes) | (group_labels == self.ignore_index)
        rule = f"labels must lie in [0, {self.num_classes}) or equal ignore_index={self.ignore_index}"
        if not torch.compiler.is_compiling() and group_labels.device.type == "cpu" and not valid.all():
            raise RuntimeError(f"{rule}, got {group_labels[~valid].unique().tolist()}")
        torch._assert_async(valid.all(), rule)
