"""Who takes part: each contender is a function from the inputs that a case's contenders share to a step to be timed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

import torch_pfc

from .materialised import Materialised
from .measure import Step

SGD = TypeVar("SGD", torch.optim.SGD, torch_pfc.optim.SparseSGD)

SCALE, MARGIN = 64.0, 0.4
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4


@dataclass(frozen=True)
class Case:
    """One size.

    Attributes:
        rows: N, of the whole group.
        dim: D.
        num_classes: C, of the whole group.
        sample_rate: S / C.
        dtype: of the embeddings, and so of the matmuls' operands.
        weight_dtype: of the weight and the optimizer's state.
        momentum: of the optimizer, which keeps no state at 0.
    """

    rows: int
    dim: int
    num_classes: int
    sample_rate: float = 1.0
    dtype: str = "float32"
    weight_dtype: str = "float32"
    momentum: float = MOMENTUM

    @property
    def num_sampled(self) -> int:
        return int(self.num_classes * self.sample_rate)


class Inputs:
    """What the contenders of a case share: a weight of 2 GB is there once, and so is its momentum.

    Attributes:
        case: their size.
        embeddings: `[N, D]`, of this rank's rows.
        labels: `[N]`.
        weight: `[K, D]`, of this rank's classes.
    """

    def __init__(self, case: Case, world_size: int = 1, storage: tuple[Tensor, Tensor] | None = None) -> None:
        """`storage`: flat tensors, the first elements of which become the weight and the momentum."""
        torch.manual_seed(0)
        self.case = case
        num_rows, shape = case.rows // world_size, (case.num_classes // world_size, case.dim)
        self.embeddings = torch.randn(num_rows, case.dim).to(getattr(torch, case.dtype))
        self.labels = torch.randint(case.num_classes, (num_rows,))
        self._momentum: Tensor | None = None
        if storage is None:
            # A thousand centres over and over: ten million would take minutes to draw, and cost a step the same.
            centres = torch.randn(1024, case.dim).mul_(0.01).to(getattr(torch, case.weight_dtype))
            self.weight = centres[torch.arange(shape[0]) % len(centres)]
        else:
            self.weight, self._momentum = (flat[: shape[0] * shape[1]].view(shape) for flat in storage)

    @property
    def momentum(self) -> Tensor:
        """`[K, D]`, made at first use: the loss alone needs none."""
        if self._momentum is None:
            self._momentum = torch.zeros_like(self.weight)
        return self._momentum


def materialised(inputs: Inputs) -> Materialised:
    return Materialised(inputs.weight, inputs.case.num_sampled, SCALE, MARGIN)


def partial_fc(inputs: Inputs, saved_logits_bytes: int = 0) -> torch_pfc.PartialFC:
    """A head around the inputs' weight."""
    head = torch_pfc.PartialFC(
        inputs.case.dim,
        inputs.case.num_classes,
        margin=torch_pfc.CosFace(MARGIN),
        scale=SCALE,
        sample_rate=inputs.case.sample_rate,
        sparse_grad=True,
        saved_logits_bytes=saved_logits_bytes,
        device="meta",
    )
    head.weight = nn.Parameter(inputs.weight)
    return head


def three_matmuls(inputs: Inputs, dtype: torch.dtype | None = None) -> Step:
    """Logits and both gradients: what any exact method multiplies. Results are allocated anew, as in any step."""
    embeddings = inputs.embeddings.to(dtype or inputs.embeddings.dtype)
    centres = inputs.weight[: inputs.case.num_sampled].to(embeddings.dtype)

    def step() -> None:
        logits = centres @ embeddings.T
        embeddings_grad = logits.T @ centres
        weight_grad = logits @ embeddings
        del logits, embeddings_grad, weight_grad

    return step


def forward_backward(inputs: Inputs, weight: Tensor, loss_of: Callable[..., Tensor]) -> Step:
    """The loss and both gradients."""
    embeddings = inputs.embeddings.clone().requires_grad_()

    def step() -> Tensor:
        loss = loss_of(embeddings, inputs.labels)
        loss.backward()
        embeddings.grad = weight.grad = None
        return loss.detach()

    return step


