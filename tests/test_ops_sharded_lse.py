"""pfc::sharded_lse on one rank: values, gradients, tiles, padding. Across ranks: test_adjoint.py."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators
from torch_pfc import reference

from .inputs import IGNORE, random_batch
from .ranks import run_ranks
from .test_ops_gather import ALONE, world
from .tiles import tiles_of

sharded_lse = torch.ops.pfc.sharded_lse


def draw(labels: Tensor, num_classes: int, num_sampled: int | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """index, target, and the mask `[C]` of the classes that take part; None samples nothing."""
    if num_sampled is None:
        return None, torch.where(labels == IGNORE, -1, labels), torch.ones(num_classes, dtype=torch.bool)
    index, target = torch.ops.pfc.sample(labels, torch.tensor(3), 0, num_classes, num_sampled, IGNORE)
    mask = torch.zeros(2 * num_classes, dtype=torch.bool).index_fill(0, index, True)[:num_classes]
    return index, target, mask


@given(
    num_rows=st.integers(1, 9),
    num_classes=st.integers(2, 12),
    rate=st.sampled_from([None, 0.0, 0.3, 1.0]),
    normalize=st.booleans(),
    sparse_grad=st.booleans(),
    tile_elements=st.sampled_from([1, 20, 1 << 20]),
    num_ignored=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_dense_form(
    num_rows: int,
    num_classes: int,
    rate: float | None,
    normalize: bool,
    sparse_grad: bool,
    tile_elements: int,
    num_ignored: int,
    seed: int,
) -> None:
    batch = random_batch(num_rows, num_classes, 3, scale=1.0, seed=seed)
    labels = batch.labels.clone()
    labels[:num_ignored] = IGNORE
    index, target, mask = draw(labels, num_classes, None if rate is None else int(rate * num_classes))
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    expected = reference.negative_lse_and_target(x, w, labels, sampled=mask, normalize=normalize)
    with tiles_of(tile_elements):
        outputs = sharded_lse(x, w, index, target, normalize, *ALONE, sparse_grad)
        # A row with no other class in the set has lse -inf: softplus gives its loss, 0, and the gradient 0.
        finite = outputs[0].isfinite()
        cotangents = torch.randn(2, num_rows, dtype=torch.float64)
        cotangents[0].masked_fill_(~finite, 0)
        found = torch.autograd.grad(outputs, (x, w), tuple(cotangents))
    torch.testing.assert_close(outputs, expected)
    dense = (torch.where(finite, expected[0], 0) * cotangents[0] + expected[1] * cotangents[1]).sum()
    torch.testing.assert_close((found[0], found[1].to_dense()), torch.autograd.grad(dense, (x, w)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_outputs_and_gradients(dtype: torch.dtype) -> None:
    """The matmul rounds its inputs; outputs are float32 and gradients come in their inputs' dtypes."""
    batch = random_batch(8, 30, 16, scale=1.0, seed=1)
    target = batch.labels
    x, w = batch.embeddings.to(dtype).requires_grad_(), batch.weight.float().requires_grad_()
    outputs = sharded_lse(x, w, None, target, True, *ALONE)
    exact = reference.negative_lse_and_target(x, w, target)
    cotangents = (torch.rand(8), torch.rand(8))
    found = torch.autograd.grad(outputs, (x, w), cotangents)
    expected = torch.autograd.grad(exact, (x, w), cotangents)
    assert [t.dtype for t in (*outputs, *found)] == [torch.float32, torch.float32, dtype, torch.float32]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for value, right in zip((*outputs, *found), (*exact, *expected), strict=True):
        assert (value.double() - right).norm() <= tolerance * right.double().norm()


def test_outputs_alias_no_input_and_change_none() -> None:
    """PB-31: one rank, all classes."""
    batch = random_batch(4, 6, 3, scale=1.0, seed=2)
    inputs = (batch.embeddings, batch.weight, batch.labels)
    before = [t.clone() for t in inputs]
    outputs = (
        *sharded_lse(inputs[0], inputs[1], None, inputs[2], False, *ALONE),
        torch.ops.pfc.gather(inputs[0], *ALONE),
    )
    owners = {t.untyped_storage().data_ptr() for t in inputs}
    assert all(t.untyped_storage().data_ptr() not in owners for t in outputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_a_backward_can_be_repeated() -> None:
    batch = random_batch(4, 6, 3, scale=1.0, seed=3)
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    loss = sum(t.sum() for t in sharded_lse(x, w, None, batch.labels, True, *ALONE))
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), first, rtol=0, atol=0)


