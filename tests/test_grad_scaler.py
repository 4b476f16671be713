"""Loss scaling: one verdict on overflow for the group, whatever a rank has gradients of; half precision converges."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from .ranks import run_ranks
from .test_clip_grad_norm import CountGathers
from .test_cuda import no_sync

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sparse_sgd": torch_pfc.optim.SparseSGD,
    "fused_sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr, fused=True),
    "fused_adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True),
}
SPARSE = ["sgd", "sparse_sgd"]


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    grad: Tensor | None,
    max_norm: float | None = None,
) -> bool:
    """Whether a step with `grad`, times the scale, moved `parameter`. With `max_norm`, it is clipped in between."""
    before = parameter.detach().clone()
    factor = scaler.scale(torch.ones(()))
    parameter.grad = None if grad is None else grad * factor
    if max_norm is not None:
        scaler.unscale_(optimizer)
        torch_pfc.clip_grad_norm_(parameter, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(parameter, before)


def shard_grad(head: torch_pfc.PartialFC, fill: float, is_sparse: bool) -> Tensor:
    """All ones, with `fill` as the last entry."""
    grad = torch.ones(head.num_local_classes, head.embedding_dim)
    if grad.numel():
        grad[-1, -1] = fill
    return grad.to_sparse(1) if is_sparse else grad


def run_with_overflow(
    name: str, is_sparse: bool, fill: float, bad_ranks: list[int], clip: bool
) -> tuple[list[bool], dict[str, Any], Tensor]:
    head = torch_pfc.PartialFC(2, 3)  # the last of four ranks has no class
    optimizer = OPTIMIZERS[name]([head.weight], lr=0.1)
    scaler = torch_pfc.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    start = head.weight.detach().clone()
    moved = []
    for step in range(4):
        bad = step == 1 and dist.get_rank() in bad_ranks
        grad = shard_grad(head, fill if bad else 1.0, is_sparse)
        moved.append(scaled_step(scaler, optimizer, head.weight, grad, 3.0 if clip else None))
    return moved, scaler.state_dict(), start - head.weight.detach()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fill, bad_ranks", [(math.inf, [2]), (math.nan, [0, 1])])
@pytest.mark.parametrize("name, is_sparse", [*((n, False) for n in OPTIMIZERS), *((n, True) for n in SPARSE)])
def test_an_overflow_on_some_ranks_skips_the_step_on_all(
    name: str, is_sparse: bool, fill: float, bad_ranks: list[int], clip: bool
) -> None:
    answers = run_ranks(4, run_with_overflow, name, is_sparse, fill, bad_ranks, clip)
    for moved, state, _ in answers[:3]:
        assert moved == [True, False, True, True]
        assert state["scale"] == 8 and state["_growth_tracker"] == 0  # halved once, and doubled after two good steps
        assert state == answers[3][1]
    if "sgd" in name:  # three steps of gradient 1, in all 6 entries of the shards: norm √6, and 3 clips nothing
        torch.testing.assert_close(torch.cat([change for _, _, change in answers]), torch.full((3, 2), 0.3))


def ranks_without_gradients(owners: list[int], fill: float) -> tuple[list[bool], float, int]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch_pfc.GradScaler("cpu", init_scale=8.0)
    grad = torch.tensor([fill, 1.0, 1.0]) if dist.get_rank() in owners else None
    with CountGathers() as gathers:
        moved = scaled_step(scaler, optimizer, parameter, grad)
    return [moved], scaler.get_scale(), gathers.count


@pytest.mark.parametrize("fill", [1.0, math.inf])
@pytest.mark.parametrize("owners", [[1], [0, 2], []])
def test_a_rank_without_gradients_takes_part(owners: list[int], fill: float) -> None:
    """As with an empty shard and a frozen backbone; torch's own scaler raises there."""
    overflow = owners != [] and math.isinf(fill)
    for rank, answer in enumerate(run_ranks(3, ranks_without_gradients, owners, fill)):
        assert answer == ([rank in owners and not overflow], 4.0 if overflow else 8.0, 1)


