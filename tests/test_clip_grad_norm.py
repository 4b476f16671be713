"""Clipping: one norm over all ranks' shards, sparse or dense, with everything replicated counted once."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_pfc

from .inputs import COSFACE, S1_COSFACE, error_of, even, make_head, my_rows, s1
from .ranks import run_ranks
from .test_cuda import no_sync

NORM_TYPES = [2.0, 1.0, 3.5, math.inf, 0.0, -math.inf]
# The second head's last shard is empty on four ranks.
HEADS = (10, 3)
DIM = 3


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter_with(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


def backbone() -> list[nn.Parameter]:
    """Replicated parameters, the same on every rank; the second has no gradient."""
    return [parameter_with(draw(4, 5, seed=1)), nn.Parameter(torch.zeros(2)), parameter_with(draw(5, seed=2))]


def head_grads() -> list[Tensor]:
    return [draw(num_classes, DIM, seed=num_classes) for num_classes in HEADS]


def twice_each_row(grad: Tensor) -> Tensor:
    """`grad` as a COO tensor that is not coalesced: each row in two parts, of another norm together than apart."""
    index = torch.arange(len(grad)).repeat(2)[None]
    return torch.sparse_coo_tensor(index, torch.cat([3 * grad, -2 * grad]), grad.shape, check_invariants=False)


def dense_grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense()


def sharded(is_sparse: bool, **options: Any) -> list[nn.Parameter]:
    """Weights of heads, with this rank's rows of `head_grads`."""
    weights = []
    for grad in head_grads():
        head = torch_pfc.PartialFC(DIM, len(grad), **options)
        rows = grad[head.class_start :][: head.num_local_classes]
        head.weight.grad = twice_each_row(rows) if is_sparse else rows
        weights.append(head.weight)
    return weights


