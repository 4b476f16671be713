"""pfc::sharded_topk and PartialFC.topk: against a dense sort, over ranks, tiles, ties and shards shorter than k."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import torch_pfc
from torch_pfc.ops._group import resolve

from .inputs import Batch, even, make_head, my_rows, random_batch
from .ranks import run_ranks
from .test_ops_gather import ALONE
from .tiles import tiles_of

sharded_topk = torch.ops.pfc.sharded_topk


def dense_topk(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """Sorts all cosines, stably: of equal ones the lower class first."""
    unit = torch.nn.functional.normalize
    cosines = unit(batch.embeddings.float()) @ unit(batch.weight.float()).T
    values, classes = cosines.sort(dim=1, descending=True, stable=True)
    return values[:, :k], classes[:, :k]


def head_topk(batch: Batch, counts: list[int], k: int, tile_elements: int, **options) -> tuple[Tensor, Tensor]:
    head = make_head(batch, torch.float32, **options)
    with tiles_of(tile_elements):
        return head.topk(my_rows(batch.embeddings, counts).float(), k)


def run_topk(world_size: int, batch: Batch, counts: list[int], k: int, tile_elements: int = 1 << 20, **options):
    parts = run_ranks(world_size, _call, (batch, counts, k, tile_elements), options)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _call(arguments, options):
    return head_topk(*arguments, **options)


@settings(max_examples=20)
@given(
    world_size=st.integers(1, 4),
    num_classes=st.integers(1, 30),
    rows_per_rank=st.integers(1, 4),
    tile_elements=st.sampled_from([1, 30, 1 << 20]),
    data=st.data(),
)
def test_equals_a_dense_sort(world_size, num_classes, rows_per_rank, tile_elements, data):
    k = data.draw(st.integers(1, num_classes))  # larger than a shard, often
    batch = random_batch(world_size * rows_per_rank, num_classes, 5, scale=1.0, seed=num_classes)
    found = run_topk(world_size, batch, even(len(batch.labels), world_size), k, tile_elements)
    torch.testing.assert_close(found, dense_topk(batch, k))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("tile_elements", [1, 1 << 20])
def test_of_equal_classes_the_lower_ids_come_first(world_size, tile_elements):
    batch = random_batch(3, 11, 4, scale=1.0, seed=0)
    batch.weight[:] = batch.weight[0]
    _, classes = run_topk(world_size, batch, even(3, world_size), 6, tile_elements)
    assert classes.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_uneven_batches_and_a_rank_without_rows():
    batch = random_batch(5, 12, 4, scale=1.0, seed=1)
    found = run_topk(3, batch, [3, 0, 2], 4, uneven_batches=True)
    torch.testing.assert_close(found, dense_topk(batch, 4))


def test_fewer_classes_than_k_are_followed_by_minus_one():
    values, classes = sharded_topk(torch.eye(2), torch.eye(2), 3, *ALONE)
    assert classes.tolist() == [[0, 1, -1], [1, 0, -1]]
    assert values.tolist() == [[1, 0, -torch.inf]] * 2


def test_negative_values_sort_as_numbers():
    values, classes = sharded_topk(torch.ones(1, 1), torch.tensor([[-1.0], [-3.0], [2.0], [-2.0]]), 4, *ALONE, False)
    assert classes.tolist() == [[2, 0, 3, 1]]
    assert values.tolist() == [[2.0, -1.0, -2.0, -3.0]]


def check_op() -> None:
    group = resolve(None)
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows, num_classes in [(1, 5), (8, 5), (8, 0)]:
            x, w = torch.randn(num_rows * group.size, 4).to(dtype), torch.randn(num_classes, 4)
            torch.library.opcheck(sharded_topk, (x, w, 3, *group))


@pytest.mark.parametrize("world_size", [1, 2])
def test_opcheck(world_size):
    run_ranks(world_size, check_op)


@pytest.mark.parametrize("k", [0, 11])
def test_k_out_of_range_is_named(k):
    head = torch_pfc.PartialFC(4, 10)
    with pytest.raises(ValueError, match=rf"k must lie in \[1, num_classes=10\], got {k}"):
        head.topk(torch.randn(2, 4), k)


def test_a_compiled_scoring_step_equals_eager():
    torch.compiler.reset()
    head = torch_pfc.PartialFC(4, 10)
    embeddings = torch.randn(3, 4)
    compiled = torch.compile(lambda x: head.topk(x, 2), fullgraph=True)
    torch.testing.assert_close(compiled(embeddings), head.topk(embeddings, 2))
