"""What must never be in a graph of a step."""

import pytest

from .graphs import (
    FAKE_WORLD_SIZE,
    SAMPLED,
    SPARSE,
    B,
    D,
    Graph,
    K,
    S,
    compiled_graphs,
    decomposed_graphs,
    exported_graphs,
    graphs_at,
)

# These ask for values on the host, or have shapes that depend on values.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item")


def nodes_with_both(graph: Graph, some: set[int], others: set[int]) -> Graph:
    return [node for node in graph if any(some & set(shape) and others & set(shape) for shape in node.shapes)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("capture", [compiled_graphs, decomposed_graphs, exported_graphs])
@pytest.mark.parametrize("options", [SAMPLED, SPARSE, ()], ids=["sampled", "sparse", "full"])
@pytest.mark.parametrize("world_size", [1, 2, FAKE_WORLD_SIZE])
def test_no_graph_holds_what_it_must_not(world_size, options, capture, dynamic) -> None:
    """No host sync, no shape that depends on values, no logits; and if sampled with sparse_grad, no second [K, D].

    A static and a dynamic batch have the same graph.
    """
    graphs = graphs_at(world_size, capture, options, dynamic)
    for graph in graphs:
        assert not [node.op for node in graph if any(name in node.op for name in FORBIDDEN)]
        assert not nodes_with_both(graph, {B * world_size}, {K, S})
        if options == SPARSE:
            assert not [node for node in graph if (K, D) in node.shapes and not node.is_sparse and node.op != "input"]
            assert sum((K, D) in node.shapes for node in graph if node.op == "input") <= 1
    assert graphs == graphs_at(world_size, capture, options)
