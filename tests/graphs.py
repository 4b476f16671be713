"""Compiled and exported graphs of a head as text and as lists of nodes, for tests to look at."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_pfc

from .ranks import run_ranks

# Sizes that no two letters share, except N and B on one rank.
B, D, K, SAMPLE_RATE = 4, 7, 25_000, 0.2
S = int(SAMPLE_RATE * K)
FAKE_WORLD_SIZE = 1024

Options = tuple[tuple[str, Any], ...]  # a dict's items, hashable
SAMPLED: Options = (("sample_rate", SAMPLE_RATE),)
SPARSE: Options = (*SAMPLED, ("sparse_grad", True))


@dataclass(frozen=True)
class Node:
    """What a node of a graph computes: the operator, or "input", and the shapes of its tensors in numbers."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    is_sparse: bool = False

    def text(self, letters: dict[int, str]) -> str:
        shapes = ", ".join(f"[{', '.join(letters.get(size, str(size)) for size in shape)}]" for shape in self.shapes)
        return f"{self.op} -> {'sparse ' if self.is_sparse else ''}{shapes}" if shapes else self.op


Graph = list[Node]


def text(graph: Graph, world_size: int) -> str:
    """One line a node that makes a tensor or nothing; arithmetic on sizes is left out."""
    letters = {K: "K", S: "S", D: "D", world_size * B: "N", B: "B"} | ({world_size: "W"} if world_size > 1 else {})
    return "\n".join(node.text(letters) for node in graph)


def nodes(module: GraphModule) -> Graph:
    return [node for fx_node in module.graph.nodes for node in _nodes(fx_node)]


def _nodes(node: FxNode) -> Graph:
    if node.op not in ("placeholder", "call_function"):
        return []
    name = "input" if node.op == "placeholder" else _name(node.target)
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [v for v in values if isinstance(v, Tensor)]
    if name == "getitem" or (not tensors and value is not None):
        return []
    shapes = tuple(tuple(_number(size) for size in tensor.shape) for tensor in tensors)
    return [Node(name, shapes, any(tensor.is_sparse for tensor in tensors))]


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return target.__name__


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


class Step(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.head = torch_pfc.PartialFC(D, K * world_size, **options)

    def forward(self, embeddings: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        return self.head(embeddings, labels, key=key)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, D, requires_grad=True), torch.arange(B), torch.tensor(0)


def compiled_graphs(dynamic: bool, options: dict[str, Any]) -> tuple[Graph, Graph]:
    """The forward and the backward graph of a step, of which there is one each: fullgraph."""
    return _compiled_graphs(dynamic, options, {})


def decomposed_graphs(dynamic: bool, options: dict[str, Any]) -> tuple[Graph, Graph]:
    """The same in PyTorch's core operators."""
    return _compiled_graphs(dynamic, options, core_aten_decompositions())


def _compiled_graphs(dynamic: bool, options: dict[str, Any], decompositions: Any) -> tuple[Graph, Graph]:
    torch.compiler.reset()
    found: dict[str, list[Graph]] = {"forward": [], "backward": []}

    def record(direction: str):
        def compiler(module: GraphModule, _: Any) -> Any:
            found[direction].append(nodes(module))
            return make_boxed_func(lambda *inputs: _zeros(module))

        return compiler

    backend = aot_autograd(fw_compiler=record("forward"), bw_compiler=record("backward"), decompositions=decompositions)
    step = torch.compile(Step(**options), backend=backend, fullgraph=True)
    embeddings, labels, key = inputs()
    if dynamic:
        torch._dynamo.mark_dynamic(embeddings, 0)
        torch._dynamo.mark_dynamic(labels, 0)
    step(embeddings, labels, key).backward()
    torch.compiler.reset()
    (forward,), (backward,) = found["forward"], found["backward"]
    return forward, backward


def _zeros(module: GraphModule) -> list[Any]:
    """In place of the outputs of a graph that is only looked at: many ranks' rows would take seconds."""

    def zeros(node: FxNode | None) -> Any:
        value = None if node is None else node.meta["val"]
        if isinstance(value, Tensor):
            shape = [_number(size) for size in value.shape]
            return torch.zeros(shape, dtype=value.dtype, layout=value.layout)
        return None if value is None else _number(value)

    outputs: Any = module.graph.output_node().args[0]
    return [zeros(node) for node in outputs]


def exported_graphs(dynamic: bool, options: dict[str, Any]) -> tuple[Graph, Graph]:
    """The exported program's graph, and the same with PyTorch's default decompositions."""
    rows = {0: torch.export.Dim("rows", min=2, max=1 << 16)} if dynamic else None
    program = torch.export.export(Step(**options), inputs(), dynamic_shapes=(rows, rows, None), strict=True)
    with warnings.catch_warnings():
        # PyTorch's run_decompositions copies its own deprecated classes.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        decomposed = program.run_decompositions()
    return nodes(program.graph_module), nodes(decomposed.graph_module)


@functools.cache
def graphs_at(
    world_size: int,
    capture: Callable[[bool, dict[str, Any]], tuple[Graph, Graph]],
    options: Options = SAMPLED,
    dynamic: bool = False,
) -> tuple[Graph, Graph]:
    """What `capture` gives on real ranks, the same on all; at FAKE_WORLD_SIZE with a fake process group, here."""
    if world_size < FAKE_WORLD_SIZE:
        first, *others = run_ranks(world_size, capture, dynamic, dict(options), timeout=120)
        assert all(other == first for other in others), "ranks have different graphs"
        return first
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        return capture(dynamic, dict(options))
    finally:
        dist.destroy_process_group()
