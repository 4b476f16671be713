"""What pfc::sparse_sgd_ and pfc::sparse_adamw_ have in common: the walk over the rows that a gradient names."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from torch_pfc.ops.sparse_adamw import sparse_adamw_
from torch_pfc.ops.sparse_sgd import sparse_sgd_

from .tiles import tiles_of

PADDING = -0.0
LR = torch.tensor(0.1, dtype=torch.float64)
MOMENTUM = (0.9, 0.1, 0.01, False, False, False)
ADAM = (0.9, 0.99, 1e-8, 0.01, False)

Update = Callable[[Sequence[Tensor], Tensor | None, Tensor, Tensor], None]


def sgd(tensors: Sequence[Tensor], rows: Tensor | None, grad: Tensor, lr: Tensor = LR) -> None:
    sparse_sgd_(tensors[0], tensors[1], rows, grad, lr, *MOMENTUM)


def adamw(tensors: Sequence[Tensor], rows: Tensor | None, grad: Tensor, lr: Tensor = LR) -> None:
    sparse_adamw_(*tensors, torch.tensor(3.0), rows, grad, lr, *ADAM)


both = pytest.mark.parametrize("update", [sgd, adamw])


def tensors_for(update: Update, shape: Sequence[int], **options: Any) -> list[Tensor]:
    """The parameter and its state, as after some steps."""
    generator = torch.Generator().manual_seed(0)
    number = 2 if update is sgd else 3
    return [torch.rand(shape, generator=generator, dtype=torch.float64).to(**options) + 0.1 for _ in range(number)]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@both
@given(
    num_rows=st.integers(1, 12),
    row=st.sampled_from([(), (1,), (3,), (2, 2)]),
    tile_elements=st.sampled_from([1, 7, 1 << 20]),
    data=st.data(),
)
def test_named_rows_change_as_in_a_dense_update_and_no_others_do(
    update: Update, num_rows: int, row: tuple[int, ...], tile_elements: int, data: st.DataObject
) -> None:
    """Whatever the tiles are. Rows of −0.0 are named but padding."""
    named = torch.tensor(sorted(data.draw(st.sets(st.integers(0, num_rows - 1)))), dtype=torch.int64)
    is_padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(named), max_size=len(named)))).bool()
    tensors = tensors_for(update, (num_rows, *row))
    grad = torch.randn(len(named), *row, dtype=torch.float64)
    grad[is_padding] = PADDING

    expected, before = copies(tensors), copies(tensors)
    update(expected, None, torch.zeros_like(tensors[0]).index_copy(0, named, grad), LR)
    with tiles_of(tile_elements):
        update(tensors, named, grad, LR)
    changed = torch.zeros(num_rows, dtype=torch.bool).index_fill(0, named[~is_padding], True)
    for found, dense, old in zip(tensors, expected, before, strict=True):
        assert torch.equal(found[changed], dense[changed])
        assert same_bits(found[~changed], old[~changed])
        assert not torch.equal(dense, old)


@both
def test_a_zero_is_padding_in_no_row_but_one_of_minus_zeros(update: Update) -> None:
    """A row with a zero gradient decays; the only sign of padding is −0.0 throughout, and only where rows are named."""
    rows = torch.tensor([[0.0, 0.0], [0.0, PADDING], [PADDING, PADDING]], dtype=torch.float64)
    tensors = tensors_for(update, (3, 2))
    before = copies(tensors)
    update(tensors, torch.arange(3), rows, LR)
    for found, old in zip(tensors, before, strict=True):
        assert (found != old).any(dim=1).tolist() == [True, True, False]
    before = copies(tensors)
    update(tensors, None, rows, LR)
    assert all((found != old).all() for found, old in zip(tensors, before, strict=True))


@both
def test_padding_keeps_what_is_not_finite(update: Update) -> None:
    tensors = tensors_for(update, (2, 3))
    for tensor in tensors:
        tensor[0] = torch.tensor([PADDING, torch.nan, torch.inf])
    update(tensors, torch.arange(2), torch.tensor([[PADDING] * 3, [1.0] * 3], dtype=torch.float64), LR)
    for tensor in tensors:
        assert tensor[0].signbit()[0] and tensor[0].isnan().tolist() == [False, True, False]
        assert tensor[0, 2] == torch.inf and tensor[1].isfinite().all()


@both
@pytest.mark.parametrize("shape", [(), (5,), (6, 3), (4, 3, 2), (0, 3), (3, 0)], ids=str)
def test_parameters_of_any_shape_and_strides(update: Update, shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape, dtype=torch.float64)
    plain = tensors_for(update, shape)
    strided = [tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone() for tensor in plain]
    named = copies(strided)
    with tiles_of(4):
        update(plain, None, grad, LR)
        update(strided, None, grad.mT.contiguous().mT if grad.dim() > 1 else grad, LR)
        if shape:
            update(named, torch.arange(shape[0]), grad, LR)
    for a, b in zip(strided, plain, strict=True):
        assert torch.equal(a, b)
    if shape:
        assert all(torch.equal(a, b) for a, b in zip(named, plain, strict=True))


@both
def test_shapes_that_do_not_fit_are_named(update: Update) -> None:
    tensors = tensors_for(update, (5, 3))
    rows, grad = torch.arange(2), torch.ones(2, 3, dtype=torch.float64)
    for arguments, says in [
        (([tensors[0], *(t[:4] for t in tensors[1:])], rows, grad, LR), r"\[5, 3\], got \[4, 3\]"),
        ((tensors, rows.unsqueeze(0), grad, LR), r"rows must be \[S\], got \[1, 2\]"),
        ((tensors, rows, grad[:, :2], LR), r"\[2, 3\] for param \[5, 3\], got \[2, 2\]"),
        ((tensors, None, grad, LR), r"\[5, 3\] for param \[5, 3\], got \[2, 3\]"),
        ((tensors, rows, grad, LR.unsqueeze(0)), r"lr must be a scalar tensor, got \[1\]"),
    ]:
        with pytest.raises(ValueError, match=says):
            update(*arguments)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("lr_on_device", [True, False])
def test_no_kernel_waits_for_the_device(named: bool, lr_on_device: bool) -> None:
    """The meta device in place of an accelerator: it has no values to wait for, and raises if it is asked for one."""
    rows = torch.arange(4, device="meta") if named else None
    param, *state = [torch.empty(4, 3, device="meta") for _ in range(3)]
    grad, lr = torch.empty(4, 3, device="meta"), torch.tensor(0.1, device="meta" if lr_on_device else "cpu")
    for nesterov, first in [(False, True), (True, False)]:
        sparse_sgd_._init_fn(param, state[0], rows, grad, lr, 0.9, 0.0, 0.01, nesterov, True, first)
    step = torch.tensor(0.0)
    sparse_adamw_._init_fn(param, *state, step, rows, grad, lr, 0.9, 0.99, 1e-8, 0.01, True)
    assert step == 1


@pytest.mark.cuda
@both
def test_on_cuda(update: Update) -> None:
    """The same values, with a learning rate on the host and on the device, and no sync."""
    tensors = tensors_for(update, (6, 3))
    rows, grad = torch.tensor([0, 2, 5]), torch.randn(3, 3, dtype=torch.float64)
    grad[1] = PADDING
    on_device = [[t.cuda() for t in tensors] for _ in range(2)]
    moved = (rows.cuda(), grad.cuda())
    update(tensors, rows, grad, LR)
    rates = (LR, LR.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for found, lr in zip(on_device, rates, strict=True):
            update(found, *moved, lr)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in on_device:
        torch.testing.assert_close([t.cpu() for t in found], tensors)


@both
@pytest.mark.parametrize("named", [True, False])
def test_a_compiled_update_copies_nothing(update: Update, named: bool) -> None:
    """Inductor calls the operator on the parameter and its state themselves."""
    tensors = tensors_for(update, (50, 3))
    rows = torch.arange(0, 50, 2) if named else None
    grad = torch.randn(25 if named else 50, 3, dtype=torch.float64)
    expected = copies(tensors)
    update(expected, rows, 2 * grad, LR)

    def step(tensors: list[Tensor], rows: Tensor | None, grad: Tensor, lr: Tensor) -> None:
        update(tensors, rows, 2 * grad, lr)

    torch.compiler.reset()
    _, sources = run_and_get_code(torch.compile(step, fullgraph=True), tensors, rows, grad, LR)
    (source,) = sources
    assert source.count("torch.ops.pfc.sparse_") == 1
    assert "clone" not in source and "copy_" not in source
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
