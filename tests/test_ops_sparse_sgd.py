"""pfc::sparse_sgd_: its arithmetic is torch.optim.SGD's, to the bit."""

import pytest
import torch
from torch import Tensor

from torch_pfc.ops.sparse_sgd import sparse_sgd_

from .tiles import tiles_of

# momentum, dampening, weight_decay, nesterov, maximize
OPTIONS = [
    (0.0, 0.0, 0.0, False, False),
    (0.0, 0.0, 0.1, False, True),
    (0.9, 0.0, 0.01, True, False),
    (0.9, 0.3, 0.01, False, True),
]


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("momentum, dampening, weight_decay, nesterov, maximize", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("named", [True, False])
def test_all_rows_give_torchs_bits(
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    dtype: torch.dtype,
    named: bool,
) -> None:
    """In half precision PyTorch's own bits depend on where the CPU's vectors end: width 32 keeps that the same."""
    shape = (37, 32) if dtype.itemsize == 2 else (37, 5)
    reference = torch.nn.Parameter(torch.randn(shape).to(dtype))
    dense = torch.optim.SGD(
        [reference], lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=False
    )
    param = reference.detach().clone()
    buffer = torch.full_like(param, torch.nan) if momentum else None  # the first step must not read it
    rows = torch.arange(37) if named else None
    lr = torch.as_tensor(lr, dtype=lr.dtype if isinstance(lr, Tensor) else torch.float64)
    with tiles_of(10 * shape[1]):
        for step in range(4):
            reference.grad = grad = torch.randn(shape).to(dtype)
            dense.step()
            sparse_sgd_(param, buffer, rows, grad, lr, momentum, dampening, weight_decay, nesterov, maximize, step == 0)
    assert torch.equal(param, reference)
    if buffer is not None:
        assert torch.equal(buffer, dense.state[reference]["momentum_buffer"])


def test_a_row_that_is_named_first_at_a_later_step_is_dampened() -> None:
    param, buffer = torch.zeros(2, 1), torch.zeros(2, 1)
    lr, one = torch.tensor(1.0), torch.ones(1, 1)
    sparse_sgd_(param, buffer, torch.tensor([0]), one, lr, 0.5, 0.75, 0.0, False, False, True)
    sparse_sgd_(param, buffer, torch.tensor([1]), one, lr, 0.5, 0.75, 0.0, False, False, False)
    assert buffer.tolist() == [[1.0], [0.25]] and param.tolist() == [[-1.0], [-0.25]]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_opcheck(named: bool, momentum: float) -> None:
    """PB-32; with an empty shard, too."""
    for num_rows in (6, 0):
        param = torch.randn(num_rows, 4)
        rows = torch.arange(0, num_rows, 2) if named else None
        grad = torch.randn(num_rows if rows is None else len(rows), 4)
        buffer = torch.zeros_like(param) if momentum else None
        arguments = (param, buffer, rows, grad, torch.tensor(0.1), momentum, 0.0, 0.01, False, False, False)
        torch.library.opcheck(torch.ops.pfc.sparse_sgd_.default, arguments)
