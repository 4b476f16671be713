"""What a compiler sees of a sampled step, the same at every world size."""

import pytest
from expecttest import assert_expected_inline

from .graphs import FAKE_WORLD_SIZE, SPARSE, compiled_graphs, exported_graphs, graphs_at, text


@pytest.mark.parametrize("world_size", [2, FAKE_WORLD_SIZE])
def test_forward(world_size: int) -> None:
    """Directions of the rows; gather of rows and labels, whose range is asserted; sample; sharded_lse; margin and
    softplus on [B]; one number a rank gathered and summed."""
    forward, _ = graphs_at(world_size, compiled_graphs)
    assert_expected_inline(
        text(forward, world_size),
        """\
input -> [B, D]
input -> [B]
input -> [K, D]
input -> []
aten.view -> [B]
aten.linalg_vector_norm -> [B, 1]
aten.detach -> [B, 1]
aten.le.Scalar -> [B, 1]
aten.masked_fill.Scalar -> [B, 1]
aten.div.Tensor -> [B, D]
aten.mul.Tensor -> [B, D]
pfc.gather -> [N, D]
pfc.gather -> [N]
aten.ge.Scalar -> [N]
aten.lt.Scalar -> [N]
aten.bitwise_and.Tensor -> [N]
aten.eq.Scalar -> [N]
aten.bitwise_or.Tensor -> [N]
aten.all -> []
aten._assert_async.msg
pfc.sample -> [S], [N]
pfc.sharded_lse -> [B], [B]
aten.detach -> [B]
aten.div.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.mul.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.softplus -> [B]
aten.ne.Scalar -> [B]
aten.scalar_tensor -> []
aten.where.self -> [B]
aten.sum -> []
aten.view -> [1]
pfc.gather -> [W]
aten.sum -> []
aten.ne.Scalar -> [N]
aten.sum -> []
aten.clamp_min -> []
aten.div.Tensor -> []""",
    )


@pytest.mark.parametrize("world_size", [2, FAKE_WORLD_SIZE])
def test_backward(world_size: int) -> None:
    """Reduce-scatter of the number; softplus and margin; gather of three numbers a row; the tiles' gradients;
    reduce-scatter of the rows' gradients; that of their directions."""
    _, backward = graphs_at(world_size, compiled_graphs)
    assert_expected_inline(
        text(backward, world_size),
        """\
input -> [B, D]
input -> [K, D]
input -> [B, 1]
input -> [B, 1]
input -> [B, 1]
input -> [N, D]
input -> [S]
input -> [N]
input -> [B]
input -> [B]
input -> [B]
input -> []
input -> []
aten.div.Tensor -> []
aten.expand -> [W]
aten.clone -> [W]
_c10d_functional.reduce_scatter_tensor -> [1]
_c10d_functional.wait_tensor -> [1]
aten.view -> []
aten.expand -> [B]
aten.scalar_tensor -> []
aten.where.self -> [B]
aten.softplus_backward -> [B]
aten.neg -> [B]
aten.mul.Tensor -> [B]
aten.div.Tensor -> [B]
aten.detach -> [B]
aten.stack -> [B, 3]
pfc.gather -> [N, 3]
pfc.sharded_lse_backward -> [N, D], [K, D], [0]
_c10d_functional.reduce_scatter_tensor -> [B, D]
_c10d_functional.wait_tensor -> [B, D]
aten.mul.Tensor -> [B, D]
aten.div.Tensor -> [B, D]
aten.div.Tensor -> [B, D]
aten.neg -> [B, D]
aten.mul.Tensor -> [B, D]
aten.div.Tensor -> [B, D]
aten.sum.dim_IntList -> [B, 1]
aten.masked_fill.Scalar -> [B, 1]
aten.detach -> [B, 1]
aten.div.Tensor -> [B, D]
aten.eq.Scalar -> [B, 1]
aten.masked_fill.Scalar -> [B, D]
aten.mul.Tensor -> [B, D]
aten.add.Tensor -> [B, D]""",
    )


@pytest.mark.parametrize("world_size", [2, FAKE_WORLD_SIZE])
def test_backward_with_sparse_grad(world_size: int) -> None:
    """The same, but for the rows of the weight's gradient and the tensor that holds them."""
    _, dense = graphs_at(world_size, compiled_graphs)
    _, sparse = graphs_at(world_size, compiled_graphs, SPARSE)
    before, after = text(dense, world_size).splitlines(), text(sparse, world_size).splitlines()
    assert [line for line in before if line not in after] == ["pfc.sharded_lse_backward -> [N, D], [K, D], [0]"]
    assert [line for line in after if line not in before] == [
        "pfc.sharded_lse_backward -> [N, D], [S, D], [S]",
        "aten.unsqueeze -> [1, S]",
        "aten._sparse_coo_tensor_with_dims_and_tensors -> sparse [K, D]",
    ]


