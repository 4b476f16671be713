"""Rows of a head's sparse gradient that no class was scored for stay apart from scored ones, and are not updated."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import torch_pfc
from torch_pfc._padding import coalesce
from torch_pfc.optim import SparseSGD

from .inputs import IGNORE
from .tiles import tiles_of

NUM_CLASSES = 9


def padding_of(grad: Tensor) -> set[int]:
    minus_zeros = (grad.values() == 0) & grad.values().signbit()
    assert torch.equal(minus_zeros.any(dim=1), minus_zeros.all(dim=1))
    return set(grad.indices()[0][minus_zeros.all(dim=1)].tolist())


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_row_is_padding_unless_a_micro_batch_scored_it(
    micro_batches: list[tuple[list[int], bool]], set_to_none: bool
) -> None:
    """Over any number of backward passes, and anew after `zero_grad`. Rate 0 scores the labels' classes alone."""
    head = torch_pfc.PartialFC(3, NUM_CLASSES, scale=8.0, sample_rate=0.0, sparse_grad=True)
    optimizer = SparseSGD([head.weight], lr=0.1, weight_decay=0.1)
    scored: set[int] = set()
    named: set[int] = set()
    for labels, is_last in micro_batches:
        index, _ = head.sample(torch.tensor(labels), key=torch.tensor(0))
        assert index is not None
        scored |= set(labels)
        named |= set((index % NUM_CLASSES).tolist())
        head(torch.randn(len(labels), 3), torch.tensor(labels), key=torch.tensor(0)).backward()
        assert head.weight.grad is not None and head.weight.grad.is_coalesced()
        assert set(head.weight.grad.indices()[0].tolist()) == named
        assert padding_of(head.weight.grad) == named - scored
        if is_last:
            before = head.weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            assert set((head.weight != before).any(dim=1).nonzero()[:, 0].tolist()) == scored
            scored, named = set(), set()


def test_compiled_autograd_keeps_padding() -> None:
    head = torch_pfc.PartialFC(3, NUM_CLASSES, scale=8.0, sample_rate=0.0, sparse_grad=True)
    key = torch.tensor(0)

    @torch.compile(backend="aot_eager")
    def backward(embeddings: Tensor, labels: Tensor) -> None:
        head(embeddings, labels, key=key).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            for labels in ([1, 1, 1], [2, 2, 1]):
                backward(torch.randn(3, 3), torch.tensor(labels))
            assert head.weight.grad is not None
            assert padding_of(head.weight.grad) == set(head.weight.grad.indices()[0].tolist()) - {1, 2}
            head.weight.grad = None
    torch.compiler.reset()


def test_a_gradient_given_by_hand_is_added_to() -> None:
    """What was scored before is not known then: no value is lost."""
    head = torch_pfc.PartialFC(3, NUM_CLASSES, scale=8.0, sample_rate=0.0, sparse_grad=True)
    labels, key = torch.tensor([1, 1, 1]), torch.tensor(0)
    head(torch.randn(3, 3), labels, key=key).backward()
    assert head.weight.grad is not None
    rows = head.weight.grad.indices()
    head.weight.grad = torch.sparse_coo_tensor(
        rows, torch.ones(3, 3), (NUM_CLASSES, 3), is_coalesced=True, check_invariants=True
    )
    head(torch.randn(3, 3), labels, key=key).backward()
    values = head.weight.grad.values()[rows[0] != 1]
    assert torch.equal(values, torch.ones_like(values))


def check_coalesce(device: str) -> None:
    zero, minus, one = [0.0, 0.0], [-0.0, -0.0], [1.0, -1.0]
    rows = torch.tensor([[7, 2, 5, 2, 7, 4, 5, 0, 0]], device=device)
    values = torch.tensor([minus, zero, minus, minus, minus, one, one, one, [-1.0, 1.0]], device=device)
    grad = torch.sparse_coo_tensor(rows, values, (NUM_CLASSES, 2), check_invariants=True)
    found = coalesce(grad)
    assert found.is_coalesced() and found.indices().tolist() == [[0, 2, 4, 5, 7]]
    assert found.values().tolist() == [zero, zero, one, one, zero]
    assert padding_of(found) == {7}


def test_duplicates_that_are_padding_add_up_to_padding() -> None:
    check_coalesce("cpu")


@pytest.mark.cuda
def test_duplicates_that_are_padding_add_up_to_padding_on_cuda() -> None:
    """Where PyTorch's own `coalesce` starts from zero, and every accumulation leaves duplicates."""
    check_coalesce("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_sampled", [None, 2, 6])
@pytest.mark.parametrize("factor", [1.0, 1e-12])
def test_no_scored_row_looks_like_padding(dtype: torch.dtype, num_sampled: int | None, factor: float) -> None:
    """Of width 1 a direction has no gradient, a centre of length 0 has none, and a small one underflows: −0.0 or 0.0.

    Sets that padding fills (2 is less than the batch's rows), and sets that have none.
    """
    labels = torch.tensor([1, 1, 7, 1])
    for width in (1, 2):
        weight = -torch.rand(NUM_CLASSES, width).to(dtype)
        weight[::2] = 0
        index, target = None, labels
        if num_sampled is not None:
            index, target = torch.ops.pfc.sample(labels, torch.tensor(0), 0, NUM_CLASSES, num_sampled, IGNORE)
        terms = factor * torch.randn(4, 3)
        with tiles_of(8):
            _, values, rows = torch.ops.pfc.sharded_lse_backward(
                torch.randn(4, width), weight, index, target, True, terms, 1.0, False, True, True
            )
        grad = torch.sparse_coo_tensor(rows[None], values, weight.shape, is_coalesced=True, check_invariants=True)
        expected = set() if index is None else set((index[index >= NUM_CLASSES] - NUM_CLASSES).tolist())
        assert padding_of(grad) == expected and bool(expected) == (num_sampled == 2)