def two_optimizers_in_groups(unscale: bool) -> tuple[list[bool], float, int]:
    """An overflow on rank 3, in the second optimizer of the second half of the world."""
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    scaler = torch_pfc.GradScaler("cpu", init_scale=8.0, group=half)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    factor = scaler.scale(torch.ones(()))
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.full((2,), math.nan if i and dist.get_rank() == 3 else 1.0) * factor
    with CountGathers() as gathers:
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    return [bool(parameter.any()) for parameter in parameters], scaler.get_scale(), gathers.count


@pytest.mark.parametrize("unscale", [False, True])
def test_a_verdict_in_each_group(unscale: bool) -> None:
    """For each optimizer, or for all that were unscaled before the first step: they may have been clipped together."""
    good, bad = ([True, True], 8.0, 2), ([not unscale, False], 4.0, 2)
    assert run_ranks(4, two_optimizers_in_groups, unscale) == [good, good, bad, bad]


def step_beside_fsdp(bad_part: str, bad_rank: int) -> tuple[bool, bool, float, Tensor]:
    """One optimizer for a backbone under fully_shard and a head, and an overflow in a shard of one of them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    head = torch_pfc.PartialFC(2, 4)
    start, head_start = model.weight.full_tensor(), head.weight.detach().clone()  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([*model.parameters(), head.weight], lr=0.1)
    scaler = torch_pfc.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    head.weight.grad = shard_grad(head, 1.0, False)
    if dist.get_rank() == bad_rank and bad_part == "head":
        head.weight.grad[0] = math.inf
    if dist.get_rank() == bad_rank and bad_part == "backbone":
        model.weight.grad.to_local().fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    change = start - model.weight.full_tensor()  # type: ignore[attr-defined]
    return bool(change.any()), not torch.equal(head.weight, head_start), scaler.get_scale(), change


@pytest.mark.parametrize(
    "bad_part, bad_rank", [("none", 0), ("head", 0), ("head", 1), ("backbone", 0), ("backbone", 1)]
)
def test_a_backbone_under_fully_shard_in_the_same_optimizer(bad_part: str, bad_rank: int) -> None:
    is_good = bad_part == "none"
    for *answer, change in run_ranks(2, step_beside_fsdp, bad_part, bad_rank):
        assert answer == ([True, True, 8.0] if is_good else [False, False, 4.0])
        torch.testing.assert_close(change, torch.full((2, 3), 0.1 if is_good else 0.0))


def disabled_steps() -> int:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch_pfc.GradScaler("cpu", enabled=False)
    with CountGathers() as gathers:
        assert scaled_step(scaler, optimizer, parameter, torch.full((3,), math.inf))
    assert scaler.state_dict() == {} and scaler.get_scale() == 1
    return gathers.count


def test_disabled_it_steps_without_a_collective() -> None:
    assert run_ranks(2, disabled_steps) == [0, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_alone_is_torchs(name: str) -> None:
    """Every step, scale and growth, over a run with overflows in it."""
    runs = []
    for scaler_type in (torch.amp.GradScaler, torch_pfc.GradScaler):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = OPTIMIZERS[name]([parameter], lr=0.1)
        scaler = scaler_type("cpu", 4.0, 3.0, 0.25, 2, True)
        run: list[Any] = []
        for step in range(12):
            grad = torch.tensor([1.0, math.nan if step in (3, 4, 9) else -2.0, step])
            scaled_step(scaler, optimizer, parameter, grad, 1.0 if step % 2 else None)
            run.append((parameter.tolist(), scaler.state_dict()))
        scaler.scale(torch.ones(()))
        scaler.update(new_scale=5.0)
        runs.append((run, scaler.get_scale()))
    assert runs[0] == runs[1]


def test_torchs_complaints_stay() -> None:
    scaler = torch_pfc.GradScaler("cpu")
    nothing, half = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())
    optimizers = [torch.optim.SGD([parameter]) for parameter in (nothing, half)]  # both alive: torch knows them by id
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaled_step(scaler, optimizers[0], nothing, None)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled_step(scaler, optimizers[1], half, torch.ones(2).half())


def saved_and_restored() -> list[tuple[bool, dict]]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    original = torch_pfc.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for _ in range(2):
        scaled_step(original, optimizer, parameter, torch.ones(2))
    loaded = torch_pfc.GradScaler("cpu")
    loaded.load_state_dict(original.state_dict())
    bad = torch.full((2,), math.inf if dist.get_rank() == 1 else 1.0)
    answers = []
    for scaler in (original, loaded, pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        grads = (torch.ones(2), bad)
        moved = [scaled_step(scaler, optimizer, parameter, grad) for grad in grads] if scaler is not original else []
        answers.append((moved, scaler.state_dict()))
    return answers  # type: ignore[return-value]


def test_it_is_saved_and_restored() -> None:
    """Two good steps before, one after: the third doubles the scale; an overflow on rank 1 then halves it."""
    for (_, before), *restored in run_ranks(2, saved_and_restored):
        assert before["scale"] == 8 and before["_growth_tracker"] == 2
        for moved, state in restored:
            assert moved == [True, False]
            assert state == before | {"_growth_tracker": 0}


NUM_CLASSES, DIM, STEPS = 64, 32, 100


def noisy_prototypes(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    prototypes = torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        labels = torch.randint(NUM_CLASSES, (32,), generator=generator)
        yield prototypes[labels] + 0.3 * torch.randn(32, 16, generator=generator), labels


def train(dtype: torch.dtype, sparse_grad: bool) -> tuple[list[float], dict[str, Any], int]:
    """Losses, the scaler's state, and how many steps were skipped."""
    torch.manual_seed(0)
    backbone = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, DIM)))
    head = torch_pfc.PartialFC(DIM, NUM_CLASSES, scale=16.0, sample_rate=0.5, sparse_grad=sparse_grad)
    optimizers = [
        torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9),
        torch_pfc.optim.SparseSGD(head.parameters(), lr=0.1, momentum=0.9),
    ]
    # So high that float16 overflows at first, in the head on one rank or another.
    scaler = torch_pfc.GradScaler("cpu", init_scale=2.0**20, enabled=dtype == torch.float16)
    losses, num_skipped = [], 0
    for step, (features, labels) in enumerate(noisy_prototypes(dist.get_rank())):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = head(backbone(features), labels, key=torch.tensor(step))
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch_pfc.clip_grad_norm_([*backbone.parameters(), *head.parameters()], 5.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.update()
        num_skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    assert head.weight.dtype == torch.float32 and head.weight.isfinite().all()
    return losses, scaler.state_dict(), num_skipped


@pytest.mark.parametrize("sparse_grad", [False, True])
def test_half_precision_converges_as_float32_does(sparse_grad: bool) -> None:
    final = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        (losses, state, num_skipped), other = run_ranks(2, train, dtype, sparse_grad)
        assert (losses, state, num_skipped) == other
        final[dtype] = sum(losses[-10:]) / 10
        assert final[dtype] < 0.25 * losses[0]
        assert (num_skipped > 0) == (dtype == torch.float16)
    for dtype in (torch.bfloat16, torch.float16):
        assert final[dtype] == pytest.approx(final[torch.float32], rel=0.2)


@pytest.mark.cuda
def test_no_sync_but_torchs_own_on_cuda() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)  # any other asks the device whether to step
    scaler = torch_pfc.GradScaler("cuda", init_scale=8.0)
    for fill, expected in [(1.0, -0.1), (math.inf, -0.1), (1.0, -0.2)]:
        grad, factor = torch.full((3,), fill, device="cuda"), torch.ones((), device="cuda")
        with no_sync():
            parameter.grad = grad * scaler.scale(factor)
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), expected))
    assert scaler.get_scale() == 4
