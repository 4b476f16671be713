"""pfc::sparse_adamw_: its arithmetic is torch.optim.AdamW's, to the bit."""

import pytest
import torch
from torch import Tensor

from torch_pfc.ops.sparse_adamw import sparse_adamw_

from .tiles import tiles_of


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("weight_decay, maximize", [(0.0, False), (0.1, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("named", [True, False])
def test_all_rows_give_torchs_bits(
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool,
    dtype: torch.dtype,
    named: bool,
) -> None:
    reference = torch.nn.Parameter(torch.randn(37, 5).to(dtype))
    dense = torch.optim.AdamW([reference], lr, betas, 1e-6, weight_decay, maximize=maximize, foreach=False)
    param = reference.detach().clone()
    exp_avg, exp_avg_sq, step = torch.zeros_like(param), torch.zeros_like(param), torch.tensor(0.0)
    rows = torch.arange(37) if named else None
    lr = torch.as_tensor(lr, dtype=lr.dtype if isinstance(lr, Tensor) else torch.float64)
    with tiles_of(50):
        for _ in range(4):
            reference.grad = grad = torch.randn(37, 5).to(dtype)
            dense.step()
            sparse_adamw_(param, exp_avg, exp_avg_sq, step, rows, grad, lr, *betas, 1e-6, weight_decay, maximize)
    state = dense.state[reference]
    assert torch.equal(param, reference)
    assert torch.equal(exp_avg, state["exp_avg"]) and torch.equal(exp_avg_sq, state["exp_avg_sq"])
    assert step == state["step"] == 4


@pytest.mark.parametrize("named", [True, False])
def test_opcheck(named: bool) -> None:
    """PB-32; with an empty shard, too."""
    for num_rows in (6, 0):
        param = torch.randn(num_rows, 4)
        rows = torch.arange(0, num_rows, 2) if named else None
        grad = torch.randn(num_rows if rows is None else len(rows), 4)
        state = (torch.zeros_like(param), torch.zeros_like(param), torch.tensor(1.0))
        arguments = (param, *state, rows, grad, torch.tensor(0.1), 0.9, 0.99, 1e-8, 0.01, False)
        torch.library.opcheck(torch.ops.pfc.sparse_adamw_.default, arguments)