@pytest.mark.parametrize("world_size", [2, FAKE_WORLD_SIZE])
def test_exported_program(world_size: int) -> None:
    exported, _ = graphs_at(world_size, exported_graphs)
    assert_expected_inline(
        text(exported, world_size),
        """\
input -> [K, D]
input -> [B, D]
input -> [B]
input -> []
aten.reshape -> [B]
aten._assert_tensor_metadata
aten.to.dtype -> [B]
aten._assert_tensor_metadata
aten.to.dtype -> [B, D]
aten.linalg_vector_norm -> [B, 1]
aten.le.Scalar -> [B, 1]
aten.masked_fill.Scalar -> [B, 1]
aten.div.Tensor -> [B, D]
aten.mul.Tensor -> [B, D]
aten._assert_tensor_metadata
aten.to.dtype -> [B, D]
pfc.gather -> [N, D]
pfc.gather -> [N]
aten.ge.Scalar -> [N]
aten.lt.Scalar -> [N]
aten.__and__.Tensor -> [N]
aten.eq.Scalar -> [N]
aten.__or__.Tensor -> [N]
aten.all -> []
aten._assert_async.msg
pfc.sample -> [S], [N]
pfc.sharded_lse -> [B], [B]
aten.div.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.mul.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.softplus -> [B]
aten.ne.Scalar -> [B]
aten.where.ScalarOther -> [B]
aten.sum -> []
aten.reshape -> [1]
pfc.gather -> [W]
aten.sum -> []
aten.ne.Scalar -> [N]
aten.sum -> []
aten.clamp_min -> []
aten.div.Tensor -> []""",
    )


@pytest.mark.parametrize("world_size", [2, FAKE_WORLD_SIZE])
def test_decomposed_program(world_size: int) -> None:
    """The operators are primitives of every decomposition; PyTorch's own parts of the tail become smaller ones."""
    _, decomposed = graphs_at(world_size, exported_graphs)
    assert_expected_inline(
        text(decomposed, world_size),
        """\
input -> [K, D]
input -> [B, D]
input -> [B]
input -> []
aten.view -> [B]
aten._assert_tensor_metadata
aten._assert_tensor_metadata
aten.linalg_vector_norm -> [B, 1]
aten.le.Scalar -> [B, 1]
aten.scalar_tensor -> []
aten.where.self -> [B, 1]
aten.div.Tensor -> [B, D]
aten.mul.Tensor -> [B, D]
aten._assert_tensor_metadata
pfc.gather -> [N, D]
pfc.gather -> [N]
aten.ge.Scalar -> [N]
aten.lt.Scalar -> [N]
aten.bitwise_and.Tensor -> [N]
aten.eq.Scalar -> [N]
aten.bitwise_or.Tensor -> [N]
aten.logical_not -> [N]
aten.any.dims -> []
aten.logical_not -> []
aten._assert_async.msg
pfc.sample -> [S], [N]
pfc.sharded_lse -> [B], [B]
aten.div.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.mul.Tensor -> [B]
aten.sub.Tensor -> [B]
aten.exp -> [B]
aten.log1p -> [B]
aten.gt.Scalar -> [B]
aten.where.self -> [B]
aten.ne.Scalar -> [B]
aten.scalar_tensor -> []
aten.where.self -> [B]
aten.sum.dim_IntList -> []
aten.view -> [1]
pfc.gather -> [W]
aten.sum.dim_IntList -> []
aten.ne.Scalar -> [N]
aten.sum.dim_IntList -> []
aten.clamp -> []
aten.div.Tensor -> []""",
    )


def test_one_rank_has_the_graphs_of_many_without_their_collectives() -> None:
    for capture in (compiled_graphs, exported_graphs):
        for alone, many in zip(graphs_at(1, capture), graphs_at(2, capture), strict=True):
            expected = [
                line.replace("N", "B").replace("W", "1")
                for line in text(many, 2).splitlines()
                if not line.startswith(("_c10d_functional.", "aten.clone"))
            ]
            assert text(alone, 1).splitlines() == expected