def whole_step(
    inputs: Inputs, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor], update: Callable[[], object]
) -> Step:
    """Forward, backward and `update`."""
    embeddings = inputs.embeddings.clone().requires_grad_()

    def step() -> Tensor:
        loss = loss_of(embeddings, inputs.labels)
        loss.backward()
        update()
        embeddings.grad = None
        optimizer.zero_grad()
        return loss.detach()

    return step


def sgd(kind: Callable[..., SGD], weight: Tensor, inputs: Inputs) -> SGD:
    """torch.optim's or torch_pfc's SGD on the inputs' momentum."""
    optimizer = kind([weight], lr=LR, momentum=inputs.case.momentum, weight_decay=WEIGHT_DECAY)
    if inputs.case.momentum != 0:
        optimizer.state[weight]["momentum_buffer"] = inputs.momentum
    return optimizer


def materialised_loss(inputs: Inputs, compiled: bool) -> Step:
    head = materialised(inputs)
    return forward_backward(inputs, head.weight, torch.compile(head, dynamic=False) if compiled else head)


def partial_fc_loss(inputs: Inputs, logits_kept: bool = False) -> Step:
    logits_bytes = 4 * inputs.case.rows * inputs.case.num_sampled if logits_kept else 0
    head = partial_fc(inputs, saved_logits_bytes=logits_bytes)
    return forward_backward(inputs, head.weight, head)


def materialised_step(inputs: Inputs, compiled: bool) -> Step:
    head = materialised(inputs)
    optimizer = sgd(torch.optim.SGD, head.weight, inputs)
    if not compiled:
        return whole_step(inputs, optimizer, head, optimizer.step)
    torch._logging.set_logs(dynamo=logging.ERROR)  # it warns of the profiler's hook in every optimizer's step
    compile_ = functools.partial(torch.compile, dynamic=False)
    return whole_step(inputs, optimizer, compile_(head), compile_(optimizer.step))


def partial_fc_step(inputs: Inputs) -> Step:
    head = partial_fc(inputs)
    optimizer = sgd(torch_pfc.optim.SparseSGD, head.weight, inputs)
    return whole_step(inputs, optimizer, head, optimizer.step)


def fused_step(inputs: Inputs, saved_logits_bytes: int = 0) -> Step:
    """The optimizer's update happens in the backward."""
    head = partial_fc(inputs, saved_logits_bytes)
    optimizer = sgd(torch_pfc.optim.SparseSGD, head.weight, inputs)
    head.fuse(optimizer)
    return whole_step(inputs, optimizer, head, lambda: None)


def sample_only(inputs: Inputs) -> Step:
    head = partial_fc(inputs)
    return lambda: head.sample(inputs.labels)


FLOOR, FLOAT_FLOOR = "three matmuls", "three matmuls, float32"
FLOORS = (FLOOR, FLOAT_FLOOR)
OURS, FUSED = "torch_pfc", "torch_pfc, fused"
SAMPLE = "pfc::sample"

Contenders = dict[str, Callable[[Inputs], Step]]
LOSS: Contenders = {
    FLOOR: three_matmuls,
    FLOAT_FLOOR: functools.partial(three_matmuls, dtype=torch.float32),
    "materialised, eager": functools.partial(materialised_loss, compiled=False),
    "materialised, compiled": functools.partial(materialised_loss, compiled=True),
    OURS: partial_fc_loss,
    "torch_pfc, logits kept": functools.partial(partial_fc_loss, logits_kept=True),
}
STEP: Contenders = {
    "materialised, eager": functools.partial(materialised_step, compiled=False),
    "materialised, compiled": functools.partial(materialised_step, compiled=True),
    OURS: partial_fc_step,
    FUSED: fused_step,
    "torch_pfc, fused, 32 MB of logits": functools.partial(fused_step, saved_logits_bytes=32 << 20),
    "torch_pfc, fused, logits kept": functools.partial(fused_step, saved_logits_bytes=1 << 30),
}
SAMPLING: Contenders = {SAMPLE: sample_only, FUSED: fused_step}
