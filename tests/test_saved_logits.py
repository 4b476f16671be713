"""PartialFC(saved_logits_bytes=…): what forward keeps for backward changes time and memory, and no value."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_pfc
from torch_pfc.ops.sharded_lse import sharded_lse_backward

from .inputs import IGNORE, random_batch, run_head
from .test_ops_gather import ALONE
from .test_ops_sharded_lse import draw
from .tiles import tiles_of

pfc = torch.ops.pfc
ALL = 1 << 20


@given(
    num_rows=st.integers(1, 6),
    num_classes=st.integers(0, 12),
    rate=st.sampled_from([None, 0.0, 0.4]),
    normalize=st.booleans(),
    saved_bytes=st.integers(0, 8 * 7 * 13),
    tile_elements=st.sampled_from([1, 15, 1 << 20]),
    sparse_grad=st.booleans(),
)
def test_outputs_and_gradients_are_the_same(
    num_rows: int,
    num_classes: int,
    rate: float | None,
    normalize: bool,
    saved_bytes: int,
    tile_elements: int,
    sparse_grad: bool,
) -> None:
    labels = torch.arange(num_rows) % num_classes if num_classes else torch.full((num_rows,), IGNORE)
    labels[1:2] = IGNORE
    index, target, _ = draw(labels, num_classes, None if rate is None else int(rate * num_classes))
    x = torch.randn(num_rows, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(num_classes, 3, dtype=torch.float64, requires_grad=True)
    operands = (x, w, index, target, normalize, *ALONE, sparse_grad)
    with tiles_of(tile_elements):
        expected = pfc.sharded_lse(*operands)
        *found, logits = pfc.sharded_lse_saving(*operands, saved_bytes)
        num_in_set = num_classes if index is None else len(index)
        size = num_rows + 1  # of a class: its logits, and its length
        assert logits.shape == (min(num_in_set * size, saved_bytes // 8),)
        assert not logits.requires_grad
        assert (logits[len(logits) // size * size :] == 0).all()  # where no more class fits
        before, cotangents = logits.clone(), torch.randn(2, num_rows, dtype=torch.float64)
        cotangents[0].masked_fill_(expected[0].detach().isinf(), 0)
        # Twice: backward changes nothing that it needs.
        gradients = [torch.autograd.grad(found, (x, w), tuple(cotangents), retain_graph=True) for _ in range(2)]
        right = torch.autograd.grad(expected, (x, w), tuple(cotangents))
    torch.testing.assert_close(tuple(found), expected)
    torch.testing.assert_close((gradients[0][0], gradients[0][1].to_dense()), (right[0], right[1].to_dense()))
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(*gradients, strict=True))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)])
def test_what_is_kept_is_what_fits(dtype: torch.dtype, size: int) -> None:
    """Of a class, N logits and its length, in float32 at least. The rest of a head's graph does not depend on it."""
    kept = {}
    for saved_bytes in (0, size - 1, 3 * 6 * size, ALL):
        head = torch_pfc.PartialFC(3, 9, saved_logits_bytes=saved_bytes)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = head(torch.randn(5, 3, dtype=dtype, requires_grad=True), torch.arange(5))
        kept[saved_bytes] = sum(saved.values())
        loss.backward()
    assert [after - kept[0] for after in kept.values()] == [0, 0, 3 * 6 * size, 9 * 6 * size]


@pytest.mark.parametrize("saved_bytes, num_saved", [(0, 0), (4 * 6 - 1, 0), (4 * 6, 1), (4 * 6 * 7 + 3, 7), (ALL, 9)])
def test_backward_multiplies_less_by_what_was_kept(saved_bytes: int, num_saved: int) -> None:
    """The weight's gradient of all 9 classes, and the logits of those without."""
    operands = (torch.randn(5, 3), torch.randn(9, 3), None, torch.arange(5), True)
    *_, logits = pfc.sharded_lse_saving(*operands, *ALONE, False, saved_bytes)
    with FlopCounterMode(display=False) as counter:  # which does not open operators
        sharded_lse_backward._init_fn(*operands, torch.rand(5, 3), 1.0, False, True, False, logits)
    assert counter.get_total_flops() == 2 * 5 * 3 * (9 + 9 - num_saved)


def test_nothing_is_kept_without_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch_pfc.PartialFC(3, 9, saved_logits_bytes=ALL)
    x, labels = torch.randn(5, 3), torch.arange(5)
    with torch.no_grad():
        expected = head(x, labels)
        monkeypatch.setattr(pfc, "sharded_lse_saving", None)
        assert torch.equal(head(x, labels), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.4, "sparse_grad": True}, {"sample_rate": 0.0}])
def test_a_heads_step_is_the_same_on_any_number_of_ranks(world_size: int, options: dict[str, Any]) -> None:
    batch = random_batch(12, 10, 3, scale=8.0, seed=1)
    expected = run_head(world_size, batch, options=options, key=1)
    for saved_bytes in (3 * 8 * 13, ALL):
        found = run_head(world_size, batch, options=options | {"saved_logits_bytes": saved_bytes}, key=1)
        torch.testing.assert_close(vars(found), vars(expected))


def test_checkpointing_and_two_uses_of_one_head() -> None:
    batch = random_batch(6, 10, 3, scale=8.0, seed=2)
    results = []
    for saved_bytes, use_reentrant in [(0, None), (ALL, None), (ALL, True), (ALL, False)]:
        torch.manual_seed(0)
        head = torch_pfc.PartialFC(3, 10, sample_rate=0.4, saved_logits_bytes=saved_bytes, dtype=torch.float64)
        x = batch.embeddings.clone().requires_grad_()
        for half in (slice(0, 3), slice(3, 6)):
            run = (x[half], batch.labels[half])
            loss = head(*run) if use_reentrant is None else checkpoint(head, *run, use_reentrant=use_reentrant)
            loss.backward()
        results.append((x.grad, head.weight.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_outputs_alias_nothing_and_inputs_stay() -> None:
    batch = random_batch(4, 6, 3, scale=1.0, seed=2)
    inputs = (batch.embeddings, batch.weight, batch.labels)
    before = [t.clone() for t in inputs]
    for saved_bytes in (0, ALL):
        outputs = pfc.sharded_lse_saving(inputs[0], inputs[1], None, inputs[2], False, *ALONE, False, saved_bytes)
        storages = [t.untyped_storage()._cdata for t in (*inputs, *outputs)]
        assert len(set(storages)) == 6
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


class Step(torch.nn.Module):
    """Room for the logits of 5 rows in 7 classes, of 20 in one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch_pfc.PartialFC(3, 10, scale=8.0, sample_rate=0.8, saved_logits_bytes=4 * 7 * 6)

    def forward(self, embeddings: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        return self.head(embeddings, labels, key=key)


def test_the_batch_may_be_dynamic() -> None:
    """In one compiled graph, and in one exported program."""
    step, key = Step(), torch.tensor(3)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=graphs, fullgraph=True, dynamic=True)
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    example = (torch.randn(5, 3), torch.arange(5), key)
    program = torch.export.export(step, example, dynamic_shapes=(rows, rows, None), strict=True).module()
    for num_rows in (5, 7, 20):
        x, labels = torch.randn(num_rows, 3), torch.arange(num_rows) % 10
        results = []
        for run in (step, compiled, program):
            leaf = x.clone().requires_grad_()
            loss = run(leaf, labels, key)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
        torch.testing.assert_close(results[1:], results[:1] * 2)
    assert graphs.frame_count == 1
