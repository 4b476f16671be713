"""Compiled steps of a fused head: one graph, the eager steps' values, and the same refusals."""

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import torch_pfc
from torch_pfc.optim import SparseAdamW, SparseSGD

from .ranks import run_ranks

RULES: list[tuple[Any, dict[str, Any]]] = [
    (SparseSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (SparseAdamW, {"lr": 0.01}),
]


def train(
    make: Any, options: dict[str, Any], backend: str | None, whole: bool, init_scale: float | None
) -> tuple[list[Tensor], int]:
    """Final weight and state after a few steps with a schedule of a tensor, and the number of graphs."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backbone = torch.nn.Linear(5, 8)
    head = torch_pfc.PartialFC(8, 40, scale=16.0, sample_rate=0.3, saved_logits_bytes=300)
    where = head.weight.data_ptr()
    scaler = None if init_scale is None else torch_pfc.GradScaler("cpu", init_scale)
    optimizer = make([head.weight], **options | {"lr": torch.tensor(options["lr"])})
    head.fuse(optimizer, scaler)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend or "eager")

    def loss_of(features: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        return head(backbone(features), labels, key=key)

    def step(features: Tensor, labels: Tensor, key: Tensor, scale: Tensor) -> None:
        (loss_of(features, labels, key) * scale).backward()

    if backend is not None and whole:
        step = torch.compile(step, backend=graphs)
    elif backend is not None:
        loss_of = torch.compile(loss_of, backend=graphs, fullgraph=True)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + head.group.rank)
        labels = torch.randint(40, (6,), generator=generator)
        scale = torch.tensor(1.0 if init_scale is None else init_scale)
        step(torch.randn(6, 5, generator=generator), labels, torch.tensor(number), scale)
        assert head.weight.grad is None and head.weight.data_ptr() == where
        optimizer.step()  # has nothing to do; the scheduler looks out for it
        scheduler.step()
    return [head.weight.detach(), *optimizer.state[head.weight].values()], graphs.frame_count


@pytest.mark.parametrize("make, options", RULES)
@pytest.mark.parametrize("init_scale", [None, 8.0])
@pytest.mark.parametrize("backend, whole", [("aot_eager", False), ("inductor", False), ("aot_eager", True)])
def test_compiled_steps_equal_eager_ones(
    make: Any, options: dict[str, Any], backend: str, whole: bool, init_scale: float | None
) -> None:
    eager, _ = train(make, options, None, whole, init_scale)
    compiled, num_graphs = train(make, options, backend, whole, init_scale)
    torch.testing.assert_close(compiled, eager)
    assert num_graphs == 1


def test_compiled_steps_on_two_ranks() -> None:
    eager = run_ranks(2, train, *RULES[0], None, False, None)
    compiled = run_ranks(2, train, *RULES[0], "aot_eager", False, None, timeout=120)
    torch.testing.assert_close([values for values, _ in compiled], [values for values, _ in eager])


@pytest.mark.parametrize("make, options", RULES)
def test_a_second_backward_is_refused(make: Any, options: dict[str, Any]) -> None:
    """Through one graph, or through that of a forward from before the step."""
    torch.compiler.reset()
    head = torch_pfc.PartialFC(8, 40, scale=16.0)
    optimizer = make([head.weight], **options)
    head.fuse(optimizer)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8, requires_grad=True)
    first, second = (compiled(x, torch.arange(4)) for _ in range(2))
    first.backward(retain_graph=True)
    after = [t.detach().clone() for t in (head.weight, *optimizer.state[head.weight].values())]
    for loss in (first, second):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert all(map(torch.equal, after, (head.weight, *optimizer.state[head.weight].values())))