def test_extreme_logits_give_no_inf_or_nan() -> None:
    x = torch.tensor([[3e4, 0.0], [-3e4, 0.0]], requires_grad=True)
    w = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    lse, logit = sharded_lse(x, w, None, torch.tensor([0, 0]), True, *ALONE)
    torch.testing.assert_close(torch.stack([lse, logit]).detach(), torch.tensor([[0.0, 3e4], [3e4, -3e4]]))
    gradients = torch.autograd.grad(torch.nn.functional.softplus(lse - logit).sum(), (x, w))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("num_classes", [0, 1])
def test_no_other_class_is_minus_infinity(num_classes: int) -> None:
    """An empty shard, and a shard that holds the target alone."""
    x = torch.ones(2, 3, requires_grad=True)
    w = torch.ones(num_classes, 3, requires_grad=True)
    lse, logit = sharded_lse(x, w, None, torch.full((2,), num_classes - 1), False, *ALONE)
    assert lse.tolist() == [-math.inf] * 2 and logit.tolist() == [3.0 * num_classes] * 2
    gradients = torch.autograd.grad(torch.nn.functional.softplus(lse - logit).sum(), (x, w))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("num_sampled", [0, 2, 6])
def test_sparse_gradient_has_one_row_for_each_entry_of_index(num_sampled: int) -> None:
    """Padding rows are -0.0: the identity of addition, so accumulating them changes no other row."""
    labels = torch.tensor([5, 1, 5])
    w = torch.randn(9, 4, requires_grad=True)
    index, target, mask = draw(labels, 9, num_sampled)
    assert index is not None
    lse, logit = sharded_lse(torch.randn(3, 4), w, index, target, True, *ALONE, True)
    (grad,) = torch.autograd.grad((lse - logit).sum(), w)
    rows, values = grad.indices()[0], grad.values()
    assert grad.shape == (9, 4) and grad.is_coalesced() and len(rows) == len(index)
    assert (rows.diff() > 0).all()
    is_padding = ~mask[rows]
    assert int(is_padding.sum()) == max(0, len(index) - max(num_sampled, 2))
    assert (values[is_padding] == 0).all() and values[is_padding].signbit().all()
    assert values[~is_padding].abs().sum(1).gt(0).all()


@pytest.mark.parametrize("num_sampled", [None, 2])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck(num_sampled: int | None, normalize: bool) -> None:
    batch = random_batch(4, 7, 3, scale=1.0, seed=4)
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    index, target, _ = draw(batch.labels, 7, num_sampled)
    assert torch.autograd.gradcheck(lambda x, w: sharded_lse(x, w, index, target, normalize, *ALONE), (x, w))


def test_a_second_derivative_is_refused() -> None:
    """Better than one that is wrong."""
    batch = random_batch(4, 7, 3, scale=1.0, seed=4)
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    lse, _ = sharded_lse(x, w, None, batch.labels, True, *ALONE)
    (grad,) = torch.autograd.grad(lse.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def check_operator(group: tuple[str, int, int] | None = None) -> None:
    """Rates 1 and 0.2, one row and eight, an empty shard, both gradients' layouts."""
    group = group or world()
    for num_rows, num_classes in [(1, 10), (8, 10), (8, 0)]:
        labels = torch.arange(num_rows * group[1]) if num_classes else torch.full((num_rows * group[1],), IGNORE)
        w = torch.randn(num_classes, 4, requires_grad=True)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(len(labels), 4).to(dtype).requires_grad_()
            for index, target, _ in (draw(labels % 10, num_classes, None), draw(labels, num_classes, num_classes // 5)):
                torch.library.opcheck(sharded_lse.default, (x, w, index, target, True, *group))
                torch.library.opcheck(sharded_lse.default, (x, w, index, target, True, *group, True))
            for sparse_grad in (False, True):
                terms = (torch.randn(len(labels), 3), 1 / group[1], True, True, sparse_grad)
                backward = (x.detach(), w.detach(), index, target, True, *terms)
                torch.library.opcheck(torch.ops.pfc.sharded_lse_backward.default, backward)


def test_opcheck_alone() -> None:
    """PB-32."""
    check_operator(ALONE)


def test_opcheck_on_two_ranks() -> None:
    """PB-32."""
    run_ranks(2, check_operator)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, w, target = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.long)
    for arguments, says in [
        ((torch.ones(4, 2), w, None, target), r"\[4, 2\] and \[5, 3\]"),
        ((x, w, None, target[:3]), r"\[3\]"),
        ((x, w, torch.zeros(2, 2, dtype=torch.long), target), r"\[2, 2\]"),
    ]:
        with pytest.raises(ValueError, match=says):
            sharded_lse(*arguments, True, *ALONE)
