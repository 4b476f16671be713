"""Compiled steps with sparse gradients: the same as eager ones, whatever changes between them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.optim import Optimizer

import torch_pfc
from torch_pfc.optim import SparseAdamW, SparseSGD

from .ranks import run_ranks

STEPS = 12  # more than Dynamo recompiles a function for
OPTIMIZERS = [(SparseSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), (SparseAdamW, {"lr": 0.01})]


def train(
    make: Callable[..., Optimizer], options: dict[str, Any], backend: str | None, whole: bool, tensor_lr: bool
) -> tuple[list[Tensor], list[int]]:
    """Final parameters, and how many graphs there were after each step: of a compiled optimizer or of all of a step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backbone = nn.Linear(5, 8)
    head = torch_pfc.PartialFC(8, 40, scale=16.0, sample_rate=0.3, sparse_grad=True)
    parameters = [*backbone.parameters(), head.weight]
    optimizer = make(parameters, **options | ({"lr": torch.tensor(options["lr"])} if tensor_lr else {}))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend or "eager")
    update = torch.compile(optimizer.step, backend=counter) if backend and not whole else optimizer.step

    def step(features: Tensor, labels: Tensor, key: Tensor) -> None:
        head(backbone(features), labels, key=key).backward()
        update()
        optimizer.zero_grad()

    if backend and whole:
        step = torch.compile(step, backend=counter)
    counts = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + head.group.rank)
        labels = torch.randint(40, (6,), generator=generator)
        step(torch.randn(6, 5, generator=generator), labels, torch.tensor(number))
        scheduler.step()
        counts.append(counter.frame_count)
    return [p.detach() for p in parameters], counts


@pytest.mark.parametrize("make, options", OPTIMIZERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("whole", [False, True], ids=["optimizer", "whole"])
def test_compiled_steps_equal_eager_ones(
    make: Callable[..., Optimizer], options: dict[str, Any], tensor_lr: bool, backend: str, whole: bool
) -> None:
    """And a learning rate that changes at every step, a number or a tensor, compiles nothing anew."""
    eager = run_ranks(2, train, make, options, None, whole, tensor_lr)
    compiled = run_ranks(2, train, make, options, backend, whole, tensor_lr, timeout=240)
    for (expected, _), (found, counts) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(found, expected)
        assert counts == counts[:1] * STEPS
        assert (counts[0] > 0) == whole
