"""pfc::gather: every rank's rows on every rank; its backward sums what all ranks did with them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators

from .inputs import error_of
from .ranks import run_ranks

ALONE = ("", 1, 0)


def world() -> tuple[str, int, int]:
    """The three plain values by which an operator knows the default group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank()


def gather(rows: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    mine = (rows + 10 * dist.get_rank()).requires_grad_()
    output = torch.ops.pfc.gather(mine, *(world() if dist.get_world_size() > 1 else ALONE))
    (grad,) = torch.autograd.grad(output, mine, (1 + dist.get_rank()) * cotangent)
    return output.detach(), grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (3,), (0, 2)], ids=str)
def test_rows_in_rank_order_and_gradients_summed(world_size: int, shape: tuple[int, ...]) -> None:
    rows = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = torch.cat([rows + 10 * rank for rank in range(world_size)])
    cotangent = torch.randn_like(expected)
    for rank, (output, grad) in enumerate(run_ranks(world_size, gather, rows, cotangent)):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        total = cotangent * sum(range(1, world_size + 1))
        torch.testing.assert_close(grad, total.split(shape[0])[rank] if shape[0] else torch.zeros(shape))


def check_operator(group: tuple[str, int, int] | None = None) -> None:
    group = group or world()
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8):
            x = torch.randn(rows, 4).to(dtype).requires_grad_()
            torch.library.opcheck(torch.ops.pfc.gather.default, (x, *group))
            torch.library.opcheck(torch.ops.pfc.gather.default, (torch.randn(4, rows).to(dtype).t(), *group))
    torch.library.opcheck(torch.ops.pfc.gather.default, (torch.arange(3), *group))


def test_opcheck_alone() -> None:
    """PB-32."""
    check_operator(ALONE)


def test_opcheck_on_two_ranks() -> None:
    """PB-32."""
    run_ranks(2, check_operator)


def test_gradcheck() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.ops.pfc.gather(x, *ALONE), (x,))


def gather_as_another_rank() -> list[tuple[str, str]]:
    name, size, rank = world()
    x = torch.ones(2, 2)
    return [
        error_of(lambda: torch.ops.pfc.gather(x, name, size, (rank + 1) % size)),
        error_of(lambda: torch.ops.pfc.gather(x, name, size + 1, rank)),
        error_of(lambda: torch.ops.pfc.gather(x, "no such group", size, rank)),
    ]


def test_a_program_built_for_another_rank_or_group_is_refused() -> None:
    for rank, (wrong_rank, wrong_size, wrong_name) in enumerate(run_ranks(2, gather_as_another_rank)):
        assert wrong_rank[0] == wrong_size[0] == wrong_name[0] == "RuntimeError"
        assert f"rank {1 - rank} of 2" in wrong_rank[1] and f"rank {rank} of 2" in wrong_rank[1]
        assert f"rank {rank} of 3" in wrong_size[1] and f"rank {rank} of 2" in wrong_size[1]
        assert "no such group" in wrong_name[1]
