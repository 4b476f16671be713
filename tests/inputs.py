"""Small inputs with known right values, and one step of a head on one rank's part of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_pfc

from .ranks import run_ranks

IGNORE = -100
COSFACE: dict[str, Any] = {"margin": torch_pfc.CosFace(0.35)}
# Loss, |gX| and |gW| of S1 under it.
S1_COSFACE = (15.866523600, 4.773160049, 7.254128149)


@dataclass
class Batch:
    """All ranks' rows and classes: embeddings `[N, D]`, weight `[C, D]`, labels `[N]`, and the scale of the logits."""

    embeddings: Tensor
    weight: Tensor
    labels: Tensor
    scale: float


@dataclass
class Step:
    """What a head gave: its loss, and the gradients of its embeddings and weight."""

    loss: Tensor
    embeddings_grad: Tensor
    weight_grad: Tensor


def s1() -> Batch:
    """Ten classes, eight rows, no structure: the input whose losses and gradient norms are known to ten digits."""
    row, column = torch.arange(10.0, dtype=torch.float64)[:, None], torch.arange(4.0, dtype=torch.float64)
    return Batch(
        embeddings=torch.cos(0.5 + 3 * row[:8] + column),
        weight=torch.sin(1 + row + 2 * column),
        labels=7 * torch.arange(8) % 10,
        scale=16.0,
    )


def on_axes(num_classes: int, labels: Sequence[int], scale: float = 4.0) -> Batch:
    """`W = I`, `x = e_label`: each row's loss is `log(1 + (C - 1) exp(-scale))`."""
    axes = torch.eye(num_classes, dtype=torch.float64)
    return Batch(axes[list(labels)], axes, torch.tensor(labels), scale)


def random_batch(num_rows: int, num_classes: int, dim: int, *, scale: float, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        embeddings=torch.randn(num_rows, dim, generator=generator, dtype=torch.float64),
        weight=torch.randn(num_classes, dim, generator=generator, dtype=torch.float64),
        labels=torch.randint(num_classes, (num_rows,), generator=generator),
        scale=scale,
    )


def relative_error(value: Tensor, expected: Tensor) -> float:
    """`|value - expected| / |expected|`, by Frobenius norms."""
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def even(num_rows: int, world_size: int) -> list[int]:
    """How many rows each rank has, as even as it goes, in order."""
    return [len(range(rank, num_rows, world_size)) for rank in range(world_size)]


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def my_rows(tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's rows of a tensor that holds all ranks'."""
    return tensor.split(list(counts))[group_rank(group)]


def make_head(batch: Batch, dtype: torch.dtype = torch.float64, **options: Any) -> torch_pfc.PartialFC:
    """A head that holds its shard of `batch.weight`."""
    num_classes, dim = batch.weight.shape
    head = torch_pfc.PartialFC(dim, num_classes, scale=batch.scale, dtype=dtype, **options)
    with torch.no_grad():
        head.weight.copy_(batch.weight[head.class_start :][: head.num_local_classes])
    return head


def head_step(
    batch: Batch,
    counts: Sequence[int],
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    objective: Callable[[Tensor], Tensor] = torch.sum,
    key: int | None = None,
    **options: Any,
) -> Step:
    """Forward and backward of a fresh head on this rank's rows; a job for `run_ranks`."""
    head = make_head(batch, weight_dtype or dtype, **options)
    group = options.get("group")
    embeddings = my_rows(batch.embeddings, counts, group).to(dtype).requires_grad_()
    loss = head(embeddings, my_rows(batch.labels, counts, group), key=None if key is None else torch.tensor(key))
    objective(loss).backward()
    assert embeddings.grad is not None and head.weight.grad is not None
    return Step(loss.detach(), embeddings.grad, head.weight.grad)


def run_head(
    world_size: int, batch: Batch, *, counts: Sequence[int] | None = None, options: dict[str, Any], **arguments: Any
) -> Step:
    """`head_step` on every rank, put together: the gradients are those of the mean over the ranks' objectives.

    A world size of 0 is this process without any process group. The loss is every rank's where reduction is "none".
    """
    arguments = arguments | options
    counts = counts if counts is not None else even(len(batch.labels), max(world_size, 1))
    if world_size == 0:
        return head_step(batch, counts, **arguments)
    steps = run_ranks(world_size, _call, head_step, (batch, counts), arguments)
    return assemble(steps, reduction=options.get("reduction", "mean"))


def assemble(steps: Sequence[Step], reduction: str = "mean") -> Step:
    """One step out of all ranks': a bare `grad(embeddings)` is W times that of the mean over ranks."""
    losses = [step.loss for step in steps]
    if reduction != "none":
        for loss in losses[1:]:
            assert torch.equal(loss, losses[0]), f"ranks disagree on the loss: {losses}"
    return Step(
        torch.cat(losses) if reduction == "none" else losses[0],
        torch.cat([step.embeddings_grad for step in steps]) / len(steps),
        torch.cat([step.weight_grad.to_dense() for step in steps]),
    )


def check_step(step: Step, loss: float, embeddings_grad: float, weight_grad: float, rtol: float = 1e-5) -> None:
    """Compares a step with the loss and the two gradient norms that are written down for it."""
    found = (float(step.loss), float(step.embeddings_grad.norm()), float(step.weight_grad.norm()))
    for name, value, right in zip(("loss", "|gX|", "|gW|"), found, (loss, embeddings_grad, weight_grad), strict=True):
        assert math.isclose(value, right, rel_tol=rtol, abs_tol=rtol), f"{name} is {value}, expected {right}"


def error_of(fn: Callable[[], Any]) -> tuple[str, str]:
    """The type's name and the message of what `fn` raises; what a rank reports of an error that is expected."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _call(fn: Callable[..., Step], positional: tuple[Any, ...], keywords: dict[str, Any]) -> Step:
    return fn(*positional, **keywords)