def clip_everything(norm_type: float, is_sparse: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The norm, and the clipped gradients of what is replicated and of this rank's shards."""
    replicas, shards = backbone(), sharded(is_sparse)
    norm = torch_pfc.clip_grad_norm_([shards[0], *replicas, shards[1]], 0.7, norm_type)
    return norm, [dense_grad(p) for p in replicas if p.grad is not None], [dense_grad(p) for p in shards]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_shards_are_clipped_as_the_whole_model_is(norm_type: float, world_size: int, is_sparse: bool) -> None:
    answers = run_ranks(world_size, clip_everything, norm_type, is_sparse)
    replicas, whole = backbone(), [parameter_with(grad) for grad in head_grads()]
    expected = torch.nn.utils.clip_grad_norm_([*replicas, *whole], 0.7, norm_type)
    for norm, replica_grads, _ in answers:
        assert torch.equal(norm, answers[0][0]) and norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(replica_grads, [dense_grad(p) for p in replicas if p.grad is not None])
    for i, parameter in enumerate(whole):
        torch.testing.assert_close(torch.cat([shards[i] for _, _, shards in answers]), parameter.grad)


def three_and_four() -> list[float]:
    head = torch_pfc.PartialFC(2, 2)
    norms = []
    for replicas in ([], [parameter_with(torch.tensor([0.0, 12.0]))]):
        head.weight.grad = torch.tensor([[[3.0, 0.0]], [[0.0, -4.0]]])[dist.get_rank()]
        norms.append(float(torch_pfc.clip_grad_norm_([head.weight, *replicas], 1.0)))
        norms.append(float(head.weight.grad.norm()))
    return norms


def test_pb_23_two_shards_of_norm_3_and_4() -> None:
    """And a replica of norm 12, which both ranks have, counts once: 3, 4 and 12 make 13."""
    first, second = run_ranks(2, three_and_four)
    assert first == pytest.approx([5, 0.6, 13, 3 / 13], rel=1e-5)
    assert second == pytest.approx([5, 0.8, 13, 4 / 13], rel=1e-5)


def norm_of_s1(sparse_grad: bool) -> float:
    batch, counts = s1(), even(8, dist.get_world_size())
    head = make_head(batch, **COSFACE, sparse_grad=sparse_grad)
    head(my_rows(batch.embeddings, counts), my_rows(batch.labels, counts)).backward()
    return float(torch_pfc.clip_grad_norm_(head.weight, 1.0))


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_norm_of_a_step_does_not_depend_on_the_number_of_ranks(world_size: int, sparse_grad: bool) -> None:
    assert run_ranks(world_size, norm_of_s1, sparse_grad) == pytest.approx([S1_COSFACE[2]] * world_size, rel=1e-9)


class CountGathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.pfc.gather.default
        return func(*args, **(kwargs or {}))


def norm_with_missing_gradients(frozen_rank: int) -> tuple[Tensor, int]:
    shards = sharded(is_sparse=False)
    if dist.get_rank() == frozen_rank:
        for weight in shards:
            weight.requires_grad_(False).grad = None
    with CountGathers() as gathers:
        norm = torch_pfc.clip_grad_norm_(shards, 1.0)
    return norm, gathers.count


@pytest.mark.parametrize("frozen_rank", [0, 1, 3])
def test_a_rank_without_gradients_takes_part(frozen_rank: int) -> None:
    answers = run_ranks(4, norm_with_missing_gradients, frozen_rank)
    left = []
    for grad in head_grads():
        shards = list(grad.split(math.ceil(len(grad) / 4)))
        left += [shard.flatten() for rank, shard in enumerate(shards) if rank != frozen_rank]
    for norm, num_gathers in answers:
        torch.testing.assert_close(norm, torch.cat(left).norm())
        assert num_gathers == 1


def norms_in_groups() -> list[float]:
    """A head in one half of the world, then that and one over the whole world."""
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    inner, outer = torch_pfc.PartialFC(1, 2, group=half), torch_pfc.PartialFC(1, 4)
    norms = []
    for weights in ([inner.weight], [outer.weight, inner.weight]):
        inner.weight.grad = torch.tensor([[[3.0]], [[4.0]], [[5.0]], [[12.0]]])[dist.get_rank()]
        outer.weight.grad = torch.tensor([[float(dist.get_rank())]])
        norms.append(float(torch_pfc.clip_grad_norm_(weights, 100.0)))
    return norms


def test_each_head_is_summed_over_its_own_group() -> None:
    first, second = [5, math.sqrt(25 + 14)], [13, math.sqrt(169 + 14)]
    for found, expected in zip(run_ranks(4, norms_in_groups), [first, first, second, second], strict=True):
        assert found == pytest.approx(expected)


def clip_beside_fsdp(norm_type: float, foreach: bool | None) -> tuple[Tensor, list[Tensor], Tensor]:
    """On three ranks, fully_shard leaves the last one nothing of some parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, DIM))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(draw(6, 4, seed=3)).square().sum().backward()
    shard, _ = sharded(is_sparse=True)
    norm = torch_pfc.clip_grad_norm_([*model.parameters(), shard], 0.5, norm_type, foreach=foreach)
    grads = []
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        grads.append(parameter.grad.full_tensor())
    return norm, grads, dense_grad(shard)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_backbone_under_fully_shard(norm_type: float, foreach: bool | None) -> None:
    answers = run_ranks(3, clip_beside_fsdp, norm_type, foreach)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, DIM))
    model(draw(6, 4, seed=3)).square().sum().backward()
    whole = parameter_with(head_grads()[0])
    expected = torch.nn.utils.clip_grad_norm_([*model.parameters(), whole], 0.5, norm_type)
    for norm, grads, _ in answers:
        assert torch.equal(norm, answers[0][0])
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(grads, [dense_grad(parameter) for parameter in model.parameters()])
    torch.testing.assert_close(torch.cat([shard for _, _, shard in answers]), whole.grad)


def clip_distributed(norm_type: float) -> tuple[Tensor, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2))
    grad = draw(5, 3, seed=4)
    parameters = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, placements))
        parameter.grad = distribute_tensor(grad, mesh, placements)
        parameters.append(parameter)
    # What sequence parallelism leaves on a replicated parameter: each rank's part of a sum.
    parameters[-1].grad = DTensor.from_local((dist.get_rank() % 2 + 1) * grad / 3, mesh, [Replicate(), Partial()])
    norm = torch_pfc.clip_grad_norm_(parameters, 2.0, norm_type)
    return norm, [p.grad.full_tensor() for p in parameters]  # type: ignore[union-attr]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_tensors_on_meshes_of_two_dimensions(norm_type: float) -> None:
    whole = [parameter_with(draw(5, 3, seed=4)) for _ in range(3)]
    expected = torch.nn.utils.clip_grad_norm_(whole, 2.0, norm_type)
    for norm, grads in run_ranks(4, clip_distributed, norm_type):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(grads, [dense_grad(parameter) for parameter in whole])


def clip_nonfinite(value: float) -> tuple[tuple[str, str], float, list[float]]:
    shard, replica = sharded(is_sparse=True)[0], parameter_with(torch.ones(2))
    if dist.get_rank() == 1:
        assert shard.grad is not None
        shard.grad._values()[0, 0] = value
    error = error_of(lambda: torch_pfc.clip_grad_norm_([shard, replica], 1.0, error_if_nonfinite=True))
    untouched = dense_grad(replica).tolist()
    return error, float(torch_pfc.clip_grad_norm_([shard, replica], 1.0)), untouched + dense_grad(replica).tolist()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked(value: float) -> None:
    for (kind, message), norm, replica in run_ranks(2, clip_nonfinite, value):
        assert kind == "RuntimeError" and f"norm of order 2.0 must be finite, got {value}" in message
        assert replica[:2] == [1, 1]
        if math.isinf(value):
            assert norm == math.inf and replica[2:] == [0, 0]
        else:
            assert math.isnan(norm) and all(map(math.isnan, replica[2:]))


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=40),
    norm_type=st.sampled_from([2, *NORM_TYPES, -2.0]),
    max_norm=st.floats(1e-3, 1e3),
    foreach=st.sampled_from([None, True, False]),
    is_alone=st.booleans(),
)
def test_dense_float32_alone_is_torchs_to_the_bit(
    shapes: list[list[int]], norm_type: float, max_norm: float, foreach: bool | None, is_alone: bool
) -> None:
    if math.isinf(norm_type) or norm_type < 0:  # torch refuses to take the norm of nothing
        shapes = [shape for shape in shapes if 0 not in shape] or [[2]]
    grads = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    theirs, ours = ([parameter_with(grad.clone()) for grad in grads] for _ in range(2))
    arguments = (max_norm, norm_type, False, foreach)
    expected = torch.nn.utils.clip_grad_norm_(theirs[0] if is_alone else theirs, *arguments)
    assert torch.equal(torch_pfc.clip_grad_norm_(ours[0] if is_alone else ours, *arguments), expected)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(dense_grad(a), dense_grad(b))


def test_a_head_in_a_process_alone_is_any_parameter() -> None:
    heads = [torch_pfc.PartialFC(3, 50) for _ in range(20)]
    parameters = [parameter for head in heads for parameter in (head.weight, parameter_with(draw(7, seed=1)))]
    for i, head in enumerate(heads):
        head.weight.grad = draw(50, 3, seed=i)
    copies = [parameter_with(dense_grad(parameter).clone()) for parameter in parameters]
    assert torch.equal(torch_pfc.clip_grad_norm_(parameters, 1.0), torch.nn.utils.clip_grad_norm_(copies, 1.0))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_gradients_is_taken_in_float32(dtype: torch.dtype, foreach: bool | None) -> None:
    """In float16 it would be inf, and the gradients 0."""
    half, double = parameter_with(torch.full((9,), 5e4, dtype=dtype)), parameter_with(torch.full((1,), 1e5).double())
    alone = torch_pfc.clip_grad_norm_(half, 1e9, foreach=foreach)
    assert alone.dtype == torch.float32 and float(alone) == pytest.approx(float(dense_grad(half).double().norm()))
    norm = torch_pfc.clip_grad_norm_([half, double], 1.0, foreach=foreach)
    assert norm.dtype == torch.float64 and float(norm) == pytest.approx(math.hypot(1e5, float(alone)))
    after = torch.cat([dense_grad(half).double(), dense_grad(double)])
    assert float(after.norm()) == pytest.approx(1, rel=1e-2)


def test_sparse_gradients_are_scaled_in_place_as_they_are() -> None:
    """Their rows of padding stay -0.0, which optimizers know them by; the mark as coalesced stays, also if not set."""
    head = torch_pfc.PartialFC(4, 100, sample_rate=0.1, sparse_grad=True)
    head(draw(20, 4, seed=5), torch.arange(20) % 3).backward()
    grad = head.weight.grad
    assert grad is not None
    before = grad.clone()
    norm = torch_pfc.clip_grad_norm_(head.parameters(), 1e-3)
    padding = (before.values() == 0) & before.values().signbit()
    assert padding.all(1).any() and not padding.all()
    assert head.weight.grad is grad and grad.is_coalesced() and torch.equal(grad.indices(), before.indices())
    assert torch.equal(padding, (grad.values() == 0) & grad.values().signbit())
    torch.testing.assert_close(grad.values(), before.values() * 1e-3 / (norm + 1e-6))

    embedding = parameter_with(torch.zeros(3, 2))
    values = torch.tensor([[1.0, 0.0], [2.0, 4.0]])
    embedding.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3, 2), check_invariants=False)
    assert torch_pfc.clip_grad_norm_([embedding], 1.0) == 5
    assert not embedding.grad.is_coalesced()
    torch.testing.assert_close(dense_grad(embedding)[1], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nothing_to_clip(norm_type: float) -> None:
    """An empty gradient has no norm of order inf by itself, and changes none."""
    empty = parameter_with(torch.zeros(0, 3))
    empty_sparse = parameter_with(torch.zeros(3, 2))
    empty_sparse.grad = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 2), (3, 2), check_invariants=False)
    for parameters in ([], [nn.Parameter(torch.ones(3))], [empty, empty_sparse]):
        assert torch.equal(torch_pfc.clip_grad_norm_(parameters, 1.0, norm_type), torch.tensor(0.0))
    four = parameter_with(torch.tensor([-4.0]))
    assert torch_pfc.clip_grad_norm_([empty, four, empty_sparse], 1.0, norm_type, error_if_nonfinite=True) == 4
    assert float(dense_grad(four)) == pytest.approx(-1)


def test_a_generator_is_read_once() -> None:
    parameters = [parameter_with(torch.full((4,), 2.0))]
    assert torch_pfc.clip_grad_norm_((p for p in parameters), 1.0) == 4
    assert float(dense_grad(parameters[0]).norm()) == pytest.approx(1)
    with pytest.warns(UserWarning, match="empty generator") as caught:
        torch_pfc.clip_grad_norm_((p for p in parameters[1:]), 1.0)
    assert caught[0].filename == __file__


@pytest.mark.cuda
def test_no_sync_and_the_cpus_result_on_cuda() -> None:
    grads = [draw(5, 3, seed=6), twice_each_row(draw(4, 2, seed=7)).coalesce(), draw(7, seed=8).half()]
    results = []
    for device in ("cpu", "cuda"):
        parameters = [nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=device)) for grad in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.to(device, copy=True)
        with no_sync():
            norm = torch_pfc.clip_grad_norm_(parameters, 0.5)
        results.append([norm.cpu(), *(dense_grad(parameter).cpu() for parameter in parameters)])
    torch.testing.assert_close(results[1], results[0])
